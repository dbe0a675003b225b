"""Tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import extension


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
