"""What runs, and what that allows."""

from __future__ import annotations

from mlxserve_kernels.dispatch import extension, page_route, selection


def implementation() -> str:
    """``cpu-avx512``, ``cpu-avx2``, ``cpu-portable``, ``metal``, ``metal-host`` or ``reference``."""
    chosen = selection()
    return chosen.name if chosen.cpu is None else f"cpu-{chosen.cpu.isa()}"


def supports_steps_in_flight() -> bool:
    """Whether pages may be written while an earlier step still runs. If not, a write during a step copies
    the whole pool: evaluate each step before the next one is built. Pages must then be made by
    ``dispatch.page_route``."""
    return page_route() != "drained"


def release_thread() -> None:
    """Free what MLX keeps for the calling thread, which is about to end. Its compiled functions hold Python
    objects: freed by the thread's own end, which may come after Python's, they would abort the process.
    Without the extension there is no way to free them."""
    cpu = extension()
    if cpu is not None:
        cpu.clear_compile_cache()
