"""The kernels: one public function an op. Each runs the C++ extension where ``dispatch`` picked it and the
arguments are of a kind that it has; all else runs the twin in ``reference``, that is mlx's own ops.

The extension has: float32 activations; affine weights of 2, 3, 4, 5, 6 or 8 bits with groups of 32, 64 or
128; mxfp4, mxfp8 and nvfp4 weights (K a multiple of 32); dense weights and KV pools of float32, float16 or
bfloat16. There the result of a row does not depend on the other rows of the call, on its place among them, on
page placement or on the number of threads: its bits are equal. quantized_matmul, linear, rms_norm and
silu_mul have gradients, by mlx's own ops; one of quantized weights raises ValueError.

All functions are lazy as mlx ops are. The extension raises ValueError at the call for wrong shapes and
dtypes, and RuntimeError when the result is evaluated for wrong *values* of index arrays, such as a slot
outside the pool (``reference`` cannot see those: there the caller must be right).
"""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension, reads_quantized
from mlxserve_kernels.dispatch import num_threads as num_threads


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
) -> mx.array:
    """``x @ dequantize(w).T``.

    x [..., K]; w uint32 [N, K * bits / 32], the first value in the lowest bits; scales, biases
    [N, K / group_size]. Returns [..., N] in the dtype of x. A weight is ``scale * q + bias``, both steps in
    float32, as ``mx.dequantize`` gives it; sums are exact float32 fma.
    Other bits, groups, modes and activation dtypes run ``mx.quantized_matmul``, whatever is selected.

    >>> w, scales, biases = mx.quantize(mx.random.normal((64, 128)), group_size=32, bits=4)
    >>> quantized_matmul(mx.ones((3, 128)), w, scales, biases, group_size=32, bits=4).shape
    (3, 64)
    """
    cpu = extension()
    is_read = reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    if cpu is None or not is_read or x.dtype != mx.float32 or w.ndim != 2:
        return reference.quantized_matmul(x, w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    y: mx.array = cpu.quantized_matmul(x, w, scales, biases, group_size, bits, mode)
    return y


def linear(x: mx.array, w: mx.array) -> mx.array:
    """``x @ w.T``: x [..., K], w [N, K]; returns [..., N] in the dtype of x. A narrower w is widened.

    >>> linear(mx.ones((3, 8)), mx.ones((5, 8), dtype=mx.bfloat16)).shape
    (3, 5)
    """
    cpu = extension()
    if cpu is None or x.dtype != mx.float32 or w.dtype not in FLOAT_TYPES or w.ndim != 2:
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


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis: x [..., K], weight [K] or None (ones).

    >>> rms_norm(mx.array([[3.0, 3.0]]), mx.array([1.0, 2.0]), 0.0).tolist()
    [[1.0, 2.0]]
    """
    cpu = extension()
    if cpu is None or x.dtype != mx.float32 or (weight is not None and weight.dtype not in FLOAT_TYPES):
        return reference.rms_norm(x, weight, eps)
    y: mx.array = cpu.rms_norm(x, weight, eps)
    return y


def silu_mul(gate: mx.array, up: mx.array) -> mx.array:
    """``gate * sigmoid(gate) * up`` of equal shapes.

    >>> silu_mul(mx.array([0.0]), mx.array([2.0])).tolist()
    [0.0]
    """
    cpu = extension()
    if cpu is None or gate.dtype != mx.float32 or up.dtype != mx.float32:
        return reference.silu_mul(gate, up)
    y: mx.array = cpu.silu_mul(gate, up)
    return y


def resize_rows(a: mx.array, num_rows: int) -> mx.array:
    """A copy of the first ``num_rows`` of a [N, ...], zeros behind where N is smaller; evaluated. The extension
    puts it into memory that is read faster from end to end (large pages, aligned): for weights and pools.

    >>> resize_rows(mx.array([1.0, 2.0]), 3).tolist()
    [1.0, 2.0, 0.0]
    """
    cpu = extension()
    resized: mx.array = reference.resize_rows(a, num_rows) if cpu is None else cpu.resize_rows(a, num_rows)
    mx.eval(resized)
    return resized


def write_pages(
    k_pool: mx.array, v_pool: mx.array, k: mx.array, v: mx.array, slot_mapping: mx.array
) -> tuple[mx.array, mx.array]:
    """Write rows of keys and values to their slots; returns the pools' new handles.

    k_pool [P, H, D, page_size], v_pool [P, H, page_size, Dv]: two buffers, contiguous, never the same;
    k [T, H, D], v [T, H, Dv]: converted to the pool's dtype; slot_mapping int32 [T]: row t goes to page
    ``slot // page_size``, slot ``slot % page_size``. Slots of one call must differ from each other.

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
        return reference.write_pages(k_pool, v_pool, k, v, slot_mapping)
    written: tuple[mx.array, mx.array] = cpu.write_pages(k_pool, v_pool, k, v, slot_mapping)
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
    fixed positions.

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
        )
    sinks = None if sinks is None else sinks.astype(mx.float32)
    output: mx.array = cpu.paged_attention(
        q.astype(mx.float32),
        k_pool,
        v_pool,
        block_tables,
        q_starts,
        kv_lens,
        scale,
        window or 0,
        softcap or 0.0,
        sinks,
    )
    return output.astype(q.dtype)
