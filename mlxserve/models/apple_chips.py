"""Apple's chips for Macs: memory sizes in GiB and memory bandwidth in GB/s, from the technical specifications
and announcements that Apple publishes for each Mac (support.apple.com/specs, apple.com/newsroom)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """``bandwidth`` in 1e9 bytes a second, of the largest variant with these ``memories`` (GiB)."""

    name: str
    bandwidth: float
    memories: tuple[int, ...]


CHIPS = (
    Chip("M1", 68.25, (8, 16)),
    Chip("M1 Pro", 200, (16, 32)),
    Chip("M1 Max", 400, (32, 64)),
    Chip("M1 Ultra", 800, (64, 128)),
    Chip("M2", 100, (8, 16, 24)),
    Chip("M2 Pro", 200, (16, 32)),
    Chip("M2 Max", 400, (32, 64, 96)),
    Chip("M2 Ultra", 800, (64, 128, 192)),
    Chip("M3", 100, (8, 16, 24)),
    Chip("M3 Pro", 150, (18, 36)),
    Chip("M3 Max (14-core)", 300, (36, 96)),
    Chip("M3 Max (16-core)", 400, (48, 64, 128)),
    Chip("M3 Ultra", 819, (96, 256, 512)),
    Chip("M4", 120, (16, 24, 32)),
    Chip("M4 Pro", 273, (24, 48, 64)),
    Chip("M4 Max (14-core)", 410, (36,)),
    Chip("M4 Max (16-core)", 546, (48, 64, 128)),
    Chip("M5", 153.6, (16, 24, 32)),
    Chip("M5 Pro", 307, (24, 48, 64)),
    Chip("M5 Max", 614, (48, 64, 128)),
)

_SMALL_SHARE, _LARGE_SHARE, _LARGE_GIB = 2 / 3, 3 / 4, 36


def working_set(memory_bytes: int) -> int:
    """Bytes that Metal recommends a process to keep resident: about two thirds of the memory, three quarters
    from 36 GiB on. What a Mac itself says (``recommendedMaxWorkingSetSize``) may differ a little."""
    share = _LARGE_SHARE if memory_bytes >= _LARGE_GIB << 30 else _SMALL_SHARE
    return int(memory_bytes * share)
