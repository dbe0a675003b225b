"""Recipes: which module gets which bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve_convert.mlx_checkpoint import DEFAULT_GROUP_SIZES, FIXED_BITS
from mlxserve_convert.options import DEFAULT_BITS, ConvertOptions
from mlxserve_convert.weights import Mode


@dataclass(frozen=True, slots=True)
class Module:
    """A module that could be quantized. ``wish`` is what mlx-lm's architecture says of it: False for left
    alone, True, or settings of its own."""

    path: str
    shape: tuple[int, ...]
    wish: bool | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """``group_size`` is the largest wanted: a matrix whose columns it does not divide gets a smaller one."""

    mode: Mode
    bits: int
    group_size: int


Recipe = Callable[[Module], Choice | None]
"""None leaves a module as floats."""


def recipe_of(options: ConvertOptions, modules: Mapping[str, Module]) -> Recipe:
    """The recipe that the options ask for, over these modules."""
    return uniform(options)


def uniform(options: ConvertOptions) -> Recipe:
    """Every module alike, but for those that its architecture wants otherwise."""
    mode: Mode = options.mode or "affine"  # type: ignore[assignment]
    bits = options.bits or FIXED_BITS.get(mode, DEFAULT_BITS)
    group_size = options.group_size or DEFAULT_GROUP_SIZES[mode]

    def choose(module: Module) -> Choice | None:
        if not module.wish:
            return None
        own = module.wish if isinstance(module.wish, dict) else {}
        return Choice(own.get("mode", mode), own.get("bits", bits), own.get("group_size", group_size))

    return choose
