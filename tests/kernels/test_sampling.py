"""``sample_tokens`` against a plain definition in numpy float64, token for token, and against its twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxserve_kernels import ops, reference

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rule:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


FILTERS = [
    Rule(),
    Rule(temperature=0.6),
    Rule(temperature=float("inf")),
    Rule(top_k=1),
    Rule(top_k=7, temperature=3.0),
    Rule(top_k=700, temperature=9.0),
    Rule(top_k=10**10, temperature=2.0),
    Rule(top_p=0.0),
    Rule(top_p=0.3, temperature=9.0),
    Rule(top_p=0.95, temperature=2.0),
    Rule(top_p=0.999, temperature=9.0),
    Rule(top_p=1.5),
    Rule(min_p=0.02, temperature=9.0),
    Rule(min_p=2.0, temperature=9.0),
    Rule(top_k=50, top_p=0.7, temperature=5.0),
    Rule(top_k=2000, top_p=0.97, min_p=0.001, temperature=5.0),
]


def draw(logits: npt.ArrayLike, rules: list[Rule], keys: list[tuple[int, int]], op: Any = ops) -> list[int]:
    rows = mx.array(np.asarray(logits, dtype=np.float32))
    tokens = op.sample_tokens(
        rows,
        temperature=[rule.temperature for rule in rules],
        top_k=[rule.top_k for rule in rules],
        top_p=[rule.top_p for rule in rules],
        min_p=[rule.min_p for rule in rules],
        keys=keys,
    )
    assert (tokens.dtype, tokens.shape) == (mx.int32, (len(rules),))
    return [int(token) for token in tokens.tolist()]


def many(logits: Floats, rule: Rule, count: int, op: Any = ops) -> list[int]:
    keys = [(0x9E3779B9 * i % 2**32, 77 * i + 1) for i in range(count)]
    return draw(np.broadcast_to(logits, (count, len(logits))), [rule] * count, keys, op)


def defined_support(logits: Floats, rule: Rule) -> npt.NDArray[np.int64]:
    order = np.argsort(-logits, kind="stable")
    order = order[logits[order] > -np.inf]
    if rule.top_k:
        order = order[: rule.top_k]
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    if rule.top_p < 1:
        order = order[: max(1, int((np.cumsum(weights) - weights < rule.top_p * weights.sum()).sum()))]
    weights = weights[: len(order)]
    return order[weights >= min(rule.min_p, 1.0)] if rule.min_p else order


def defined_token(logits: Floats, rule: Rule, key: tuple[int, int]) -> int:
    ids = np.sort(defined_support(logits, rule))
    bits = ids.astype(np.uint32)
    for part in key:
        bits = bits ^ np.uint32(part)
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
        bits = bits ^ (bits >> np.uint32(16))
    noise = -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))
    scores = (logits[ids].astype(np.float64) - logits.max()) / rule.temperature + noise
    return int(ids[np.argmax(scores)])


def logits_of(kind: str, size: int) -> Floats:
    rng = np.random.default_rng(size)
    values = rng.standard_normal(size)
    if kind == "rounded":
        values = np.round(2 * values)
    elif kind == "masked":
        values[rng.random(size) < 0.9] = -np.inf
        values[size // 2] = 1.0
    elif kind == "steep":
        values = np.sign(values) * 10 ** (values * 3)
    elif kind == "signed zeros":
        values = np.where(values > 0, 0.0, -0.0)
    return (3 * values).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "rounded", "masked", "steep", "signed zeros"])
@pytest.mark.parametrize("size", [1, 2, 15, 16, 65, 256, 257, 5003])
def test_tokens_are_those_of_the_definition(kind: str, size: int) -> None:
    logits = logits_of(kind, size)
    rules = [rule for rule in FILTERS for _ in range(12)]
    keys = [(31 * i, 0xFFFFFFFF - i) for i in range(len(rules))]
    given = draw(np.broadcast_to(logits, (len(rules), size)), rules, keys)
    assert given == [defined_token(logits, rule, key) for rule, key in zip(rules, keys, strict=True)]


@pytest.mark.parametrize("kind", ["normal", "rounded", "masked", "steep"])
def test_large_vocabularies(kind: str) -> None:
    logits = logits_of(kind, 262_144)
    keys = [(5, i) for i in range(len(FILTERS))]
    given = draw(np.broadcast_to(logits, (len(FILTERS), len(logits))), FILTERS, keys)
    assert given == [defined_token(logits, rule, key) for rule, key in zip(FILTERS, keys, strict=True)]


@pytest.mark.parametrize("rule", FILTERS, ids=str)
def test_the_twin_gives_the_same_tokens(rule: Rule) -> None:
    logits = logits_of("normal", 3000)
    assert many(logits, rule, 100) == many(logits, rule, 100, reference)


@pytest.mark.parametrize("rule", [Rule(top_k=5), Rule(top_p=0.5), Rule(top_k=40, top_p=0.25)], ids=str)
def test_of_equal_logits_the_lowest_ids_stay(rule: Rule) -> None:
    """And all of them are drawn."""
    num_left = len(defined_support(np.zeros(40, np.float32), rule))
    assert num_left in (5, 20, 10)
    assert set(many(np.zeros(40, np.float32), rule, 600)) == set(range(num_left))


@pytest.mark.parametrize("op", [ops, reference])
@pytest.mark.parametrize("rule", [*FILTERS, Rule(temperature=0), Rule(temperature=1e-300)], ids=str)
def test_strange_rows(rule: Rule, op: Any) -> None:
    inf, nan = np.inf, np.nan
    rows = [
        ([0.0, nan, 3.0, -inf], -1),
        ([nan] * 4, -1),
        ([-inf, -inf, -5.0, -inf], 2),
        ([-inf] * 4, 0),
        ([1.0, inf, -inf, inf], 1),
        ([-3e38, -3e38, 3e38, -3e38], 2),
    ]
    if rule.temperature == np.inf and rule.top_k != 1 and rule.top_p and rule.min_p < 1:
        rows = rows[:-1]  # all are equally likely
    given = draw([row for row, _ in rows], [rule] * len(rows), [(3, i) for i in range(len(rows))], op)
    assert given == [token for _, token in rows]


def test_a_wide_range_of_finite_logits() -> None:
    logits = np.linspace(-3e38, 3e38, 1000).astype(np.float32)
    assert set(many(logits, Rule(temperature=1e36, top_k=200), 50)) <= set(range(800, 1000))
    assert set(many(logits, Rule(top_p=0.9), 50)) == {999}
    assert len(set(many(logits, Rule(temperature=float("inf")), 50))) > 40


def test_a_row_depends_on_itself_alone() -> None:
    logits = np.stack([logits_of("normal", 999) + i for i in range(len(FILTERS))])
    keys = [(i, i) for i in range(len(FILTERS))]
    together = draw(logits, FILTERS, keys)
    turned = draw(logits[::-1].copy(), FILTERS[::-1], keys[::-1])
    alone = [draw(logits[i : i + 1], [FILTERS[i]], [keys[i]])[0] for i in range(len(FILTERS))]
    assert together == turned[::-1] == alone


def test_rows_that_are_not_contiguous() -> None:
    logits = mx.random.normal((50, 3))
    rows = {"temperature": [1.0] * 3, "top_k": [0, 5, 0], "top_p": [1.0, 1.0, 0.5], "min_p": [0.0] * 3}
    keys = [(1, 2), (3, 4), (5, 6)]
    given = ops.sample_tokens(logits.T, **rows, keys=keys)
    assert mx.array_equal(given, ops.sample_tokens(mx.contiguous(logits.T), **rows, keys=keys))


@pytest.mark.parametrize("rule", [Rule(), Rule(temperature=0.5), Rule(top_p=0.8)], ids=str)
def test_frequencies(rule: Rule) -> None:
    """Chi-square over 20,000 draws; every key and every id takes part in the noise."""
    logits = np.log(np.random.default_rng(3).dirichlet(np.ones(30))).astype(np.float32)
    left = defined_support(logits, rule)
    weights = np.exp(logits[left].astype(np.float64) / rule.temperature)
    count = 20_000
    expected = count * weights / weights.sum()
    observed = np.bincount(many(logits, rule, count), minlength=30)[left]
    assert observed.sum() == count
    is_common = expected > 5
    chi_square = ((observed - expected) ** 2 / expected)[is_common].sum()
    # The 0.9999 quantile is below this for so many degrees of freedom.
    assert chi_square < is_common.sum() + 5 * np.sqrt(2 * is_common.sum())


def test_noise_is_uniform_over_a_large_vocabulary() -> None:
    tokens = np.array(many(np.zeros(2**15, np.float32), Rule(), 8192))
    observed = np.bincount(tokens // 1024, minlength=32)
    assert ((observed - 256) ** 2 / 256).sum() < 31 + 4 * np.sqrt(62)
    low_bits = np.bincount(tokens % 32, minlength=32)
    assert ((low_bits - 256) ** 2 / 256).sum() < 31 + 4 * np.sqrt(62)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(temperature=-1.0), "temperature must be at least 0, got -1"),
        (Rule(temperature=float("nan")), "temperature must be at least 0, got nan"),
        (Rule(top_k=-2), r"top_k must be 0 \(none\) or more, got -2"),
        (Rule(top_p=-0.5), "top_p must be at least 0, got -0.5"),
        (Rule(min_p=float("nan")), "min_p must be at least 0, got nan"),
    ],
)
def test_wrong_parameters_are_refused(rule: Rule, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample_tokens: {message}"):
        draw([[0.0]], [rule], [(0, 0)])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows need as many parameters, got 1"):
        draw([[0.0], [1.0]], [Rule()], [(0, 0)])
    with pytest.raises(ValueError, match=r"logits must be float32 \[R, V\]"):
        draw([0.0], [Rule()], [(0, 0)])
