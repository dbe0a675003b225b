"""How scripts/bench_peers.py talks to the sides that it measures: one process each, JSON lines.

A request is ``{"op": NAME, …}``, its reply one JSON object, ``{"error": TEXT}`` if it failed. Between
requests a side is blocked on its stdin, so that whoever runs has the machine to itself. The end of stdin ends
a side. Standard library only: a peer's own virtual environment need not have anything of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

Handler = Callable[..., Mapping[str, Any]]


class PeerError(Exception):
    """A side that cannot be measured, in one line."""


def serve(handlers: Mapping[str, Handler]) -> None:
    """The side's loop. What its libraries print goes to stderr: stdout holds replies alone."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = handlers[request.pop("op")](**request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other end says it
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class Peer:
    """One side, running. A context manager: the process ends with it."""

    def __init__(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        # A file: a pipe that nobody reads while the side works would stop it when full.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=None if environment is None else {**os.environ, **environment},
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{name}: cannot run {command[0]}: {error.strerror}") from None

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its reply. PeerError with what the side said if it failed or ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{self.name}: {reply['error']}")
        return reply

    def _ended(self) -> PeerError:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return PeerError(f"{self.name} ended with exit code {code}" + (f": {lines[-1]}" if lines else ""))
