"""The only reader of environment variables, and the defaults that several modules share.

MLXSERVE_HOME       folder of imported models and caches (default: mlxserve in $XDG_CACHE_HOME or ~/.cache)
MLXSERVE_KERNELS    reference | cpu | metal | metal-host: which kernels run (read by mlxserve_kernels)
MLXSERVE_DECODER    fused | ops | blocks: how decoder layers run (read by mlxserve_kernels)
MLXSERVE_PAGE_ROUTE tail | through | drained: how KV pages are written on Metal (read by mlxserve_kernels)
MLXSERVE_THREADS    number of CPU kernel threads (read by mlxserve_kernels)
MLXSERVE_CPU_ISA    portable | avx2 | avx512: instruction set of the CPU kernels (read by mlxserve_kernels)
MLXSERVE_CPU_MATMUL exact | int16 | int8: what activations are rounded to (read by mlxserve_kernels)
MLXSERVE_DEBUG      0 | 1: with 1 the command line prints the traceback of an unexpected error
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import UsageError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080
DEFAULT_MODEL = "smollm2"
DEFAULT_PAGE_SIZE = 32
"""Tokens in one KV page."""
KV_BITS = (8, 4)
"""Of quantized keys and values."""
KV_PAGE_UNIT = 16
"""Page sizes of quantized keys and values are multiples of this."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine.

    max_running      rows that run at once; more wait
    max_waiting      requests that may wait; one more is refused with QueueFullError
    page_size        tokens a KV page
    max_step_tokens  tokens of prefill and decode together in one forward
    memory_limit     bytes for weights and KV together; None: derived from the machine
    kv_pages         a fixed number of KV pages instead of a memory limit (tests)
    kv_bits          8 or 4: keys and values become integers of so many bits in groups of 32 (9 or 6 bits
                     a value with their scales); page_size must be a multiple of 16. None: the model's dtype

    Raises UsageError, naming the field, for a value that no engine can run with.
    """

    max_running: int = 16
    max_waiting: int = 128
    page_size: int = DEFAULT_PAGE_SIZE
    max_step_tokens: int = 512
    memory_limit: int | None = None
    kv_pages: int | None = None
    prefix_cache: bool = True
    kv_bits: int | None = None

    def __post_init__(self) -> None:
        self._check("max_running", self.max_running, 1)
        self._check("max_waiting", self.max_waiting, 0)
        self._check("page_size", self.page_size, 1)
        self._check("max_step_tokens", self.max_step_tokens, 1)
        self._check("memory_limit", self.memory_limit, 1)
        self._check("kv_pages", self.kv_pages, 1)
        if self.kv_bits not in (None, *KV_BITS):
            raise UsageError(f"kv_bits must be 8 or 4, not {self.kv_bits}")
        if self.kv_bits is not None and self.page_size % KV_PAGE_UNIT:
            raise UsageError(
                f"page_size must be a multiple of {KV_PAGE_UNIT} with kv_bits, not {self.page_size}"
            )

    def _check(self, name: str, value: int | None, minimum: int) -> None:
        if value is not None and value < minimum:
            raise UsageError(f"{name} must be at least {minimum}, not {value}")


def home_dir() -> Path:
    """The folder for imported models and caches; not created here."""
    value = os.environ.get("MLXSERVE_HOME")
    if value:
        return Path(value).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mlxserve"


def is_debug() -> bool:
    """Whether the command line prints tracebacks. Raises UsageError for a value other than 0 or 1."""
    value = os.environ.get("MLXSERVE_DEBUG", "")
    if value not in ("", "0", "1"):
        raise UsageError(f"MLXSERVE_DEBUG must be 0 or 1, not {value!r}")
    return value == "1"
