"""``chat`` on a terminal: a pseudo-terminal stands in for the person's."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, WAIT_S

Script = Callable[..., str]


class Terminal:
    """A command whose stdin, stdout and stderr are one terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
        self.master, slave = pty.openpty()
        self.popen = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=environment | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self._unread = ""

    def read_until(self, text: str, timeout: float = WAIT_S) -> str:
        """Everything up to and including ``text``; TimeoutError when it does not come."""
        deadline = time.monotonic() + timeout
        while text not in self._unread:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no {text!r} in {self._unread!r}")
            try:
                self._unread += os.read(self.master, 4096).decode()
            except OSError as error:
                raise AssertionError(f"the command ended after {self._unread!r}") from error
        seen, _, self._unread = self._unread.partition(text)
        return seen + text

    def interrupt_prompt(self) -> None:
        """Ctrl-C until a new prompt comes: readline misses a signal just before it begins to wait."""
        for _ in range(60):
            self.popen.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                self.read_until("> ", timeout=1)
                return
        raise AssertionError("Ctrl-C at the prompt gave no new one")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())


@pytest.fixture
def open_chat(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[[str], Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(model: str) -> Terminal:
        terminal = Terminal(["chat", model], environment, tmp_path)
        opened.append(terminal)
        return terminal

    yield open_terminal
    for terminal in opened:
        if terminal.popen.poll() is None:
            terminal.popen.kill()
        terminal.popen.wait(timeout=WAIT_S)
        os.close(terminal.master)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(
    open_chat: Callable[[str], Terminal], script: Script
) -> None:
    endless = [{"match": "run", "pieces": ["so "], "end": "run", "delay_ms": 20}]
    short = [{"match": "", "pieces": ["Lima"], "end": "eos"}]
    terminal = open_chat(script(endless + short))
    terminal.read_until("Ctrl-D leaves.")
    terminal.read_until("> ")
    terminal.type("run on\n")
    terminal.read_until("so so so")
    terminal.popen.send_signal(signal.SIGINT)
    terminal.read_until("(stopped)")
    terminal.read_until("> ")
    terminal.type("capital?\n")
    assert "Lima" in terminal.read_until("new tokens")
    terminal.read_until("> ")
    terminal.interrupt_prompt()
    terminal.type("\x04")
    assert terminal.popen.wait(timeout=WAIT_S) == 0
