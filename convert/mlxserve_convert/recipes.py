"""Recipes: which module gets which bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve_convert.mlx_checkpoint import DEFAULT_GROUP_SIZES, FIXED_BITS
from mlxserve_convert.options import BITS, DEFAULT_BITS, ConvertOptions, Mode
from mlxserve_convert.roles import Role, layer_of, role_of


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
    """The named recipe that the options ask for, over these modules."""
    name = options.recipe or (DEFAULT_RECIPE if (options.mode or "affine") == "affine" else "uniform")
    plain = uniform(options)
    if name == "uniform":
        return plain
    rule = RULES[name]
    bits = options.bits or DEFAULT_BITS
    numbers = [number for path in modules if (number := layer_of(path)) is not None]
    num_layers = max(numbers, default=-1) + 1

    def choose(module: Module) -> Choice | None:
        choice = plain(module)
        if choice is None or isinstance(module.wish, dict):
            return choice
        layer = layer_of(module.path)
        # A router decides where a token goes: the rest of its layer cannot make up for a wrong one.
        is_router = role_of(module.path) == "router"
        is_edge = layer is not None and layer in (0, num_layers - 1)
        wanted = 8 if is_router else rule(role_of(module.path), bits, is_edge)
        return Choice(choice.mode, wanted, choice.group_size)

    return choose


Rule = Callable[[Role, int, bool], int]
"""Bits of a role, from those that were asked for and whether its layer is the first or the last."""


def _more(bits: int, least: int = 6) -> int:
    return max(bits, least)


def _default(role: Role, bits: int, is_edge: bool) -> int:
    return _more(bits) if role in ("embedding", "head") else bits


def _mixed(role: Role, bits: int, is_edge: bool) -> int:
    if role in ("embedding", "head", "value", "output", "down") or is_edge:
        return _more(bits)
    return bits


def _experts_low(role: Role, bits: int, is_edge: bool) -> int:
    if role == "expert":
        return max((lower for lower in BITS if lower < bits), default=bits)
    return _more(bits)


RULES: dict[str, Rule] = {"default": _default, "mixed": _mixed, "experts-low": _experts_low}
"""uniform: every module alike, but for what its architecture wants otherwise.
default: embeddings and output head at 6 bits or more.
mixed: attention's v and o, the MLP's down projection and the first and the last layer as well.
experts-low: experts one step of bits lower, all else at 6 bits or more.
Routers have 8 bits in all but uniform."""
DEFAULT_RECIPE = "default"


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
