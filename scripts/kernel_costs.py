"""What each Metal kernel reads, writes and computes at the sizes of real models, and what that lets a Mac
expect.

Bytes are counted by metal_on_host. A kernel with many equal threadgroups is run at three small sizes: its
cost is linear in the size, which the third run proves, and is scaled up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from metal_on_host import Host, Report, Settings
from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.metal_kernels import MetalKernels
from mlxserve_kernels.metal_kernels.maker import HOST_PERMISSIONS
from mlxserve_kernels.metal_kernels.weights import QuantizedWeight
from mlxserve_kernels.page_rows import TOKEN_SIZE, KvPages, KvRows

GROUP_SIZE, BITS = 64, 4
ROWS = (1, 4, 16)
CONTEXT = 4096
PAGE = 32
_WEIGHTS = ("w", "scales", "biases")
STREAMED = frozenset(
    (
        *(f"{part}{name}" for part in ("", "gate_", "up_") for name in _WEIGHTS),
        *(f"{part}_{name}" for part in ("k", "v") for name in ("pool", "tails", "old")),
    )
)
"""Buffers that are read once; what is read again of others is assumed to come from a cache."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Public figures of a GPU: memory bandwidth, float32 rate, and who says so."""

    name: str
    gbps: float
    tflops: float
    source: str


_BENCHMARKS = "rate: github.com/philipturner/metal-benchmarks"
_CLOCKS = "lanes at the clock of hmc-tech.com"


def _announced(cores: int, when: str, rate: str) -> str:
    return f"{cores} cores; bandwidth: Apple's announcement, {when}; {rate}"


CHIPS = (
    Chip("M1", 68, 2.6, f"8 cores; bandwidth: Apple's technical specifications; {_BENCHMARKS}"),
    Chip("M1 Max", 400, 10.6, _announced(32, "18 October 2021", _BENCHMARKS)),
    Chip("M2", 100, 3.6, _announced(10, "6 June 2022", _BENCHMARKS)),
    Chip("M2 Ultra", 800, 27.2, _announced(76, "5 June 2023", _BENCHMARKS)),
    Chip("M3", 100, 3.6, "10 cores; bandwidth: Apple's technical specifications; rate: hmc-tech.com"),
    Chip("M3 Max", 400, 14.3, _announced(40, "30 October 2023", "rate: hmc-tech.com")),
    Chip("M4", 120, 3.8, _announced(10, "7 May 2024", f"rate: 1280 {_CLOCKS}, 1.47 GHz")),
    Chip("M4 Max", 546, 17.2, _announced(40, "30 October 2024", f"rate: 5120 {_CLOCKS}, 1.678 GHz")),
    Chip("M5", 153, 3.8, _announced(10, "15 October 2025", "no public rate was found: M4's is taken")),
)


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


MODELS = (
    Model("Llama 3.2 1B", 2048, 8192, 32, 8, 64, 16),
    Model("Llama 3.1 8B", 4096, 14336, 32, 8, 128, 32),
    Model("Llama 3.1 70B", 8192, 28672, 64, 8, 128, 80),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call. ``streamed`` and ``others``: bytes that simdgroups ask for; ``*_once``: distinct bytes;
    ``used`` and ``lines``: bytes asked for, and of the lines touched, of what is streamed, or of all."""

    streamed: float
    streamed_once: float
    others: float
    others_once: float
    used: float
    lines: float
    threadgroup_bytes: int
    barriers: float

    @property
    def memory_bytes(self) -> float:
        return self.streamed + self.others_once

    @property
    def coalescing(self) -> float:
        return self.used / self.lines

    @property
    def ratio(self) -> float | None:
        return self.streamed / self.streamed_once if self.streamed_once else None


@dataclass(frozen=True, slots=True)
class Case:
    """A call at a size of interest. ``sizes`` are three smaller ones, or empty where it is run as it is.
    ``calls``: how often a decoder layer has it."""

    kernel: str
    what: str
    rows: int
    run: Callable[[MetalKernels, int], Any]
    target: int
    flops: float
    sizes: tuple[int, ...] = ()
    calls: int = 1
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Line:
    case: Case
    cost: Cost

    def seconds(self, chip: Chip) -> float:
        return max(self.cost.memory_bytes / (chip.gbps * 1e9), self.case.flops / (chip.tflops * 1e12))


class Meter:
    """Runs cases in the harness, one schedule each."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._host = Host(settings or Settings(seeds=(0,), **HOST_PERMISSIONS))
        self._kernels = MetalKernels(self._host.metal_kernel)

    def measure(self, case: Case) -> Line:
        """Raises ValueError where a cost is not linear."""
        if not case.sizes:
            return Line(case, self._cost(case, case.target))
        first, second, third = (self._cost(case, size) for size in case.sizes)
        if not _is_near(_scaled(first, second, case.sizes[:2], case.sizes[2]), third):
            raise ValueError(f"the cost of {case.kernel} is not linear in its size")
        cost = _scaled(first, second, case.sizes[:2], case.target)
        return Line(case, replace(cost, **{name: getattr(cost, name) * case.parts for name in _SCALED}))

    def _cost(self, case: Case, size: int) -> Cost:
        self._host.reports.clear()
        mx.random.seed(0)
        mx.eval(case.run(self._kernels, size))
        return _total(self._host.reports)


_SCALED = ("streamed", "streamed_once", "others", "others_once", "used", "lines")


def _total(reports: Sequence[Report]) -> Cost:
    def of(is_streamed: bool, *names: str) -> int:
        buffers = (b for report in reports for b in report.buffers if (b.name in STREAMED) is is_streamed)
        return sum(getattr(b, name) for b in buffers for name in names)

    is_streaming = of(True, "accesses") > 0
    asked, once = ("simd_read", "simd_written"), ("unique_read", "unique_written")
    return Cost(
        streamed=of(True, *asked),
        streamed_once=of(True, *once),
        others=of(False, *asked),
        others_once=of(False, *once),
        used=of(is_streaming, *asked),
        lines=of(is_streaming, "line_bytes"),
        threadgroup_bytes=max(report.threadgroup_bytes for report in reports),
        barriers=sum(report.barriers / report.groups for report in reports),
    )


def _scaled(first: Cost, second: Cost, sizes: Sequence[int], target: int) -> Cost:
    share = (target - sizes[0]) / (sizes[1] - sizes[0])
    values = {
        name: getattr(first, name) + share * (getattr(second, name) - getattr(first, name))
        for name in _SCALED
    }
    return Cost(**values, threadgroup_bytes=second.threadgroup_bytes, barriers=second.barriers)


def _is_near(a: Cost, b: Cost) -> bool:
    return all(abs(getattr(a, n) - getattr(b, n)) <= 0.001 * max(getattr(b, n), 1) for n in _SCALED)


def cases(model: Model) -> Iterator[Case]:
    """A decode step's kernels, each at ROWS rows."""
    for rows in ROWS:
        yield from _norms(model, rows)
        yield from _products(model, rows)
        yield from _pages(model, rows)
        yield _attention(model, rows)


def _norms(model: Model, rows: int) -> Iterator[Case]:
    def run(kernels: MetalKernels, size: int) -> Any:
        x, weight = _normal(size, model.hidden), _normal(model.hidden)
        return kernels.norms.add_rms_norm(x, x + 1, weight, 1e-5)

    yield Case("add_rms_norm", f"{model.hidden}", rows, run, rows, 5.0 * rows * model.hidden, calls=2)


def _products(model: Model, rows: int) -> Iterator[Case]:
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    for what, outputs, inputs in (
        ("q, k, v", heads, model.hidden),
        ("o", model.hidden, model.heads * model.head_dim),
        ("down", model.hidden, model.ffn),
    ):

        def run(kernels: MetalKernels, size: int, inputs: int = inputs) -> Any:
            return kernels.matmul.quantized_matmul(
                _normal(rows, inputs), *_quantized(size, inputs), group_size=GROUP_SIZE, bits=BITS
            )

        flops = 2.0 * rows * inputs * outputs
        label = f"{what}: {inputs} to {outputs}"
        yield Case("quantized_matmul", label, rows, run, outputs, flops, (64, 128, 192))

    def gate_up(kernels: MetalKernels, size: int) -> Any:
        gate, up = (QuantizedWeight(*_quantized(size, model.hidden), GROUP_SIZE, BITS) for _ in range(2))
        return kernels.matmul.gate_up(_normal(rows, model.hidden), gate, up, activation="silu")

    flops = 4.0 * rows * model.hidden * model.ffn
    label = f"{model.hidden} to twice {model.ffn}"
    yield Case("gate_up", label, rows, gate_up, model.ffn, flops, (64, 128, 192))


def _pages(model: Model, rows: int) -> Iterator[Case]:
    """Each row is the next of a sequence of its own."""
    heads, dim = model.kv_heads, model.head_dim
    # The rotation of a pair is 6 operations.
    flops = 3.0 * rows * (model.heads + heads) * dim
    layout = f"{model.heads} and {heads} heads of {dim}"

    def new(count: int) -> tuple[KvRows, KvPages]:
        rope = Rope(10000.0 ** (-mx.arange(0, dim, 2) / dim))
        k, v, q = (_normal(count, n, dim) for n in (heads, heads, model.heads))
        positions = mx.full((count,), 1000, dtype=mx.int32)
        pages = KvPages(_normal(count, heads, dim, PAGE), _normal(count, heads, PAGE, dim))
        return KvRows(k, v, q, positions, rope), pages

    def tails(kernels: MetalKernels, size: int) -> Any:
        given, pages = new(size)
        pieces = mx.array([(-1 - r, PAGE // 2, 1, r, 0, 0, 0, 0) for r in range(size)], dtype=mx.int32)
        q, written = kernels.pages.write_tails(given, pages, pages, pieces)
        return q, written.keys, written.values

    def through(kernels: MetalKernels, size: int) -> Any:
        given, pages = new(size)
        slots = mx.arange(size, dtype=mx.int32) * PAGE + PAGE // 2
        return kernels.pages.write_pages(given, pages, slots, mx.zeros((TOKEN_SIZE,), dtype=mx.int32))

    yield Case("rope_and_write_tails", layout, rows, tails, rows, flops)
    yield Case("rope_and_write_pages", layout, rows, through, rows, flops, calls=0)


def _attention(model: Model, rows: int) -> Case:
    """Runs one row and one head of keys: threadgroups have no more in common."""
    group = model.heads // model.kv_heads

    def run(kernels: MetalKernels, size: int) -> Any:
        pages = size // PAGE
        keys, values = _normal(pages, 1, model.head_dim, PAGE), _normal(pages, 1, PAGE, model.head_dim)
        table = mx.arange(pages, dtype=mx.int32)[None]
        starts, lengths = mx.array([0, 1], dtype=mx.int32), mx.array([size], dtype=mx.int32)
        q = _normal(1, group, model.head_dim)
        return kernels.attention.paged_attention(q, keys, values, table, starts, lengths, scale=0.1)

    flops = 4.0 * rows * model.heads * model.head_dim * CONTEXT
    label = f"decode at {CONTEXT}: {model.heads} and {model.kv_heads} heads of {model.head_dim}"
    parts = rows * model.kv_heads
    return Case("paged_attention", label, rows, run, CONTEXT, flops, (512, 1024, 1536), parts=parts)


def _normal(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.float16)


def _quantized(outputs: int, inputs: int) -> tuple[mx.array, mx.array, mx.array]:
    words = mx.random.randint(0, 1 << 31, (outputs, inputs * BITS // 32)).astype(mx.uint32)
    return words, _normal(outputs, inputs // GROUP_SIZE), _normal(outputs, inputs // GROUP_SIZE)
