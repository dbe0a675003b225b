"""Every kernel in plain mlx ops: the twin that tests hold the kernels equal to, and what runs where no
kernel of ours does. Shapes, dtypes and errors are those of ``ops``."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


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
    y = mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group_size, bits=bits, mode=mode)
    return y.astype(x.dtype)


def linear(x: mx.array, w: mx.array) -> mx.array:
    return x @ w.astype(x.dtype).T


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
    if scales is None:
        return w[ids].astype(mx.float32)
    return mx.dequantize(
        w[ids],
        scales[ids] if biases is None else scales[ids].astype(mx.float32),
        None if biases is None else biases[ids].astype(mx.float32),
        group_size=group_size,
        bits=bits,
        mode=mode,
        dtype=mx.float32,
    )


def greedy_tokens(logits: mx.array) -> mx.array:
    is_broken = mx.any(mx.isnan(logits), axis=-1)
    return mx.where(is_broken, -1, mx.argmax(logits, axis=-1).astype(mx.int32))


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, None if weight is None else weight.astype(x.dtype), eps)


def silu_mul(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def resize_rows(a: mx.array, num_rows: int) -> mx.array:
    kept = a[:num_rows]
    new = num_rows - kept.shape[0]
    return mx.concatenate([kept, mx.zeros((new, *a.shape[1:]), dtype=a.dtype)])


def write_pages(
    k_pool: mx.array, v_pool: mx.array, k: mx.array, v: mx.array, slot_mapping: mx.array
) -> tuple[mx.array, mx.array]:
    page_size = k_pool.shape[3]
    pages, slots = slot_mapping // page_size, slot_mapping % page_size
    k_pool[pages, :, :, slots] = k.astype(k_pool.dtype)
    v_pool[pages, :, slots] = v.astype(v_pool.dtype)
    return k_pool, v_pool


def copy_pages(
    k_pool: mx.array, v_pool: mx.array, source_ids: mx.array, target_ids: mx.array
) -> tuple[mx.array, mx.array]:
    k_pool[target_ids] = k_pool[source_ids]
    v_pool[target_ids] = v_pool[source_ids]
    return k_pool, v_pool


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
    starts, lengths = _ints(q_starts), _ints(kv_lens)
    outputs = []
    for index, kv_len in enumerate(lengths):
        rows = q[starts[index] : starts[index + 1]]
        if not rows.shape[0]:
            continue
        num_pages = -(-kv_len // k_pool.shape[3])
        pages = block_tables[index, :num_pages]
        keys = _gather(k_pool[pages].swapaxes(2, 3), kv_len).astype(q.dtype)
        values = _gather(v_pool[pages], kv_len).astype(q.dtype)
        outputs.append(_attend(rows, keys, values, scale, window, softcap, sinks))
    outputs.append(mx.zeros((q.shape[0] - starts[-1], q.shape[1], v_pool.shape[3]), dtype=q.dtype))
    return mx.concatenate(outputs)


def _ints(ids: mx.array) -> list[int]:
    return [int(value) for value in np.asarray(ids)]


def _gather(pages: mx.array, kv_len: int) -> mx.array:
    """[H, kv_len, D] of the pages [P, H, page_size, D] of one sequence."""
    taken = pages.transpose(1, 0, 2, 3)
    return taken.reshape(taken.shape[0], -1, taken.shape[3])[:, :kv_len]


def _attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    num_rows, num_heads, _ = q.shape
    num_kv_heads, kv_len, _ = keys.shape
    positions = mx.arange(kv_len - num_rows, kv_len)[:, None]
    key_positions = mx.arange(kv_len)[None]
    mask = key_positions <= positions
    if window is not None:
        mask = mask & (key_positions > positions - window)
    grouped = q.transpose(1, 0, 2).reshape(num_kv_heads, num_heads // num_kv_heads, num_rows, -1)
    scores = ((grouped * scale) @ keys[:, None].swapaxes(-1, -2)).astype(mx.float32)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        extra = sinks.astype(mx.float32).reshape(num_kv_heads, -1, 1, 1)
        scores = mx.concatenate([mx.broadcast_to(extra, (*scores.shape[:-1], 1)), scores], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., -kv_len:].astype(q.dtype)
    output = weights @ values[:, None]
    return output.reshape(num_heads, num_rows, -1).transpose(1, 0, 2)
