"""A process of its own for one side of a measurement. While it is not asked it is blocked on its pipe, so
that the other side has the machine to itself."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

from mlxserve.cli.process import end_process
from mlxserve.errors import MlxserveError, RequestFailedError, UsageError


class Answer(Protocol):
    """What a side does with a question; whatever goes through a pipe goes in and out."""

    def __call__(self, question: Any) -> Any: ...


class SideProcess:
    """Runs ``open_side(*arguments)``, a function of a module, in a new process, and its result on each
    question. A context manager; the process ends with it, and also when this one ends in any other way."""

    def __init__(self, name: str, open_side: Callable[..., Answer], *arguments: Any) -> None:
        self._name = name
        # Not forked: a copy of a process with threads, ours or MLX's, may stand still for ever.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, open_side, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        if kind is not None:
            self._process.kill()
        self._process.join()

    def ask(self, question: Any) -> Any:
        """The side's answer. Its errors are raised here: UsageError as such, others as RequestFailedError."""
        try:
            self._pipe.send(question)
            kind, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise RequestFailedError(
                f"the {self._name} ended with exit code {self._process.exitcode}"
            ) from None
        if kind == "answer":
            return answer
        raise UsageError(answer) if kind == "usage" else RequestFailedError(f"the {self._name}: {answer}")


def _run(pipe: Connection, open_side: Callable[..., Answer], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole group; the other end says when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    side: Answer | None = None
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            end_process(0)
        try:
            if side is None:
                side = open_side(*arguments)
            reply = ("answer", side(question))
        except UsageError as error:
            reply = ("usage", str(error))
        except MlxserveError as error:
            reply = ("error", str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other end says it
            reply = ("error", f"{type(error).__name__}: {error}")
        pipe.send(reply)
