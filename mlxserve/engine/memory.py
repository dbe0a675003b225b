"""How many KV pages the memory allows.

On a Mac the limit is the device's recommended working set, elsewhere what is available now, within
the control group's limit; 80 % of it is used. Weights are paid first. The pool starts small and grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from mlxserve.config import EngineConfig
from mlxserve.errors import ModelLoadError

_SHARE = 0.8
_INITIAL_BYTES = 64 << 20
_MIN_PAGES = 8
_WIRED_HEADROOM = 1 << 30
_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class PagePlan:
    num_initial: int
    limit: int


def plan_pages(config: EngineConfig, *, page_bytes: int, weight_bytes: int) -> PagePlan:
    """The first and the largest size of the page pool.

    Raises ModelLoadError when not even a few pages fit beside the weights, with both numbers.
    """
    if config.kv_pages is not None:
        return PagePlan(config.kv_pages, config.kv_pages)
    budget = config.memory_limit if config.memory_limit is not None else default_memory_limit(weight_bytes)
    limit = (budget - weight_bytes) // page_bytes
    if limit < _MIN_PAGES:
        needed = weight_bytes + _MIN_PAGES * page_bytes
        raise ModelLoadError(
            f"the model does not fit the memory limit: weights and a minimal KV pool need "
            f"{needed / 2**30:.2f} GiB, the limit is {budget / 2**30:.2f} GiB (--memory-limit)"
        )
    initial = max(_MIN_PAGES, _INITIAL_BYTES // page_bytes)
    return PagePlan(min(initial, limit), limit)


def default_memory_limit(weight_bytes: int) -> int:
    """Bytes for weights and KV together. The weights are in memory already when this is asked."""
    if mx.metal.is_available():
        return int(_working_set() * _SHARE)
    available = psutil.virtual_memory().available + weight_bytes
    return int(min(available, cgroup_limit() or available) * _SHARE)


def cgroup_limit() -> int | None:
    """The control group's memory limit in bytes; None without one."""
    for name in _CGROUP_FILES:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < psutil.virtual_memory().total:
            return int(text)
    return None


def wire_memory(weight_bytes: int) -> None:
    """On a Mac, keep the weights resident: min(weights + headroom, working set) is wired."""
    if mx.metal.is_available():
        mx.set_wired_limit(min(weight_bytes + _WIRED_HEADROOM, _working_set()))


def _working_set() -> int:
    """Bytes that the device recommends to keep resident."""
    return int(mx.device_info()["max_recommended_working_set_size"])
