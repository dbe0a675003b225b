"""What a run has cost: bytes and coalescing by buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BufferCost:
    """Bytes one buffer gave and took.

    `thread_*` counts what threads asked for; `simd_*` counts each byte once an access of a simdgroup (a
    broadcast is one read); `unique_*` counts each byte once a run; `line_bytes` is 64 times the 64-byte lines
    that the simdgroup accesses touched. A lane's accesses to neighbouring addresses, with no synchronisation
    between, are one of up to 16 bytes, as compilers merge them.
    """

    name: str
    bytes: int
    thread_read: int
    thread_written: int
    simd_read: int
    simd_written: int
    line_bytes: int
    accesses: int
    unique_read: int
    unique_written: int
    unique_line_bytes: int

    @property
    def read_ratio(self) -> float:
        """Bytes read by simdgroups over distinct bytes read: 1.0 is each byte once."""
        return self.simd_read / self.unique_read if self.unique_read else 1.0

    @property
    def line_use(self) -> float:
        """Distinct bytes over the bytes of the distinct 64-byte lines touched: 1.0 where a cache that keeps
        lines until they are used up fetches nothing in vain."""
        touched = min(self.unique_line_bytes, self.bytes)
        return max(self.unique_read, self.unique_written) / touched if touched else 1.0

    @property
    def coalescing(self) -> float:
        """Bytes used over bytes of the 64-byte lines touched, over all simdgroup accesses."""
        return (self.simd_read + self.simd_written) / self.line_bytes if self.line_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """One launch: where, how long, and what it cost (counted in the first schedule).

    `name` is the kernel's, `kernel` names the instance: template arguments and dtypes as well.
    """

    name: str
    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    groups: int
    schedules: int
    accesses: int
    barriers: int
    threadgroup_bytes: int
    seconds: float
    buffers: tuple[BufferCost, ...]

    def buffer(self, name: str) -> BufferCost:
        """The cost of the named buffer. Raises KeyError with the names there are."""
        for cost in self.buffers:
            if cost.name == name:
                return cost
        raise KeyError(f"no buffer {name!r}; there are {', '.join(cost.name for cost in self.buffers)}")

    def table(self) -> str:
        """Fixed-width lines for people."""
        head = (
            f"{self.kernel}  grid {self.grid}  threadgroup {self.threadgroup}  groups {self.groups}  "
            f"schedules {self.schedules}  barriers {self.barriers}  "
            f"threadgroup bytes {self.threadgroup_bytes}"
        )
        columns = f"{'buffer':<16}{'unique':>12}{'requested':>12}{'ratio':>8}{'written':>12}"
        lines = [head, f"  {columns}{'coalesced':>11}{'line use':>10}"]
        for b in self.buffers:
            lines.append(
                f"  {b.name:<16}{b.unique_read:>12}{b.simd_read:>12}{b.read_ratio:>8.3f}{b.simd_written:>12}"
                f"{b.coalescing:>11.1%}{b.line_use:>10.1%}"
            )
        return "\n".join(lines)


def summary(reports: Iterable[Report], streamed: Collection[str] = ()) -> str:
    """A line a kernel: launches, instances, shapes, schedules, and what all launches together have cost.

    A ratio is bytes read by simdgroups over distinct bytes, a coalescing bytes used over bytes of the lines
    touched. The buffers named in ``streamed``, that are to be read once, are apart from the others.
    """
    by_name: dict[str, list[Report]] = {}
    for report in reports:
        by_name.setdefault(report.name, []).append(report)
    lines = [
        f"{'kernel':<28}{'launches':>9}{'instances':>10}{'shapes':>7}{'schedules':>10}"
        f"{'once ratio':>12}{'coalesced':>11}{'others':>9}{'coalesced':>11}"
    ]
    for name, runs in sorted(by_name.items()):
        buffers = [b for r in runs for b in r.buffers if b.accesses]
        once = [b for b in buffers if b.name in streamed]
        others = [b for b in buffers if b.name not in streamed]
        shapes = {(r.kernel, r.grid, tuple(b.bytes for b in r.buffers)) for r in runs}
        lines.append(
            f"{name:<28}{len(runs):>9}{len({r.kernel for r in runs}):>10}{len(shapes):>7}"
            f"{max(r.schedules for r in runs):>10}{_together(once, 12)}{_together(others, 9)}"
        )
    return "\n".join(lines)


def _together(costs: Sequence[BufferCost], width: int) -> str:
    """Ratio and coalescing of all buffers as one."""
    if not costs:
        return f"{'-':>{width}}{'-':>11}"
    distinct = sum(b.unique_read for b in costs)
    ratio = sum(b.simd_read for b in costs) / distinct if distinct else 1.0
    used = sum(b.simd_read + b.simd_written for b in costs)
    return f"{ratio:>{width}.3f}{used / sum(b.line_bytes for b in costs):>11.1%}"
