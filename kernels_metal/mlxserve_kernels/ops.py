"""The kernels: one public function an op. Each runs the C++ extension where ``dispatch`` picked it and the
arguments are of a kind that it has; all else runs the twin in ``reference``, that is mlx's own ops.

The extension has: activations of float32, float16 or bfloat16, the last two computed in float32 and rounded
once, at the end; affine weights of 2, 3, 4, 5, 6 or 8 bits with groups of 32, 64 or 128; mxfp4, mxfp8 and
nvfp4 weights (K a multiple of 32); dense weights and KV pools of float32, float16 or bfloat16, and quantized
KV pools. There the result of a row does not depend on the other rows of the call, on its place among them, on
page placement or on the number of threads: its bits are equal. quantized_matmul, tiled_matmul, linear,
rms_norm, silu_mul and gelu_mul have gradients; one of quantized weights raises ValueError.

All functions are lazy as mlx ops are. The extension raises ValueError at the call for wrong shapes and
dtypes, and RuntimeError when the result is evaluated for wrong *values* of index arrays, such as a slot
outside the pool (``reference`` cannot see those: there the caller must be right).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import FLOAT_TYPES, TILE_ROWS, extension, reads_quantized
from mlxserve_kernels.dispatch import num_threads as num_threads
from mlxserve_kernels.experts import Activation, ExpertWeights


def implementation() -> str:
    """``cpu-avx512``, ``cpu-avx2``, ``cpu-portable`` or ``reference``."""
    cpu = extension()
    return "reference" if cpu is None else f"cpu-{cpu.isa()}"


def supports_steps_in_flight() -> bool:
    """Whether pages may be written while an earlier step still runs. If not, a write during a step copies
    the whole pool: evaluate each step before the next one is built."""
    return extension() is not None


def release_thread() -> None:
    """Free what MLX keeps for the calling thread, which is about to end. Its compiled functions hold Python
    objects: freed by the thread's own end, which may come after Python's, they would abort the process.
    Without the extension there is no way to free them."""
    cpu = extension()
    if cpu is not None:
        cpu.clear_compile_cache()


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
    transpose: bool = True,
) -> mx.array:
    """``x @ dequantize(w).T``, or ``x @ dequantize(w)`` without ``transpose``.

    x [..., K], or [..., N]; w uint32 [N, K * bits / 32], the first value in the lowest bits; scales, biases
    [N, K / group_size]. Returns [..., N], or [..., K], in the dtype of x. A weight is ``scale * q + bias``,
    both steps in float32, as ``mx.dequantize`` gives it; sums are exact float32 fma. Each form is the other's
    gradient; neither makes a dequantized copy of w.
    Other bits, groups, modes and activation dtypes run ``mx.quantized_matmul``, whatever is selected.

    >>> w, scales, biases = mx.quantize(mx.random.normal((64, 128)), group_size=32, bits=4)
    >>> quantized_matmul(mx.ones((3, 128)), w, scales, biases, group_size=32, bits=4).shape
    (3, 64)
    >>> quantized_matmul(mx.ones((3, 64)), w, scales, biases, group_size=32, bits=4, transpose=False).shape
    (3, 128)
    """
    cpu = extension()
    is_read = reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    if cpu is None or not is_read or x.dtype not in FLOAT_TYPES or w.ndim != 2:
        return reference.quantized_matmul(
            x, w, scales, biases, group_size=group_size, bits=bits, mode=mode, transpose=transpose
        )
    y: mx.array = cpu.quantized_matmul(x, w, scales, biases, group_size, bits, mode, transpose)
    return y


def linear(x: mx.array, w: mx.array) -> mx.array:
    """``x @ w.T``: x [..., K], w [N, K]; returns [..., N] in the dtype of x. What is narrower is widened.

    >>> linear(mx.ones((3, 8)), mx.ones((5, 8), dtype=mx.bfloat16)).shape
    (3, 5)
    """
    cpu = extension()
    if cpu is None or x.dtype not in FLOAT_TYPES or w.dtype not in FLOAT_TYPES or w.ndim != 2:
        return reference.linear(x, w)
    y: mx.array = cpu.linear(x, w)
    return y


def embed_rows(
    ids: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
) -> mx.array:
    """Rows ``ids`` of a table, float32 [..., K]: dense w [N, K], or quantized as in ``quantized_matmul``.

    ids int32 of any shape, from -N (negative ones count from the end, as mlx has it) to N - 1.

    >>> embed_rows(mx.array([[1]], dtype=mx.int32), mx.array([[1.0], [2.0]], dtype=mx.float16)).tolist()
    [[[2.0]]]
    """
    cpu = extension()
    is_dense = scales is None and w.dtype in FLOAT_TYPES
    is_read = reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    if cpu is None or ids.dtype != mx.int32 or w.ndim != 2 or not (is_dense or is_read):
        return reference.embed_rows(ids, w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    rows: mx.array = cpu.embed_rows(ids, w, scales, biases, group_size, bits, mode)
    return rows


def greedy_tokens(logits: mx.array) -> mx.array:
    """The lowest of the best ids of each row, -1 where a row has a NaN: logits [R, V], returns int32 [R].

    >>> greedy_tokens(mx.array([[0.0, 2.0, 2.0], [1.0, float("nan"), 0.0]])).tolist()
    [1, -1]
    """
    cpu = extension()
    if cpu is None or logits.dtype != mx.float32:
        return reference.greedy_tokens(logits)
    tokens: mx.array = cpu.greedy_tokens(logits)
    return tokens


def sample_tokens(
    logits: mx.array,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    keys: Sequence[tuple[int, int]],
) -> mx.array:
    """A token drawn from each row: logits [R, V], parameters for each of the R rows; returns int32 [R].

    The filters act on the distribution as it is without the temperature, one after the other: ``top_k`` (0:
    all) keeps the best, an equal logit with a lower id being the better; ``top_p`` (1: all) those before
    which less than that share of what is left comes; ``min_p`` (0: all) those with at least that share of the
    best one's probability. The best token always stays. Then ``(logit - best) / temperature`` plus Gumbel
    noise decides; a temperature of 0 takes the lowest of the best ids, whatever the filters. So does a row
    whose best logit is infinite. A row with a NaN gives -1.

    The noise of a token comes from its id and the row's key (two uint32) by an integer hash, so a row's
    result depends on its own logits and parameters alone. ``reference`` has the same hash but scores in
    float32, the extension in float64: their tokens may differ where two scores or the border of a filter are
    within about 1e-5 of each other. Raises ValueError for parameters that are negative or NaN.

    >>> sample_tokens(mx.array([[0.0, 9.0, 9.0]]), temperature=[1.0], top_k=[1], top_p=[1.0], min_p=[0.0],
    ...               keys=[(1, 2)]).tolist()
    [1]
    """
    cpu = extension()
    if cpu is None or logits.dtype != mx.float32:
        return reference.sample_tokens(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, keys=keys
        )
    tokens: mx.array = cpu.sample_tokens(logits, temperature, top_k, top_p, min_p, keys)
    return tokens


@overload
def rms_norm(x: mx.array, weight: mx.array | None, eps: float, residual: None = None) -> mx.array: ...
@overload
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, residual: mx.array
) -> tuple[mx.array, mx.array]: ...
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, residual: mx.array | None = None
) -> mx.array | tuple[mx.array, mx.array]:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis: x [..., K], weight [K] or None (ones).
    With a residual, of the shape and dtype of x, the norm of ``x + residual``, and that sum as well.

    >>> rms_norm(mx.array([[3.0, 3.0]]), mx.array([1.0, 2.0]), 0.0).tolist()
    [[1.0, 2.0]]
    >>> normed, total = rms_norm(mx.array([[3.0, 3.0]]), None, 0.0, mx.array([[1.0, 1.0]]))
    >>> normed.tolist(), total.tolist()
    ([[1.0, 1.0]], [[4.0, 4.0]])
    """
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rms_norm: residual must be {x.dtype} {list(x.shape)} as x is, "
            f"got {residual.dtype} {list(residual.shape)}"
        )
    cpu = extension()
    is_read = x.dtype in FLOAT_TYPES and (weight is None or weight.dtype in FLOAT_TYPES)
    if cpu is None or not is_read:
        return reference.rms_norm(x, weight, eps, residual)
    y: mx.array | tuple[mx.array, mx.array] = (
        cpu.rms_norm(x, weight, eps) if residual is None else cpu.add_rms_norm(x, residual, weight, eps)
    )
    return y


def silu_mul(gate: mx.array, up: mx.array) -> mx.array:
    """``gate * sigmoid(gate) * up`` of equal shapes and dtypes.

    >>> silu_mul(mx.array([0.0]), mx.array([2.0])).tolist()
    [0.0]
    """
    return _gated(gate, up, "silu")


def gelu_mul(gate: mx.array, up: mx.array, *, approx: Literal["none", "tanh"]) -> mx.array:
    """``gelu(gate) * up`` of equal shapes and dtypes: with ``none`` gelu is
    ``z * (1 + erf(z / sqrt(2))) / 2``, with ``tanh`` its approximation by tanh, as ``nn.gelu`` and
    ``nn.gelu_approx`` have them.

    >>> gelu_mul(mx.array([0.0, 100.0]), mx.array([2.0, 2.0]), approx="tanh").tolist()
    [0.0, 200.0]
    """
    if approx not in ("none", "tanh"):
        raise ValueError(f"gelu_mul: approx must be none or tanh, got {approx!r}")
    return _gated(gate, up, "gelu" if approx == "none" else "gelu_tanh")


def _gated(gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must have one shape and dtype, got {gate.dtype} {list(gate.shape)} and "
            f"{up.dtype} {list(up.shape)}"
        )
    cpu = extension()
    if cpu is None or gate.dtype not in FLOAT_TYPES:
        return reference.gated(gate, up, activation)
    y: mx.array = cpu.gated(gate, up, getattr(cpu.Activation, activation))
    return y


def can_tile(
    scales: mx.array | None,
    biases: mx.array | None,
    num_rows: int,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
) -> bool:
    """Whether ``pack_tiles`` takes these weights here, and kernels for tiles are what runs."""
    cpu = extension()
    is_read = reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    has_tiles = mode == "affine" and bits in (4, 8) and num_rows % TILE_ROWS == 0
    return cpu is not None and bool(cpu.has_tiles()) and is_read and has_tiles


def pack_tiles(w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int) -> mx.array:
    """Affine weights of 4 or 8 bits (see ``quantized_matmul``) in the order in which the integer kernels read
    them: uint8 [N / 16, K / group_size, bytes], evaluated. Nothing is rounded. Needs ``can_tile``."""
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    tiles: mx.array = cpu.pack_tiles(w, scales, biases, group_size, bits)
    return tiles


def unpack_tiles(
    tiles: mx.array, *, group_size: int, bits: int, scale_dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """What ``pack_tiles`` was given: w, scales, biases."""
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    parts: tuple[mx.array, mx.array, mx.array] = cpu.unpack_tiles(tiles, group_size, bits, scale_dtype)
    return parts


def tiled_matmul(
    x: mx.array, tiles: mx.array, *, group_size: int, bits: int, scale_dtype: mx.Dtype
) -> mx.array:
    """``quantized_matmul`` with weights in tiles: x [..., K], returns [..., N] in the dtype of x. The
    gradient of x is that of ``quantized_matmul``, in float32.

    Activations become integers, 32 values sharing a power of two, and products are summed exactly; a block's
    sum is rounded to float32 once. By default the integers have 23 bits, and results are nearer to the true
    ones than float32 sums are (see docs/decisions.md); ``MLXSERVE_CPU_MATMUL`` makes them 15 or 7 bits. A
    block that holds an infinity or a NaN gives NaN.
    """
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    y: mx.array = cpu.tiled_matmul(x, tiles, group_size, bits, scale_dtype)
    return y


def tiled_rows(
    ids: mx.array, tiles: mx.array, *, group_size: int, bits: int, scale_dtype: mx.Dtype
) -> mx.array:
    """``embed_rows`` of weights in tiles."""
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    rows: mx.array = cpu.tiled_rows(ids, tiles, group_size, bits, scale_dtype)
    return rows


def lora_delta(x: mx.array, a: mx.array, b: mx.array, slots: mx.array, scales: mx.array) -> mx.array:
    """What low-rank adapters add to a product of rows that have different ones: row t of the result is
    ``scales[s] * (x[t] @ a[s]) @ b[s]`` with ``s = slots[t]``, and exactly 0 for slot -1.

    x [T, K]; a [S, K, R] and b [S, R, N] of one dtype; slots int32 [T], from -1 to S - 1; scales float32 [S].
    Adapters of smaller rank are padded with zeros. Returns [T, N] in the dtype of x.

    >>> ones = mx.ones((2, 4, 1))
    >>> slots, scales = mx.array([1, -1], dtype=mx.int32), mx.array([1.0, 0.5])
    >>> lora_delta(mx.ones((2, 4)), ones, mx.ones((2, 1, 3)), slots, scales).tolist()
    [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    """
    cpu = extension()
    if cpu is None or x.dtype != mx.float32 or a.dtype not in FLOAT_TYPES or a.dtype != b.dtype:
        return reference.lora_delta(x, a, b, slots, scales)
    y: mx.array = cpu.lora_delta(x, a, b, slots, scales)
    return y


def resize_rows(a: mx.array, num_rows: int) -> mx.array:
    """A copy of the first ``num_rows`` of a [N, ...], zeros behind where N is smaller; evaluated. The
    extension puts it into large pages, which are read faster from end to end: for weights and pools.

    >>> resize_rows(mx.array([1.0, 2.0]), 3).tolist()
    [1.0, 2.0, 0.0]
    """
    cpu = extension()
    resized: mx.array = reference.resize_rows(a, num_rows) if cpu is None else cpu.resize_rows(a, num_rows)
    mx.eval(resized)
    return resized


def gather_matmul(x: mx.array, ids: mx.array, weights: ExpertWeights) -> mx.array:
    """The product of each row with the matrix of each of its experts: ``y[..., j, :]`` is that with expert
    ``ids[..., j]``.

    ids int32 or uint32 [..., top_k], from 0 to E - 1; x [..., K], or one row a choice, [..., top_k, K].
    Returns [..., top_k, N] in the dtype of x; with the extension the bits of ``quantized_matmul`` and
    ``linear``. Each expert's weights are read once, whatever the number of its rows.

    >>> experts = ExpertWeights(mx.ones((4, 2, 8)) * mx.arange(4)[:, None, None])
    >>> gather_matmul(mx.ones((1, 8)), mx.array([[3, 0]], dtype=mx.int32), experts).tolist()
    [[[24.0, 24.0], [0.0, 0.0]]]
    """
    cpu = extension()
    if cpu is None or x.dtype not in FLOAT_TYPES or not weights.is_supported:
        return reference.gather_matmul(x, ids, weights)
    y: mx.array = cpu.gather_matmul(x, ids, weights.native(cpu))
    return y


def gated_experts(
    x: mx.array,
    ids: mx.array,
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    activation: Activation = "silu",
    shares: mx.array | None = None,
) -> mx.array:
    """``down(activation(gate(x)) * up(x))`` by each expert of each row: [..., top_k, N]. With ``shares``
    (float32, of the shape of ids) their sum times these, in the order of ids: [..., N].

    x [..., K], ids as in ``gather_matmul``; gate and up [E, M, K], down [E, N, M]. ``silu`` is
    ``z * sigmoid(z)``, ``gelu_tanh`` as ``nn.gelu_approx`` has it, ``gelu`` as ``nn.gelu``. Returns the dtype
    of x.

    >>> ones = ExpertWeights(mx.ones((2, 4, 4)))
    >>> gated_experts(mx.ones((3, 4)), mx.zeros((3, 2), dtype=mx.int32), ones, ones, ones).shape
    (3, 2, 4)
    """
    cpu = extension()
    is_read = gate.is_supported and up.is_supported and down.is_supported
    is_float = x.dtype in FLOAT_TYPES and (shares is None or shares.dtype == mx.float32)
    if cpu is None or not is_float or not is_read:
        return reference.gated_experts(x, ids, gate, up, down, activation=activation, shares=shares)
    y: mx.array = cpu.gated_experts(
        x,
        ids,
        shares,
        gate.native(cpu),
        up.native(cpu),
        down.native(cpu),
        getattr(cpu.Activation, activation),
    )
    return y


def route(logits: mx.array, top_k: int, *, is_normalized: bool) -> tuple[mx.array, mx.array]:
    """The ``top_k`` largest of each row, largest first and of equal ones the first: their ids, int32
    [..., top_k], and shares, [..., top_k] in the dtype of logits [..., E]: their part of the softmax over the
    row, or, ``is_normalized``, over the chosen. The shares of a row with a NaN are NaN.

    >>> ids, shares = route(mx.array([[0.0, 3.0, 3.0]]), 2, is_normalized=True)
    >>> ids.tolist(), shares.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    cpu = extension()
    if cpu is None or logits.dtype != mx.float32:
        return reference.route(logits, top_k, is_normalized=is_normalized)
    result: tuple[mx.array, mx.array] = cpu.route(logits, top_k, is_normalized)
    return result


def write_pages(
    k_pool: mx.array,
    v_pool: mx.array,
    k: mx.array,
    v: mx.array,
    slot_mapping: mx.array,
    *,
    kv_bits: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Write rows of keys and values to their slots; returns the pools' new handles.

    k_pool [P, H, D, page_size], v_pool [P, H, page_size, Dv]: two buffers, contiguous, never the same;
    k [T, H, D], v [T, H, Dv]: converted to the pool's dtype; slot_mapping int32 [T]: row t goes to page
    ``slot // page_size``, slot ``slot % page_size``. Slots of one call must differ from each other.
    With ``kv_bits`` 8 or 4 the pools are uint8 [P, H, bytes] (see ``quantized_pages``), D and Dv multiples of
    32, page_size one of 16: each row is rounded alone, so what it becomes depends on nothing beside it.

    Contract: from here on only the new handles are read. With the extension they share the pools' memory
    and a reader scheduled earlier sees the old content, one scheduled later the new: steps may be in flight.
    ``reference`` writes in place only while nothing else holds the pools (see supports_steps_in_flight).

    >>> pool = mx.zeros((2, 1, 4, 1))
    >>> row = mx.ones((1, 1, 1))
    >>> keys, _ = write_pages(pool, mx.zeros((2, 1, 4, 1)), row, row, mx.array([6], dtype=mx.int32))
    >>> keys[1, 0].tolist()
    [[0.0], [0.0], [1.0], [0.0]]
    """
    cpu = extension()
    if cpu is None:
        return reference.write_pages(k_pool, v_pool, k, v, slot_mapping, kv_bits=kv_bits)
    written: tuple[mx.array, mx.array] = cpu.write_pages(k_pool, v_pool, k, v, slot_mapping, _bits(kv_bits))
    return written


def copy_pages(
    k_pool: mx.array, v_pool: mx.array, source_ids: mx.array, target_ids: mx.array
) -> tuple[mx.array, mx.array]:
    """Copy whole pages (copy-on-write); returns the pools' new handles, as ``write_pages`` does.

    source_ids, target_ids int32 [C]. No target may be a source or another target of the same call.

    >>> pool, other = mx.array([1.0, 2.0]).reshape(2, 1, 1, 1), mx.zeros((2, 1, 1, 1))
    >>> first, second = mx.array([0], dtype=mx.int32), mx.array([1], dtype=mx.int32)
    >>> copy_pages(pool, other, first, second)[0].flatten().tolist()
    [1.0, 1.0]
    """
    cpu = extension()
    if cpu is None:
        return reference.copy_pages(k_pool, v_pool, source_ids, target_ids)
    copied: tuple[mx.array, mx.array] = cpu.copy_pages(k_pool, v_pool, source_ids, target_ids)
    return copied


def paged_attention(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    block_tables: mx.array,
    q_starts: mx.array,
    kv_lens: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    kv_bits: int | None = None,
) -> mx.array:
    """Causal attention of several sequences over keys and values in pages. Returns [T, H, Dv], dtype of q.

    q [T, H, D]; pools [P, H_kv, D, page_size] and [P, H_kv, page_size, Dv], H a multiple of H_kv (head h
    reads kv head ``h // (H / H_kv)``); block_tables int32 [S, max_pages]; q_starts int32 [S + 1], from 0,
    ascending, at most T; kv_lens int32 [S].
    Rows ``q_starts[s]:q_starts[s + 1]`` belong to sequence s and are the last of its ``kv_lens[s]`` tokens:
    their keys have been written. The row at position p sees positions 0 to p, with ``window`` only the last
    ``window`` of them (p - window + 1 to p). Position j is slot ``j % page_size`` of page
    ``block_tables[s, j // page_size]``; entries and slots beyond are never read. Rows of no sequence are 0.

    A score is ``(q * scale) . k``, with ``softcap`` then ``softcap * tanh(score / softcap)``; ``sinks`` [H]
    adds one logit a head to the softmax's denominator. Softmax in float32, online over blocks of keys at
    fixed positions. Quantized pools (``kv_bits``, see ``write_pages``) stand for the float32 values that they
    hold; the extension multiplies by the integers, and by their scales once a group.

    >>> keys, values = mx.ones((1, 1, 8, 4)), mx.ones((1, 1, 4, 8))
    >>> def index(*ids): return mx.array(ids, dtype=mx.int32)
    >>> paged_attention(
    ...     mx.ones((3, 2, 8)), keys, values, index(0).reshape(1, 1), index(0, 3), index(3), scale=1.0
    ... ).shape
    (3, 2, 8)
    """
    cpu = extension()
    if cpu is None:
        return reference.paged_attention(
            q,
            k_pool,
            v_pool,
            block_tables,
            q_starts,
            kv_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            kv_bits=kv_bits,
        )
    sinks = None if sinks is None else sinks.astype(mx.float32)
    output: mx.array = cpu.paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        q_starts,
        kv_lens,
        scale,
        window or 0,
        softcap or 0.0,
        sinks,
        _bits(kv_bits),
    )
    return output


def _bits(kv_bits: int | None) -> int:
    """For the extension, where 0 stands for pools of floats."""
    if kv_bits == 0:
        raise ValueError("kv_bits must be 8 or 4, got 0")
    return kv_bits or 0
