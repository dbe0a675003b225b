"""The machine's own limit: how fast its memory is read when nothing is computed."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_READ_BYTES = 256 << 20
"""Beyond any cache, and the same for every number of threads."""
_NUM_READS = 5

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Bytes a second, best of several reads: of memory in the machine's small pages, and in huge pages, whose
    addresses need fewer look-ups (None where the system has no way to ask for them)."""

    small_pages: float
    huge_pages: float | None

    @property
    def best(self) -> float:
        """What the fraction of bandwidth is measured against: the harder limit."""
        return max(self.small_pages, self.huge_pages or 0.0)


def measure_read_rates(num_threads: int, *, num_bytes: int = _READ_BYTES) -> ReadRates:
    """Reads ``num_bytes`` with ``num_threads`` threads together, from both kinds of pages in turn."""
    share = max(num_bytes // num_threads // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    small = [_pages(share, "MADV_NOHUGEPAGE") for _ in range(num_threads)]
    huge = [_pages(share, "MADV_HUGEPAGE") for _ in range(num_threads)]
    rates: tuple[list[float], list[float]] = ([], [])
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_NUM_READS):
            for arrays, found in zip((small, huge), rates, strict=True):
                found.append(_read(pool, arrays))
    has_huge = hasattr(mmap, "MADV_HUGEPAGE")
    return ReadRates(max(rates[0]), max(rates[1]) if has_huge else None)


def _pages(num_bytes: int, advice: str) -> Words:
    """Touched memory of its own; ``advice`` is taken where the system knows it."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, advice):
        memory.madvise(getattr(mmap, advice))
    words = np.frombuffer(memory, dtype=np.int64)
    words.fill(1)
    return words


def _read(pool: ThreadPoolExecutor, arrays: Sequence[Words]) -> float:
    started = time.perf_counter()
    list(pool.map(np.max, arrays))
    return sum(array.nbytes for array in arrays) / (time.perf_counter() - started)
