"""What training computes with, beside the products, norms and activations that serving has as well. All of it
has gradients; those of products, norms and activations are where these are.

The extension's kernels run for float32 on the CPU, everything else takes ``reference_training``.
"""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference_training
from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension, reads_quantized


def matmul(x: mx.array, w: mx.array) -> mx.array:
    """``x @ w``: x [..., K], w [K, N]; returns [..., N] in the dtype of x. What is narrower is widened.

    >>> matmul(mx.ones((2, 3)), mx.ones((3, 4))).shape
    (2, 4)
    """
    cpu = extension()
    if cpu is None or x.dtype not in FLOAT_TYPES or w.dtype not in FLOAT_TYPES or w.ndim != 2 or not w.size:
        return reference_training.matmul(x, w)
    y: mx.array = cpu.matmul(x, w)
    return y


def adapted_linear(
    x: mx.array,
    a: mx.array,
    b: mx.array,
    scale: float,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
) -> mx.array:
    """``x @ w.T + scale * (x @ a) @ b``: a layer with frozen weights and a low-rank adapter (LoRA, Hu et al.
    2021, arXiv:2106.09685), with gradients for x, a and b.

    x float32 [..., K]; a [K, R], b [R, N]; w dense [N, K], or quantized as in ``quantized_matmul``. Returns
    float32 [..., N]. Asking for a gradient of w raises ValueError.

    >>> x, w = mx.ones((1, 2)), mx.zeros((3, 2))
    >>> adapted_linear(x, mx.ones((2, 1)), mx.ones((1, 3)), 0.5, w).tolist()
    [[1.0, 1.0, 1.0]]
    """
    cpu = extension()
    is_dense = scales is None and w.dtype in FLOAT_TYPES
    is_read = is_dense or reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    are_floats = x.dtype == a.dtype == b.dtype == mx.float32
    if cpu is None or not is_read or not are_floats or w.ndim != 2:
        return reference_training.adapted_linear(
            x, a, b, scale, w, scales, biases, group_size=group_size, bits=bits, mode=mode
        )
    y: mx.array = cpu.adapted_matmul(x, a, b, scale, w, scales, biases, group_size, bits, mode)
    return y


def rotate_heads(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    """Heads [B, H, L, D], each turned by the position of its token: positions int32 [L], or [B, L]. The
    gradient turns back.

    The result lies in memory as [B, L, H, D]: joining its heads again copies nothing.

    >>> rope = Rope(mx.array([1.0]))
    >>> rotate_heads(mx.array([[[[1.0, 0.0]]]]), mx.array([0], dtype=mx.int32), rope).tolist()
    [[[[1.0, 0.0]]]]
    """
    cpu = extension()
    if cpu is None or x.dtype != mx.float32:
        return reference_training.rotate_heads(x, positions, rope)
    y: mx.array = cpu.rotate_heads(
        x,
        positions,
        rope.inverse_frequencies.astype(mx.float32),
        rope.position_scale,
        rope.input_scale,
        rope.is_interleaved,
    )
    return y


def causal_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    segments: mx.array | None = None,
) -> mx.array:
    """Attention of each token to itself and those before it, with gradients for q, k and v; without an array
    of L times L. Forward and gradient go over blocks of keys (FlashAttention, Dao et al. 2022,
    arXiv:2205.14135); of the forward only the logarithms of the softmax's sums are kept.

    q float32 [B, H, L, D], k [B, G, L, D] and v [B, G, L, Dv], G dividing H. ``window``: of those, the last
    so many. ``softcap``: scores s become ``softcap * tanh(s / softcap)``. ``segments`` int32 [B, L]: a token
    sees its own segment alone, which is the run of equal ids around it, so that rows may be packed. Returns
    [B, H, L, Dv], in memory as [B, L, H, Dv].

    >>> ones = mx.ones((1, 1, 3, 2))
    >>> causal_attention(ones, ones, ones, scale=1.0).shape
    (1, 1, 3, 2)
    """
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"causal_attention: {name} must be positive, got {value}")
    cpu = extension()
    if cpu is None or not q.dtype == k.dtype == v.dtype == mx.float32:
        return reference_training.causal_attention(
            q, k, v, scale=scale, window=window, softcap=softcap, segments=segments
        )
    y: mx.array = cpu.causal_attention(q, k, v, segments, scale, window or 0, softcap or 0.0)
    return y


def cross_entropy_head(
    hidden: mx.array,
    targets: mx.array,
    weights: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
    logit_scale: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> mx.array:
    """The output head and its loss in one: the sum over t of ``weights[t]`` times the cross entropy of
    ``targets[t]`` under the softmax of the logits ``logit_scale * hidden[t] @ w.T``; with ``softcap`` logits
    z become ``softcap * tanh(z / softcap)``. Logits are made for some tokens and some of the vocabulary at a
    time, never all of them; rows of weight 0 cost nothing.

    hidden float32 [T, K]; targets int32 [T], from 0 to V - 1 where weights are not 0; weights float32 [T]; w
    dense [V, K], or quantized as in ``quantized_matmul``. Returns a float32 scalar.

    The gradient for ``hidden`` is computed along with the loss, in the same pass over the vocabulary;
    without ``with_gradient`` the loss takes half of the time, and asking for that gradient raises ValueError.
    A dense head that trains takes another pass.

    >>> loss = cross_entropy_head(
    ...     mx.ones((1, 2)), mx.array([0], dtype=mx.int32), mx.ones((1,)), mx.zeros((4, 2))
    ... )
    >>> round(loss.item(), 4)
    1.3863
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"cross_entropy_head: softcap must be positive, got {softcap}")
    cpu = extension()
    is_dense = scales is None and w.dtype in FLOAT_TYPES
    is_read = is_dense or reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    if cpu is None or not is_read or hidden.dtype != mx.float32 or w.ndim != 2:
        return reference_training.cross_entropy_head(
            hidden,
            targets,
            weights,
            w,
            scales,
            biases,
            group_size=group_size,
            bits=bits,
            mode=mode,
            logit_scale=logit_scale,
            softcap=softcap,
        )
    loss: mx.array = cpu.cross_entropy_head(
        hidden,
        targets,
        weights,
        w,
        scales,
        biases,
        group_size,
        bits,
        mode,
        logit_scale,
        softcap or 0.0,
        with_gradient,
    )
    return loss
