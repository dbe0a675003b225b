"""Every kernel in plain mlx ops: the twin that tests hold the kernels equal to, and what runs where no
kernel of ours does. Shapes, dtypes and errors are those of ``ops``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, overload

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve_kernels import quantized_pages
from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.experts import Activation, ExpertWeights
from mlxserve_kernels.page_rows import NO_SOURCE, KvPages, KvRows


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
    y = mx.quantized_matmul(
        x, w, scales, biases, transpose=transpose, group_size=group_size, bits=bits, mode=mode
    )
    return y.astype(x.dtype)


def quantize(
    x: mx.array,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
    effort: int = 0,
    importance: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array | None]:
    words, scales, *biases = mx.quantize(x, group_size=group_size, bits=bits, mode=mode)
    if not effort:
        return words, scales, biases[0] if biases else None
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, group_size)
    weights = mx.ones(x.shape[-1]) if importance is None else importance
    start = (scales.astype(mx.float32)[..., None], biases[0].astype(mx.float32)[..., None])
    codes, scale, bias = _searched(groups, weights.reshape(-1, group_size), bits, start, effort, x.dtype)
    return _packed_codes(codes.reshape(x.shape), bits), scale.astype(x.dtype), bias.astype(x.dtype)


def _searched(
    x: mx.array,
    weights: mx.array,
    bits: int,
    start: tuple[mx.array, mx.array],
    effort: int,
    dtype: mx.Dtype,
) -> tuple[mx.array, mx.array, mx.array]:
    """Of groups [..., n, group]: codes, and of each group scale and bias [..., n]."""
    largest = float((1 << bits) - 1)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    centre, half = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
    y = x - centre
    total = weights.sum(-1, keepdims=True)
    best_scale, best_bias, least = *start, mx.full(low.shape, math.inf)
    for cut in range(effort):
        scale, bias = start
        if cut:
            reach = half * (1 - search_cut(bits, effort) * cut)
            scale, bias = 2 * reach / largest, centre - reach
        for _ in range(SEARCH_TURNS):
            scale, bias = (part.astype(dtype).astype(mx.float32) for part in (scale, bias))
            codes = _codes(x, scale, bias, largest)
            error = (weights * mx.square(codes * scale + bias - x)).sum(-1, keepdims=True)
            is_less = error < least
            best_scale, best_bias = mx.where(is_less, scale, best_scale), mx.where(is_less, bias, best_bias)
            least = mx.where(is_less, error, least)
            wq, wqq = ((weights * part).sum(-1, keepdims=True) for part in (codes, codes * codes))
            wy, wqy = ((weights * part).sum(-1, keepdims=True) for part in (y, codes * y))
            spread = total * wqq - wq * wq
            scale = mx.where(spread > 0, (total * wqy - wq * wy) / spread, scale)
            bias = (wy - scale * wq) / total + centre
    codes = _codes(x, best_scale, best_bias, largest)
    return codes.astype(mx.uint32), best_scale.squeeze(-1), best_bias.squeeze(-1)


SEARCH_TURNS = 3
"""Least squares after least squares: each finds the line for the codes of the one before."""


def search_cut(bits: int, effort: int) -> float:
    """What each further range cuts off: few bits gain from much narrower ranges."""
    return 1.2 / (effort * math.sqrt((1 << bits) - 1))


def _codes(x: mx.array, scale: mx.array, bias: mx.array, largest: float) -> mx.array:
    steps = mx.where(scale == 0, 0.0, 1.0 / scale)
    return mx.clip(mx.round((x - bias) * steps), 0.0, largest)


def _packed_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., K] as uint32 [..., K * bits / 32], the first in the lowest bits."""
    ones = (codes[..., None] >> mx.arange(bits, dtype=mx.uint32)) & 1
    words = ones.reshape(*codes.shape[:-1], -1, 32) << mx.arange(32, dtype=mx.uint32)
    return words.sum(-1).astype(mx.uint32)


def linear(x: mx.array, w: mx.array) -> mx.array:
    return (x @ w.T).astype(x.dtype)


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


def sample_tokens(
    logits: mx.array,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    keys: Sequence[tuple[int, int]],
) -> mx.array:
    logits = logits.astype(mx.float32)
    best = mx.max(logits, axis=-1, keepdims=True)
    is_greedy = mx.array([value == 0 for value in temperature]) | mx.isinf(best[:, 0])
    order = mx.argsort(-logits, axis=-1)
    ranked = mx.take_along_axis(logits, order, axis=-1)
    size = logits.shape[-1]
    ranks = mx.arange(size)[None]
    ranked = mx.where(ranks < _column([value or size for value in top_k]), ranked, -mx.inf)
    probs = mx.softmax(ranked, axis=-1)
    # The best stays even where top_p is 0.
    is_kept = (mx.cumsum(probs, axis=-1) - probs < _column([2.0 if p >= 1 else p for p in top_p])) | (
        ranks == 0
    )
    floor = _column([-mx.inf if p == 0 else min(math.log(p), 0.0) for p in min_p])
    is_kept = is_kept & (ranked >= best + floor) & (ranked > -mx.inf)
    # Smaller temperatures draw the same, and could be 0 in float32.
    scaled = (ranked - best) / _column([max(value, 1e-5) for value in temperature])
    scores = scaled + _gumbel_noise(order, mx.array(np.array(keys, dtype=np.uint32).reshape(-1, 2)))
    choice = mx.argmax(mx.where(is_kept, scores, -mx.inf), axis=-1, keepdims=True)
    drawn = mx.take_along_axis(order, choice, axis=-1)[:, 0].astype(mx.int32)
    return mx.where(is_greedy | mx.any(mx.isnan(logits), axis=-1), greedy_tokens(logits), drawn)


def _gumbel_noise(ids: mx.array, keys: mx.array) -> mx.array:
    """For ids [R, N] and uint32 keys [R, 2]: two rounds of an integer mixer, then -log(-log(uniform))."""
    bits = ids.astype(mx.uint32)
    for part in (keys[:, :1], keys[:, 1:]):
        bits = bits ^ part
        bits = (bits ^ (bits >> 16)) * mx.array(0x7FEB352D, dtype=mx.uint32)
        bits = (bits ^ (bits >> 15)) * mx.array(0x846CA68B, dtype=mx.uint32)
        bits = bits ^ (bits >> 16)
    # Below 1, as which float32 would round the largest ones.
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -mx.log(-mx.log1p(-uniform))


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values))[:, None]


@overload
def rms_norm(x: mx.array, weight: mx.array | None, eps: float, residual: None = None) -> mx.array: ...
@overload
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, residual: mx.array
) -> tuple[mx.array, mx.array]: ...
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, residual: mx.array | None = None
) -> mx.array | tuple[mx.array, mx.array]:
    total = x if residual is None else x + residual
    normed = mx.fast.rms_norm(total, None if weight is None else weight.astype(x.dtype), eps)
    return normed if residual is None else (normed, total)


def silu_mul(gate: mx.array, up: mx.array) -> mx.array:
    return gated(gate, up, "silu")


def gelu_mul(gate: mx.array, up: mx.array, *, approx: Literal["none", "tanh"]) -> mx.array:
    return gated(gate, up, "gelu" if approx == "none" else "gelu_tanh")


def gated(gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
    wide = _ACTIVATIONS[activation](gate.astype(mx.float32)) * up.astype(mx.float32)
    return wide.astype(gate.dtype)


_ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu_tanh": nn.gelu_approx,
    "gelu": nn.gelu,
}


def lora_delta(x: mx.array, a: mx.array, b: mx.array, slots: mx.array, scales: mx.array) -> mx.array:
    if not a.shape[0]:
        return mx.zeros((x.shape[0], b.shape[2]), dtype=x.dtype)
    ids = mx.maximum(slots, 0)
    inner = mx.gather_mm(x[:, None], a.astype(x.dtype), rhs_indices=ids)
    y = mx.gather_mm(inner, b.astype(x.dtype), rhs_indices=ids).squeeze(1)
    return mx.where((slots >= 0)[:, None], (scales[ids][:, None] * y).astype(x.dtype), 0)


def resize_rows(a: mx.array, num_rows: int) -> mx.array:
    kept = a[:num_rows]
    new = num_rows - kept.shape[0]
    return mx.concatenate([kept, mx.zeros((new, *a.shape[1:]), dtype=a.dtype)])


def gather_matmul(x: mx.array, ids: mx.array, weights: ExpertWeights) -> mx.array:
    is_paired = x.ndim == ids.ndim + 1
    rows = x[..., None, :] if is_paired else x[..., None, None, :]
    if weights.scales is None:
        w = weights.w.astype(x.dtype).swapaxes(-1, -2)
        y = mx.gather_mm(rows, w, rhs_indices=ids)
    else:
        y = mx.gather_qmm(
            rows,
            weights.w,
            weights.scales,
            weights.biases,
            rhs_indices=ids,
            transpose=True,
            group_size=weights.group_size,
            bits=weights.bits,
            mode=weights.mode,
        )
    y = y.squeeze(-2).astype(x.dtype)
    return y if weights.bias is None else y + weights.bias[ids].astype(x.dtype)


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
    y = gather_matmul(gated(gather_matmul(x, ids, gate), gather_matmul(x, ids, up), activation), ids, down)
    return y if shares is None else (y * shares[..., None]).sum(axis=-2).astype(x.dtype)


def route(logits: mx.array, top_k: int, *, is_normalized: bool) -> tuple[mx.array, mx.array]:
    ids = mx.argsort(-logits, axis=-1)[..., :top_k]
    shares = mx.take_along_axis(mx.softmax(logits, axis=-1, precise=True), ids, axis=-1)
    if is_normalized:
        shares = shares / mx.sum(shares, axis=-1, keepdims=True)
    return ids.astype(mx.int32), shares


def write_pages(
    k_pool: mx.array,
    v_pool: mx.array,
    k: mx.array,
    v: mx.array,
    slot_mapping: mx.array,
    *,
    kv_bits: int | None = None,
) -> tuple[mx.array, mx.array]:
    if kv_bits is not None:
        page_size = quantized_pages.page_size_of(k_pool, k.shape[2], kv_bits)
        return (
            quantized_pages.write_rows(k_pool, k, slot_mapping, page_size, kv_bits, is_keys=True),
            quantized_pages.write_rows(v_pool, v, slot_mapping, page_size, kv_bits, is_keys=False),
        )
    page_size = k_pool.shape[3]
    pages, slots = slot_mapping // page_size, slot_mapping % page_size
    k_pool[pages, :, :, slots] = k.astype(k_pool.dtype)
    v_pool[pages, :, slots] = v.astype(v_pool.dtype)
    return k_pool, v_pool


def rotate(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    """Heads [T, H, D], each turned by the position of its row."""
    turned = 2 * int(rope.inverse_frequencies.size)
    if rope.input_scale != 1.0:
        x = mx.concatenate([x[..., :turned] * rope.input_scale, x[..., turned:]], axis=-1)
    y: mx.array = mx.fast.rope(
        x[:, :, None],
        turned,
        traditional=rope.is_interleaved,
        base=None,
        scale=rope.position_scale,
        offset=positions,
        freqs=rope.wavelengths,
    )
    return y.squeeze(2)


def write_tails(
    rows: KvRows, pools: KvPages, tails: KvPages, pieces: mx.array, *, kv_bits: int | None = None
) -> tuple[mx.array | None, KvPages]:
    """``pieces`` are read here: they must be numbers that are known already."""
    q, k = rows.q, rows.k
    if rows.rope is not None:
        assert q is not None
        assert rows.positions is not None
        q, k = (rotate(x, rows.positions, rows.rope) for x in (q, k))
    known = np.asarray(pieces)[:, :4].tolist()
    page_size = (
        pools.keys.shape[3]
        if kv_bits is None
        else quantized_pages.page_size_of(pools.keys, k.shape[2], kv_bits)
    )
    slots = [i * page_size + piece[1] + j for i, piece in enumerate(known) for j in range(piece[2])]
    taken = [piece[3] + j for piece in known for j in range(piece[2])]
    sources = mx.array([piece[0] for piece in known], dtype=mx.int32)
    keys, values = (
        mx.where(
            (sources == NO_SOURCE).reshape(-1, *[1] * (pool.ndim - 1)),
            mx.array(0, dtype=pool.dtype),
            pages_at(pool, old, mx.where(sources == NO_SOURCE, 0, sources)),
        )
        for pool, old in ((pools.keys, tails.keys), (pools.values, tails.values))
    )
    if taken:
        ids, to = mx.array(taken, dtype=mx.int32), mx.array(slots, dtype=mx.int32)
        keys, values = write_pages(keys, values, k[ids], rows.v[ids], to, kv_bits=kv_bits)
    return q, KvPages(keys, values)


def pages_at(pool: mx.array, tails: mx.array | None, entries: mx.array) -> mx.array:
    """The pages that entries of a block table name: of the pool, or, below 0, of the tails."""
    if tails is None:
        return pool[entries]
    is_tail = (entries < 0).reshape(*entries.shape, *[1] * (pool.ndim - 1))
    in_tails = tails[mx.clip(-1 - entries, 0, tails.shape[0] - 1)]
    return mx.where(is_tail, in_tails, pool[mx.maximum(entries, 0)])


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
    kv_bits: int | None = None,
    tails: KvPages | None = None,
    order: mx.array | None = None,
) -> mx.array:
    if order is not None:
        # mlx's own ops have no place for a token: what it stands for must be done.
        mx.eval(order)
    k_tails, v_tails = (None, None) if tails is None else (tails.keys, tails.values)
    if kv_bits is not None:
        k_pool, v_pool = _dequantized(k_pool, v_pool, q.shape[2], kv_bits)
        if k_tails is not None and v_tails is not None:
            k_tails, v_tails = _dequantized(k_tails, v_tails, q.shape[2], kv_bits)
    starts, lengths = _ints(q_starts), _ints(kv_lens)
    outputs = []
    for index, kv_len in enumerate(lengths):
        rows = q[starts[index] : starts[index + 1]]
        if not rows.shape[0]:
            continue
        num_pages = -(-kv_len // k_pool.shape[3])
        pages = block_tables[index, :num_pages]
        keys = _gather(pages_at(k_pool, k_tails, pages).swapaxes(2, 3), kv_len).astype(q.dtype)
        values = _gather(pages_at(v_pool, v_tails, pages), kv_len).astype(q.dtype)
        outputs.append(_attend(rows, keys, values, scale, window, softcap, sinks))
    outputs.append(mx.zeros((q.shape[0] - starts[-1], q.shape[1], v_pool.shape[3]), dtype=q.dtype))
    return mx.concatenate(outputs)


def _dequantized(k_pool: mx.array, v_pool: mx.array, dim: int, kv_bits: int) -> tuple[mx.array, mx.array]:
    page_size = quantized_pages.page_size_of(k_pool, dim, kv_bits)
    unit = page_size * quantized_pages.row_bytes(quantized_pages.GROUP_SIZE, kv_bits)
    value_dim = v_pool.shape[2] // unit * quantized_pages.GROUP_SIZE
    keys = quantized_pages.read_pages(k_pool, dim, kv_bits, is_keys=True)
    return keys.swapaxes(2, 3), quantized_pages.read_pages(v_pool, value_dim, kv_bits, is_keys=False)


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
