"""Batched sampling. A row's token depends on its own logits, parameters, seed and index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxserve.types import SamplingParams
from mlxserve_kernels import ops

_MASK64 = (1 << 64) - 1

_MIN_TEMPERATURE = 1e-5
"""Smaller ones draw the same; as float32 they could become 0 and a logit of 0 divided by it a NaN."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one sampled row picks: its parameters, its seed, and which generated token it is."""

    params: SamplingParams
    seed: int
    index: int

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def needs_sort(self) -> bool:
        return self.params.top_k is not None or self.params.top_p < 1


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Pick a token a row. ``logits`` [R, V] float; returns [R] int32, -1 where a row has a NaN.

    Order: logit_bias, top_k, top_p, min_p, temperature, draw (by the Gumbel-max trick, with noise
    keyed by seed and index). Greedy rows take the lowest of the best ids.
    """
    logits = _add_bias(logits.astype(mx.float32), rows)
    if all(row.is_greedy for row in rows):
        return ops.greedy_tokens(logits)
    is_broken = mx.any(mx.isnan(logits), axis=-1)
    groups = (
        [i for i, row in enumerate(rows) if row.is_greedy],
        [i for i, row in enumerate(rows) if not row.is_greedy and not row.needs_sort],
        [i for i, row in enumerate(rows) if not row.is_greedy and row.needs_sort],
    )
    picked, order = [], []
    for indices, pick in zip(groups, (_greedy, _draw_unsorted, _draw_sorted), strict=True):
        if indices:
            picked.append(pick(logits[mx.array(indices)], [rows[i] for i in indices]))
            order.extend(indices)
    tokens = mx.concatenate(picked)[mx.array(np.argsort(order))]
    return mx.where(is_broken, -1, tokens.astype(mx.int32))


def _greedy(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    return mx.argmax(logits, axis=-1)


def _draw_unsorted(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    return _draw(_min_p(logits, rows), rows)


def _draw_sorted(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    order = mx.argsort(-logits, axis=-1)
    ranked = mx.take_along_axis(logits, order, axis=-1)
    vocab_size = logits.shape[-1]
    top_k = _column([vocab_size if row.params.top_k is None else row.params.top_k for row in rows])
    ranked = mx.where(mx.arange(vocab_size)[None] < top_k, ranked, -mx.inf)
    probs = mx.softmax(ranked, axis=-1)
    before = mx.cumsum(probs, axis=-1) - probs
    top_p = _column([2.0 if row.params.top_p >= 1 else row.params.top_p for row in rows])
    ranked = mx.where(before < top_p, ranked, -mx.inf)
    choice = _draw(_min_p(ranked, rows), rows)
    return mx.take_along_axis(order, choice[:, None], axis=-1)[:, 0]


def _min_p(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    if not any(row.params.min_p for row in rows):
        return logits
    # p >= min_p * max(p), without the softmax: its denominator is the same on both sides.
    with np.errstate(divide="ignore"):
        floor = _column(np.log([row.params.min_p for row in rows]).tolist())
    return mx.where(logits >= mx.max(logits, axis=-1, keepdims=True) + floor, logits, -mx.inf)


def _draw(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    keys = mx.array(np.array([noise_key(row.seed, row.index) for row in rows], dtype=np.uint32))
    width = logits.shape[-1]
    noise = mx.vmap(lambda key: mx.random.gumbel(shape=(width,), key=key))(keys)
    scaled = logits / _column([max(row.params.temperature, _MIN_TEMPERATURE) for row in rows])
    return mx.argmax(scaled + noise, axis=-1)


def _add_bias(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    where = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias]
    if not where:
        return logits
    indices, tokens, biases = zip(*where, strict=True)
    return logits.at[mx.array(indices), mx.array(tokens)].add(mx.array(biases, dtype=mx.float32))


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values))[:, None]


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """A random key (two uint32) for token ``index`` of a row: SplitMix64's mixer (Steele, Lea and
    Flood, 2014) over both numbers."""
    mixed = _mix((_mix(seed & _MASK64) + index * 0x9E3779B97F4A7C15) & _MASK64)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
