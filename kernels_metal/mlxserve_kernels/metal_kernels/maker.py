"""What makes kernels: mx.fast.metal_kernel on a Mac, or another callable of its signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from mlxserve_kernels.dispatch import FLOAT_TYPES as FLOAT_TYPES

KernelCall = Callable[..., list[mx.array]]
KernelMaker = Callable[..., KernelCall]

SIMD_SIZE = 32
MAX_THREADS = 1024
MIN_DEVICE_SIZE = 8
"""Smaller inputs arrive in the `constant` address space, which the kernels do not take."""

HOST_PERMISSIONS = {
    "writable_inputs": frozenset({"k_pool", "v_pool"}),
    "may_leave_unwritten": frozenset({"part_sums", "part_stats"}),
}
"""What our kernels do that metal_on_host's settings must allow: they write through pools, and parts of splits
are written where a row has the split."""


@cache
def source(name: str) -> str:
    """The text of `metal/<name>`, complete functions that stand alone."""
    return files("mlxserve_kernels").joinpath("metal", name).read_text()


def mlx_maker() -> KernelMaker:
    """mlx's own, for the GPU of a Mac."""
    maker: Any = mx.fast.metal_kernel
    return maker  # type: ignore[no-any-return]
