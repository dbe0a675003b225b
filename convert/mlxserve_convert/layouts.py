"""Layouts as they stand in config.json, and the group that a matrix allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxserve_convert.options import GROUP_SIZES
from mlxserve_convert.recipes import Choice
from mlxserve_convert.weights import Layout


def fit_group_size(columns: int, limit: int) -> int | None:
    """The largest possible group of at most ``limit`` that divides the columns, None if none does."""
    fitting = [size for size in GROUP_SIZES if size <= limit and columns % size == 0]
    return max(fitting, default=None)


def layout_config(choice: Choice, columns: int, dtype: mx.Dtype) -> Layout | None:
    """The layout of a matrix of so many columns, None where no group divides them."""
    if choice.mode != "affine":
        fits = columns % choice.group_size == 0
        return Layout(choice.mode, choice.bits, choice.group_size, mx.uint8) if fits else None
    group_size = fit_group_size(columns, choice.group_size)
    return None if group_size is None else Layout("affine", choice.bits, group_size, dtype)


def quantization_config(layouts: Mapping[str, Layout | None]) -> dict[str, Any] | None:
    """mlx-lm's form: the most used settings on top, then an entry for each module: false for one that is
    left alone. None when nothing is quantized."""
    entries = {
        module: None if layout is None else _entry(layout) for module, layout in sorted(layouts.items())
    }
    kinds = [entry for entry in entries.values() if entry is not None]
    if not kinds:
        return None
    usual = max(kinds, key=kinds.count)
    return {**usual, **{module: False if entry is None else entry for module, entry in entries.items()}}


def _entry(layout: Layout) -> dict[str, Any]:
    return {"group_size": layout.group_size, "bits": layout.bits, "mode": layout.mode}
