"""Which implementation runs. Reads four environment variables, once, at the first use of a kernel:

MLXSERVE_KERNELS    reference | cpu       default: cpu where the extension exists and mlx computes on the CPU
MLXSERVE_THREADS    1 to 1024             default: the number of CPUs that this process may use
MLXSERVE_CPU_ISA    portable | avx2 | avx512      default: the best that this CPU has
MLXSERVE_CPU_MATMUL exact | int16 | int8          default: exact. What activations are rounded to before they
                                                  meet affine weights, where the CPU has AVX-512 VNNI

A wrong value raises ValueError with the variable, the value and what is possible.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx

IMPLEMENTATIONS = ("reference", "cpu")
MAX_THREADS = 1024
MATMUL_DIGITS = {"exact": 3, "int16": 2, "int8": 1}
"""Bytes of the integers that activations become, for each value of MLXSERVE_CPU_MATMUL."""
TILE_ROWS = 16
"""Rows of a tile of weights (kTile in kernels.h)."""


FLOAT_TYPES = (mx.float32, mx.float16, mx.bfloat16)
"""What the extension widens as it reads: dense weights, scales, KV pages."""


_FLOAT_MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def reads_quantized(
    scales: mx.array | None, biases: mx.array | None, *, group_size: int, bits: int, mode: str = "affine"
) -> bool:
    """Whether the extension reads weights that are quantized so."""
    if scales is None:
        return False
    if mode != "affine":
        # Kernels read 32 values at a time.
        is_whole = scales.shape[-1] * group_size % 32 == 0
        return is_whole and biases is None and (group_size, bits) == _FLOAT_MODES.get(mode)
    return (
        bits in (2, 3, 4, 5, 6, 8)
        and group_size in (32, 64, 128)
        and biases is not None
        and scales.dtype in FLOAT_TYPES
        and scales.dtype == biases.dtype
    )


@cache
def extension() -> Any | None:
    """The configured C++ extension, or None where ``reference`` runs."""
    wanted = os.environ.get("MLXSERVE_KERNELS")
    if wanted is not None and wanted not in IMPLEMENTATIONS:
        raise ValueError(f"MLXSERVE_KERNELS must be one of {', '.join(IMPLEMENTATIONS)}, got {wanted!r}")
    matmul = _matmul_setting()
    threads, isa = num_threads(), os.environ.get("MLXSERVE_CPU_ISA")
    if wanted == "reference" or (wanted is None and mx.default_device() != mx.Device(mx.cpu)):
        return None
    module = _import_extension()
    if module is None:
        if wanted == "cpu":
            raise ValueError("MLXSERVE_KERNELS is cpu, but this installation has no C++ extension")
        return None
    if isa is not None and isa not in module.available_isas():
        raise ValueError(
            f"MLXSERVE_CPU_ISA must be one of {', '.join(module.available_isas())} on this CPU, got {isa!r}"
        )
    module.configure(threads, isa or module.available_isas()[-1])
    module.set_digits(MATMUL_DIGITS[matmul])
    return module


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """What is evaluated inside is as with ``MLXSERVE_CPU_MATMUL=exact``: two ways to compute one thing agree,
    which rounded activations do not, as the least difference changes their rounding. Nothing else may run."""
    module = extension()
    if module is not None:
        module.set_digits(MATMUL_DIGITS["exact"])
    try:
        yield
    finally:
        if module is not None:
            module.set_digits(MATMUL_DIGITS[_matmul_setting()])


def _matmul_setting() -> str:
    value = os.environ.get("MLXSERVE_CPU_MATMUL", "exact")
    if value not in MATMUL_DIGITS:
        raise ValueError(f"MLXSERVE_CPU_MATMUL must be one of {', '.join(MATMUL_DIGITS)}, got {value!r}")
    return value


@cache
def num_threads() -> int:
    """Threads of the CPU kernels, the calling one included."""
    value = os.environ.get("MLXSERVE_THREADS")
    if value is None:
        return min(_usable_cpus(), MAX_THREADS)
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MAX_THREADS:
        raise ValueError(f"MLXSERVE_THREADS must be a whole number from 1 to {MAX_THREADS}, got {value!r}")
    return int(value)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _import_extension() -> Any | None:
    name = f"{__package__}._cpu"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
