"""Which implementation runs. Reads six environment variables, MLXSERVE_DECODER as a model is loaded and
MLXSERVE_PAGE_ROUTE as its pages are made, the others once, at the first use of a kernel:

MLXSERVE_KERNELS    reference | cpu | metal | metal-host      default: cpu where the extension exists and mlx
                                                  computes on the CPU, metal where it computes on a Mac's GPU.
                                                  metal-host runs the Metal kernels on the CPU, to check them
MLXSERVE_DECODER    fused | ops | blocks  default: fused with cpu, ops with Metal kernels, else blocks
MLXSERVE_PAGE_ROUTE tail | through | drained      default: tail with Metal kernels, else drained; not for cpu,
                                                  which writes in place
MLXSERVE_THREADS    1 to 1024             default: the number of CPUs that this process may use
MLXSERVE_CPU_ISA    portable | avx2 | avx512      default: the best that this CPU has
MLXSERVE_CPU_MATMUL exact | int16 | int8          default: exact. What activations are rounded to before they
                                                  meet affine weights, where the CPU has AVX-512 VNNI

A wrong value raises ValueError with the variable, the value and what is possible.

Where ``metal`` is picked no Metal kernel runs before it has been compared on the device (``self_test``);
until then, and for those that failed, ``reference`` runs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from mlxserve_kernels.metal_kernels import MetalKernels
    from mlxserve_kernels.metal_kernels.maker import KernelMaker

IMPLEMENTATIONS = ("reference", "cpu", "metal", "metal-host")
DECODER_KINDS = ("fused", "ops", "blocks")
PAGE_ROUTES = ("tail", "through", "drained")
THROUGH_KERNELS = ("write_pages", "rope_and_write_pages", "copy_pages")
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


@dataclass(frozen=True, slots=True)
class Selection:
    """What ``ops`` calls beside ``reference``: at most one of the two is there.

    ``proven``: the names of the Metal kernels that may run, None for all.
    """

    name: str
    cpu: Any | None = None
    metal: MetalKernels | None = None
    proven: frozenset[str] | None = None


REFERENCE = Selection("reference")

_selected: Selection | None = None


def selection() -> Selection:
    """What was picked, at the first call, or put in its place since."""
    global _selected
    if _selected is None:
        _selected = _select()
    return _selected


def extension() -> Any | None:
    """The configured C++ extension, or None where it is not what runs."""
    return selection().cpu


def metal(name: str) -> MetalKernels | None:
    """The Metal kernels, where they are what runs and the one called ``name`` may."""
    chosen = selection()
    if chosen.metal is None or (chosen.proven is not None and name not in chosen.proven):
        return None
    return chosen.metal


def decoder_kind() -> str:
    """How recognised decoder layers run: ``fused`` (the extension's stack), ``ops`` (a stack op by op) or
    ``blocks`` (as mlx-lm has them, on our kernels)."""
    chosen = selection()
    wanted = os.environ.get("MLXSERVE_DECODER")
    if wanted is None:
        if chosen.cpu is not None:
            return "fused"
        # Without a kernel of ours mlx-lm's own code has fewer operations.
        return "blocks" if chosen.metal is None or chosen.proven == frozenset() else "ops"
    if wanted not in DECODER_KINDS:
        raise ValueError(f"MLXSERVE_DECODER must be one of {', '.join(DECODER_KINDS)}, got {wanted!r}")
    if wanted == "fused" and chosen.cpu is None:
        raise ValueError(f"MLXSERVE_DECODER is fused, which the {chosen.name} kernels have not")
    return wanted


def page_route() -> str:
    """How keys and values get into pages: ``aliased`` (the extension writes in place, steps in flight or
    not), ``tail`` (open pages live in arrays of their own), ``through`` (Metal kernels write through their
    inputs, ordered by tokens) or ``drained`` (no step is in flight)."""
    chosen = selection()
    wanted = os.environ.get("MLXSERVE_PAGE_ROUTE")
    if wanted is None:
        if chosen.cpu is not None:
            return "aliased"
        return "drained" if metal("write_tails") is None else "tail"
    if wanted not in PAGE_ROUTES:
        raise ValueError(f"MLXSERVE_PAGE_ROUTE must be one of {', '.join(PAGE_ROUTES)}, got {wanted!r}")
    has_kernels = all(metal(name) is not None for name in THROUGH_KERNELS)
    if chosen.cpu is not None or (wanted == "through" and not has_kernels):
        raise ValueError(f"MLXSERVE_PAGE_ROUTE is {wanted}, which the {chosen.name} kernels have not")
    return wanted


def use(chosen: Selection) -> None:
    """Run this from now on. What is already built keeps what it was built with."""
    global _selected
    _selected = chosen


@contextlib.contextmanager
def using(chosen: Selection) -> Iterator[None]:
    """Run this inside the block: for tests and comparisons."""
    before = selection()
    use(chosen)
    try:
        yield
    finally:
        use(before)


def metal_selection(make: KernelMaker | None, proven: frozenset[str] | None = None) -> Selection:
    """The Metal kernels, on the GPU (None) or made by another maker with the signature of
    mx.fast.metal_kernel."""
    from mlxserve_kernels.metal_kernels import MetalKernels

    return Selection("metal" if make is None else "metal-host", metal=MetalKernels(make), proven=proven)


def _select() -> Selection:
    wanted = os.environ.get("MLXSERVE_KERNELS")
    if wanted is not None and wanted not in IMPLEMENTATIONS:
        raise ValueError(f"MLXSERVE_KERNELS must be one of {', '.join(IMPLEMENTATIONS)}, got {wanted!r}")
    # All variables are checked, whichever of them count here.
    matmul, threads, isa = _matmul_setting(), num_threads(), os.environ.get("MLXSERVE_CPU_ISA")
    is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if wanted == "metal-host":
        return metal_selection(host_maker())
    if wanted == "metal" or (wanted is None and not is_on_cpu and mx.metal.is_available()):
        if is_on_cpu or not mx.metal.is_available():
            raise ValueError("MLXSERVE_KERNELS is metal, but mlx does not compute on a Mac's GPU here")
        return metal_selection(None, proven=frozenset())
    if wanted == "reference" or (wanted is None and not is_on_cpu):
        return REFERENCE
    module = _import_extension()
    if module is None:
        if wanted == "cpu":
            raise ValueError("MLXSERVE_KERNELS is cpu, but this installation has no C++ extension")
        return REFERENCE
    if isa is not None and isa not in module.available_isas():
        raise ValueError(
            f"MLXSERVE_CPU_ISA must be one of {', '.join(module.available_isas())} on this CPU, got {isa!r}"
        )
    module.configure(threads, isa or module.available_isas()[-1])
    module.set_digits(MATMUL_DIGITS[matmul])
    return Selection("cpu", cpu=module)


def host_maker() -> KernelMaker:
    """What makes kernels that run on this machine's CPU, in one schedule: the tests of the kernels try more.
    ValueError where the harness or its compiler is not installed."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ValueError("metal-host runs on x86-64 Linux only")
    try:
        host = importlib.import_module("metal_on_host")
        importlib.import_module("ziglang")
    except ImportError as error:
        raise ValueError(
            "MLXSERVE_KERNELS is metal-host, which needs a checkout and the test extra: "
            f"pip install -e '.[test]' ({error})"
        ) from error
    from mlxserve_kernels.metal_kernels.maker import HOST_PERMISSIONS

    settings = host.Settings(seeds=(0,), **HOST_PERMISSIONS)
    make: KernelMaker = host.Host(settings).metal_kernel
    return make


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
