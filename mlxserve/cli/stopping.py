"""What Ctrl-C and SIGTERM do to a running server."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType, TracebackType
from typing import Self

from mlxserve.cli.process import end_process

_FORCED_EXIT = 130


class StopSignals:
    """Owns SIGINT and SIGTERM while it is entered (main thread only), and restores them afterwards.

    Until ``watch`` is called a signal raises: KeyboardInterrupt for Ctrl-C, SystemExit(0) for SIGTERM.
    After it, the first signal sets the event and a second Ctrl-C ends the process at once. A second
    SIGTERM does not: supervisors send it twice (timeout to the process and to its group), in no hurry.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None
        self._is_stopping = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def watch(self) -> asyncio.Event:
        """From now on signals set the returned event. Called once, on the event loop of the main thread."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        return self._event

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_stopping:
            if signum == signal.SIGTERM:
                return
            end_process(_FORCED_EXIT)
        if self._loop is None or self._event is None:
            if signum == signal.SIGTERM:
                raise SystemExit(0)
            raise KeyboardInterrupt
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._event.set)
