"""Each filter against numpy, and draws that depend on a row's own logits, seed and index alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.engine.sampler import SamplingRow, noise_key, sample
from mlxserve.types import SamplingParams


def row(seed: int = 0, index: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, index)


def picks(logits: np.ndarray, rows: list[SamplingRow]) -> list[int]:
    result = sample(mx.array(logits.astype(np.float32)), rows)
    assert result.dtype == mx.int32
    return [int(token) for token in result.tolist()]  # type: ignore[union-attr]


def draws(logits: np.ndarray, count: int, **params: Any) -> list[int]:
    """``count`` draws from one distribution, by the index."""
    out = []
    for start in range(0, count, 64):
        rows = [row(7, index, **params) for index in range(start, min(start + 64, count))]
        out += picks(np.broadcast_to(logits, (len(rows), len(logits))), rows)
    return out


def random_logits(size: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(size)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def support(logits: np.ndarray, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The ids that the filters leave, in the documented order and on the untempered distribution."""
    order = np.argsort(-logits.astype(np.float32), kind="stable")
    if top_k is not None:
        order = order[:top_k]
    if top_p < 1:
        probs = softmax(logits[order])
        order = order[np.cumsum(probs) - probs < top_p]
    probs = softmax(logits[order])
    return {int(token) for token in order[probs >= min_p * probs.max()]}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = np.array([[1.0, 5.0, 5.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    assert picks(logits, [row(temperature=0), row(temperature=0)]) == [1, 0]


@pytest.mark.parametrize("size", [50, 50_257, 151_936])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.5},
        {"top_k": 10, "top_p": 0.9, "min_p": 0.3},
    ],
    ids=str,
)
def test_filters_leave_what_numpy_leaves(size: int, filters: dict[str, Any]) -> None:
    logits = random_logits(size, seed=size)
    allowed = support(logits, **filters)
    count = 64 if size > 1000 else 512
    # A high temperature makes what is left nearly uniform: a token outside would show.
    drawn = set(draws(logits, count, temperature=50.0, **filters))
    assert drawn <= allowed
    if len(allowed) < count // 16:
        assert drawn == allowed


def test_filters_act_before_the_temperature() -> None:
    """On the untempered distribution the top two make 0.9; tempered with 5 they would not."""
    logits = np.log(np.array([0.5, 0.42, 0.04, 0.03, 0.01]))
    assert set(draws(logits, 300, temperature=5.0, top_p=0.9)) == {0, 1}
    assert set(draws(logits, 300, temperature=5.0, min_p=0.5)) == {0, 1}


def test_top_k_acts_before_top_p() -> None:
    """Of all, top_p 0.6 keeps three; of the two that top_k leaves, the first alone makes over 0.6."""
    logits = np.log(np.array([0.3, 0.15, 0.2, 0.35]))
    assert set(draws(logits, 300, temperature=9.0, top_p=0.5, top_k=2)) == {3}
    assert set(draws(logits, 300, temperature=9.0, top_p=0.5)) == {0, 3}


def test_a_bias_acts_before_the_filters_and_on_its_row_alone() -> None:
    logits = np.zeros((3, 8))
    logits[:, 2] = 4.0
    biased = row(temperature=0, logit_bias=((5, 100.0), (2, -100.0)))
    hot = row(temperature=1.0, top_k=1, logit_bias=((6, 50.0),))
    assert picks(logits, [row(temperature=0), biased, hot]) == [2, 5, 6]
    assert picks(logits, [hot, biased, row(temperature=0)]) == [6, 5, 2]


def test_frequencies_follow_the_distribution() -> None:
    probs = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    count = 4096
    observed = Counter(draws(np.log(probs), count, temperature=1.0))
    expected = probs * count
    chi_square = sum((observed[i] - expected[i]) ** 2 / expected[i] for i in range(len(probs)))
    # The 0.999 quantile with 5 degrees of freedom.
    assert chi_square < 20.5


def test_temperature_sharpens_by_its_power() -> None:
    probs = np.array([0.6, 0.3, 0.1])
    sharpened = probs**2 / (probs**2).sum()
    observed = Counter(draws(np.log(probs), 4096, temperature=0.5, top_k=3))
    for token, share in enumerate(sharpened):
        assert abs(observed[token] / 4096 - share) < 0.03


def test_a_token_depends_on_its_own_row_alone() -> None:
    size = 300
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "min_p": 0.1, "logit_bias": ((3, 2.0),)},
    ]
    rows = [row(seed, index, **kinds[seed % 5]) for seed in range(10) for index in range(3)]
    logits = np.stack([random_logits(size, seed) for seed in range(len(rows))])
    together = picks(logits, rows)
    alone = [picks(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert together == alone
    order = np.random.default_rng(1).permutation(len(rows))
    assert picks(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_seeds_and_indices_differ_and_repeat() -> None:
    logits = np.zeros(1000)

    def series(seed: int) -> list[int]:
        return picks(np.broadcast_to(logits, (32, 1000)), [row(seed, i) for i in range(32)])

    assert series(1) == series(1)
    assert len(set(series(1))) > 20
    all_series = {tuple(series(seed)) for seed in (0, 1, 2, -1, 2**31, 2**32, 2**63, 2**64 - 2)}
    assert len(all_series) == 8
    keys = {noise_key(seed, index) for seed in range(50) for index in range(50)}
    assert len(keys) == 2500


def test_a_nan_breaks_its_row_alone() -> None:
    logits = np.stack([random_logits(40, seed) for seed in range(6)])
    kinds = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}] * 2
    rows = [row(seed, 0, **params) for seed, params in enumerate(kinds)]
    whole = picks(logits, rows)
    for broken in range(6):
        spoiled = logits.copy()
        spoiled[broken, 11] = np.nan
        expected = [*whole[:broken], -1, *whole[broken + 1 :]]
        assert picks(spoiled, rows) == expected


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-40, 5e-324])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    logits = np.array([0.0, 3.0, -5.0, 2.5])
    assert set(draws(logits, 64, temperature=temperature)) == {1}
    assert set(draws(logits, 64, temperature=temperature, top_p=0.95)) == {1}


def test_huge_logits_and_forbidden_tokens() -> None:
    logits = np.array([[-np.inf, 1e30, -np.inf, 1e30], [-np.inf, -np.inf, 0.0, -np.inf]])
    rows = [row(3, 0, temperature=1.0), row(3, 1, temperature=1.0, top_p=0.5)]
    first, second = picks(logits, rows)
    assert first in (1, 3)
    assert second == 2


def test_half_precision_logits_are_read_as_float32() -> None:
    logits = mx.array([[1.0, 2.0, 0.5]], dtype=mx.bfloat16)
    assert sample(logits, [row(temperature=0)]).tolist() == [1]
