"""Batched sampling. A row's token depends on its own logits, parameters, seed and index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxserve.types import SamplingParams
from mlxserve_kernels import ops

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one sampled row picks: its parameters, its seed, and which generated token it is."""

    params: SamplingParams
    seed: int
    index: int

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Pick a token a row. ``logits`` [R, V] float; returns [R] int32, -1 where a row has a NaN.

    Order: logit_bias, top_k, top_p, min_p, temperature, draw (by the Gumbel-max trick, with noise
    keyed by seed and index). Greedy rows take the lowest of the best ids.
    """
    logits = _add_bias(logits.astype(mx.float32), rows)
    if all(row.is_greedy for row in rows):
        return ops.greedy_tokens(logits)
    params = [row.params for row in rows]
    return ops.sample_tokens(
        logits,
        temperature=[each.temperature for each in params],
        top_k=[each.top_k or 0 for each in params],
        top_p=[each.top_p for each in params],
        min_p=[each.min_p for each in params],
        keys=[noise_key(row.seed, row.index) for row in rows],
    )


def _add_bias(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    where = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias]
    if not where:
        return logits
    indices, tokens, biases = zip(*where, strict=True)
    return logits.at[mx.array(indices), mx.array(tokens)].add(mx.array(biases, dtype=mx.float32))


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """A random key (two uint32) for token ``index`` of a row: SplitMix64's mixer (Steele, Lea and
    Flood, 2014) over both numbers."""
    mixed = _mix((_mix(seed & _MASK64) + index * 0x9E3779B97F4A7C15) & _MASK64)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
