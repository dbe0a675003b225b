"""The runtime behind ctypes: buffers in guarded slots, one launch at a time."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metal_on_host import toolchain
from metal_on_host.errors import FAULT_KINDS, MetalCallError, MetalFault, MetalHostError
from metal_on_host.lines import line_of
from metal_on_host.report import BufferCost, Report

Bytes = NDArray[np.uint8]
Triple = tuple[int, int, int]

MAX_THREADS = 1024
MAX_BUFFERS = 31
_WRITABLE, _INITIALISED, _COUNTED = 1, 2, 4


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("divergent_simd", ctypes.c_uint32),
        ("access_limit", ctypes.c_uint64),
        ("image_start", ctypes.c_uint64),
        ("image_end", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("groups", ctypes.c_uint64),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("file", ctypes.c_char * 256),
        ("code", ctypes.c_uint64),
        ("other_code", ctypes.c_uint64),
        ("slot", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_uint32),
        ("is_write", ctypes.c_uint32),
        ("group", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("lane", ctypes.c_uint32),
        ("simdgroup", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("other_index", ctypes.c_int32),
        ("note", ctypes.c_char * 256),
    )


class _Cost(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "thread_read",
            "thread_written",
            "simd_read",
            "simd_written",
            "lines",
            "accesses",
            "unique_read",
            "unique_written",
            "unique_lines",
        )
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """How kernels are run.

    `seeds` names the schedules: 0 runs threads in order, another number permutes threadgroups and threads;
    results must agree bit by bit unless `is_order_free`. `divergent_simd` lets lanes of a simdgroup be in
    different simdgroup functions (Metal then takes the active lanes) instead of reporting it.
    `writable_inputs` names inputs that a kernel may write through (their arrays change).
    `may_leave_unwritten` names outputs that need not be written whole. `slice_offset` is the number of
    elements by which every input starts beyond a page boundary, as a slice of a larger array does.
    """

    seeds: tuple[int, ...] = (0, 1)
    count: bool = True
    divergent_simd: bool = False
    is_order_free: bool = False
    writable_inputs: frozenset[str] = frozenset()
    may_leave_unwritten: frozenset[str] = frozenset()
    slice_offset: int = 0
    access_limit: int = 1 << 40
    cache_dir: Path | None = None


@dataclass(slots=True)
class Argument:
    """One bound buffer: bytes, and what the kernel may do with them. `data` receives what a run wrote."""

    name: str
    data: Bytes
    item_size: int
    is_written: bool = False
    is_initialised: bool = True
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded shared object: its path, handle and where it lies in memory."""

    path: Path
    library: ctypes.CDLL
    start: int
    end: int


def load(path: Path) -> Loaded:
    """Loads a kernel's shared object, whose undefined symbols the runtime and libm hold."""
    _runtime(path.parent)
    library = ctypes.CDLL(str(path))
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            low, high = line.split()[0].split("-")
            ranges.append((int(low, 16), int(high, 16)))
    if not ranges:
        raise MetalHostError(f"{path} is loaded but not mapped")
    return Loaded(path, library, min(low for low, _ in ranges), max(high for _, high in ranges))


@cache
def _runtime(folder: Path) -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    runtime = ctypes.CDLL(str(toolchain.build_runtime(folder)), mode=ctypes.RTLD_GLOBAL)
    runtime.mtl_add_buffer.restype = ctypes.c_void_p
    runtime.mtl_add_buffer.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
    runtime.mtl_reset.restype = None
    runtime.mtl_launch.argtypes = (ctypes.POINTER(_Launch), ctypes.POINTER(_Fault))
    runtime.mtl_buffer_cost.restype = None
    runtime.mtl_buffer_cost.argtypes = (ctypes.c_uint32, ctypes.POINTER(_Cost))
    runtime.mtl_buffer_name.restype = ctypes.c_char_p
    runtime.mtl_buffer_bytes.restype = ctypes.c_uint64
    runtime.mtl_first_unwritten.restype = ctypes.c_int64
    return runtime


_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Target:
    """What is launched: a kernel's short name, its instance, and the symbol that runs it."""

    label: str
    instance: str
    loaded: Loaded
    symbol: str


def launch(
    target: Target,
    arguments: Sequence[Argument | None],
    grid: Triple,
    threadgroup: Triple,
    settings: Settings,
) -> Report:
    """Runs a kernel in every schedule of `settings`; arguments' bytes then hold what it wrote.

    Raises MetalFault for what the kernel did wrong and MetalCallError for a grid or threadgroup Metal
    refuses.
    """
    _check_sizes(target.instance, grid, threadgroup, arguments)
    with _lock:
        return _Run(target, arguments, grid, threadgroup, settings).all_schedules()


def _check_sizes(name: str, grid: Triple, threadgroup: Triple, arguments: Sequence[Argument | None]) -> None:
    if min(grid) < 1 or min(threadgroup) < 1:
        raise MetalCallError(
            f"{name}: grid {grid} and threadgroup {threadgroup} must be at least 1 on each axis"
        )
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > MAX_THREADS:
        raise MetalCallError(
            f"Thread group size ({threads}) is greater than the maximum allowed threads per threadgroup "
            f"({MAX_THREADS})."
        )
    if len(arguments) > MAX_BUFFERS:
        raise MetalCallError(f"{name}: {len(arguments)} buffers; Metal binds at most {MAX_BUFFERS}")


class _Run:
    def __init__(
        self,
        target: Target,
        arguments: Sequence[Argument | None],
        grid: Triple,
        threadgroup: Triple,
        settings: Settings,
    ) -> None:
        self.target = target
        self.name = target.instance
        self.loaded = target.loaded
        self.arguments = arguments
        self.settings = settings
        self.runtime = _runtime(target.loaded.path.parent)
        self.grid = grid
        self.threadgroup = (
            min(threadgroup[0], grid[0]),
            min(threadgroup[1], grid[1]),
            min(threadgroup[2], grid[2]),
        )
        self.entry = ctypes.cast(getattr(target.loaded.library, target.symbol), ctypes.c_void_p).value

    def all_schedules(self) -> Report:
        start = time.perf_counter()
        report: Report | None = None
        first: list[Bytes] = []
        for seed in self.settings.seeds:
            is_first = report is None
            launch, results = self._one(seed, count=self.settings.count and is_first)
            if report is None:
                first = results
                report = self._report(launch)
            elif not self.settings.is_order_free:
                self._compare(first, results, seed)
        if report is None:
            raise MetalCallError("settings.seeds is empty")
        written = [a for a in self.arguments if a is not None and a.is_written]
        for argument, result in zip(written, first, strict=True):
            argument.data[:] = result
        return replace(report, seconds=time.perf_counter() - start)

    def _one(self, seed: int, *, count: bool) -> tuple[_Launch, list[Bytes]]:
        runtime = self.runtime
        runtime.mtl_reset()
        addresses = [self._bind(argument, count) for argument in self.arguments]
        launch = _Launch(
            entry=self.entry,
            grid=self.grid,
            group=self.threadgroup,
            seed=seed,
            count=count,
            divergent_simd=self.settings.divergent_simd,
            access_limit=self.settings.access_limit,
            image_start=self.loaded.start,
            image_end=self.loaded.end,
        )
        fault = _Fault()
        status = runtime.mtl_launch(ctypes.byref(launch), ctypes.byref(fault))
        if status == 1:
            raise self._fault(fault)
        if status != 0:
            raise MetalHostError(f"{self.name}: no memory for {MAX_THREADS} stacks")
        results: list[Bytes] = []
        for slot, (argument, address) in enumerate(zip(self.arguments, addresses, strict=True)):
            if argument is None or not argument.is_written:
                continue
            self._check_written(slot, argument)
            results.append(np.frombuffer(ctypes.string_at(address, argument.data.nbytes), np.uint8))
        return launch, results

    def _bind(self, argument: Argument | None, count: bool) -> int:
        if argument is None:
            argument = Argument("(not bound)", np.empty(0, np.uint8), 1, is_counted=False)
        flags = _WRITABLE * argument.is_written + _INITIALISED * argument.is_initialised
        flags += _COUNTED * (count and argument.is_counted)
        is_sliced = argument.is_initialised and argument.is_counted
        offset = self.settings.slice_offset * argument.item_size if is_sliced else 0
        size = argument.data.nbytes
        address = self.runtime.mtl_add_buffer(argument.name.encode(), size, flags, offset)
        if not address:
            raise MetalHostError(
                f"{self.name}: no memory for buffer {argument.name} of {argument.data.nbytes} bytes"
            )
        if argument.is_initialised:
            ctypes.memmove(address, argument.data.ctypes.data, argument.data.nbytes)
        else:
            # NaN in every float: what a kernel may leave unwritten, the next one shall not read unseen.
            ctypes.memset(address, 0xFF, argument.data.nbytes)
        return int(address)

    def _check_written(self, slot: int, argument: Argument) -> None:
        if argument.is_initialised or argument.name in self.settings.may_leave_unwritten:
            return
        offset = self.runtime.mtl_first_unwritten(slot)
        if offset >= 0:
            raise MetalFault(
                "unwritten output",
                f"{self.name}: {argument.name}[{offset // argument.item_size}] of {argument.data.nbytes} "
                f"bytes was never written",
            )

    def _compare(self, first: list[Bytes], other: list[Bytes], seed: int) -> None:
        written = [a for a in self.arguments if a is not None and a.is_written]
        for argument, a, b in zip(written, first, other, strict=True):
            different = np.flatnonzero(a != b)
            if different.size:
                raise MetalFault(
                    "schedule dependence",
                    f"{self.name}: {argument.name}[{different[0] // argument.item_size}] differs between "
                    f"the schedules of seeds {self.settings.seeds[0]} and {seed}",
                )

    def _report(self, launch: _Launch) -> Report:
        costs = []
        for slot, argument in enumerate(self.arguments):
            if argument is None or not argument.is_counted:
                continue
            c = _Cost()
            self.runtime.mtl_buffer_cost(slot, ctypes.byref(c))
            costs.append(
                BufferCost(
                    argument.name,
                    argument.data.nbytes,
                    c.thread_read,
                    c.thread_written,
                    c.simd_read,
                    c.simd_written,
                    c.lines * 64,
                    c.accesses,
                    c.unique_read,
                    c.unique_written,
                    c.unique_lines * 64,
                )
            )
        return Report(
            self.target.label,
            self.name,
            self.grid,
            self.threadgroup,
            launch.groups,
            len(self.settings.seeds),
            launch.accesses,
            launch.barriers,
            launch.threadgroup_bytes,
            0.0,
            tuple(costs),
        )

    def _line(self, code: int) -> str:
        return line_of(self.loaded.path, code - self.loaded.start)

    def _fault(self, fault: _Fault) -> MetalFault:
        kind = FAULT_KINDS[fault.kind]
        parts = []
        if fault.slot >= 0:
            parts.append(
                f"{'write of' if fault.is_write else 'read of'} {fault.size} bytes at {self._place(fault)}"
            )
        if fault.note:
            parts.append(fault.note.decode())
        if fault.other_index >= -1 and fault.other_code:
            who = "another threadgroup" if fault.other_index < 0 else f"thread {fault.other_index}"
            parts.append(f"the other by {who} at {self._line(fault.other_code)}")
        where = (
            f"{fault.file.decode()}:{fault.line}"
            if fault.line
            else self._line(fault.code)
            if fault.code
            else "?"
        )
        thread = (
            f"thread {tuple(fault.thread)} (index {fault.index}, simdgroup {fault.simdgroup}, "
            f"lane {fault.lane}) of threadgroup {tuple(fault.group)}"
        )
        return MetalFault(kind, f"kernel {self.name}, {'; '.join(parts)}; {thread}, {where}")

    def _place(self, fault: _Fault) -> str:
        name = self.runtime.mtl_buffer_name(fault.slot).decode() if fault.slot < 128 else ""
        if not name:
            return f"address {fault.offset:#x}"
        size = self.runtime.mtl_buffer_bytes(fault.slot)
        bound = self.arguments[fault.slot] if fault.slot < len(self.arguments) else None
        item = bound.item_size if bound is not None else fault.size
        return f"{name}[{fault.offset // item}] (byte {fault.offset} of {size})"
