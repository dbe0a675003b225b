"""Bits for each module under a bound on all of them: a knapsack where one option of each item is taken."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One way to keep a module: what it takes, and what it is expected to lose."""

    choice: Any
    num_bytes: int
    cost: float


def allocate(items: Mapping[str, Sequence[Option]], budget: int) -> dict[str, Option] | None:
    """One option an item, together at most ``budget`` bytes, at little cost; None where even the smallest
    do not fit.

    Steps along each item's lower convex hull are taken from the steepest on (the optimum of the relaxed
    problem), then whatever still fits. In the end no other option of any one item would fit and cost less,
    and no choice that all items share.
    """
    taken = {name: min(options, key=_size_first) for name, options in items.items()}
    left = budget - _bytes(taken)
    if left < 0:
        return None
    steps = [(name, *step) for name, options in items.items() for step in _hull_steps(options)]
    # The sort is stable: steps of one item stay in their order.
    for name, before, after in sorted(steps, key=lambda step: -_gain(step[1], step[2])):
        more = after.num_bytes - before.num_bytes
        if taken[name] is before and more <= left:
            taken[name] = after
            left -= more
    _fill(items, taken, left)
    for shared in _shared_choices(items):
        if _bytes(shared) <= budget and _cost(shared) < _cost(taken):
            taken = shared
            _fill(items, taken, budget - _bytes(taken))
    return taken


def _size_first(option: Option) -> tuple[int, float]:
    return option.num_bytes, option.cost


def _bytes(taken: Mapping[str, Option]) -> int:
    return sum(option.num_bytes for option in taken.values())


def _cost(taken: Mapping[str, Option]) -> float:
    return sum(option.cost for option in taken.values())


def _hull_steps(options: Sequence[Option]) -> list[tuple[Option, Option]]:
    """From corner to corner of the lower convex hull: each step costs less, per byte less and less."""
    hull: list[Option] = []
    for option in sorted(options, key=_size_first):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return list(itertools.pairwise(hull))


def _gain(before: Option, after: Option) -> float:
    return (before.cost - after.cost) / (after.num_bytes - before.num_bytes)


def _fill(items: Mapping[str, Sequence[Option]], taken: dict[str, Option], left: int) -> None:
    """Takes better options as long as any fits: the most gained per byte first."""
    while True:
        found = [
            ((now.cost - option.cost) / max(option.num_bytes - now.num_bytes, 1e-9), name, option)
            for name, now in taken.items()
            for option in items[name]
            if option.cost < now.cost and option.num_bytes - now.num_bytes <= left
        ]
        if not found:
            return
        _, name, best = max(found, key=lambda one: one[0])
        left -= best.num_bytes - taken[name].num_bytes
        taken[name] = best


def _shared_choices(items: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    by_choice = [{option.choice: option for option in options} for options in items.values()]
    shared = set.intersection(*(set(found) for found in by_choice)) if by_choice else set()
    ordered = sorted(shared, key=repr)
    return [{name: found[choice] for name, found in zip(items, by_choice, strict=True)} for choice in ordered]
