"""Real ``mlxserve`` processes: each gets its own home folder, none reaches the network."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "mlxserve"]
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "MLXSERVE_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "MLXSERVE_DEBUG": "",
    }


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Callable[..., Result]:
    """Run one command to its end, in an empty folder."""

    def run_command(*arguments: str, stdin: str = "", **variables: str) -> Result:
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=stdin.encode(),
            capture_output=True,
            cwd=tmp_path,
            env=environment | variables,
            timeout=WAIT_S,
            check=False,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run_command


class Process:
    """A running command whose stderr is read line by line."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first stderr line from here on that matches; fails when the process ends before."""
        while True:
            line = self._queue.get(timeout=WAIT_S)
            assert line is not None, f"ended with {self.popen.wait()}, stderr: {self.lines}"
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match

    def signal(self, signum: signal.Signals) -> None:
        self.popen.send_signal(signum)

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.popen.wait(timeout=WAIT_S)
        self._reader.join(timeout=WAIT_S)
        while (line := self._queue.get(timeout=WAIT_S)) is not None:
            self.lines.append(line)
        return code

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(timeout=WAIT_S)
        self._reader.join(timeout=WAIT_S)
        for pipe in (self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()


class Starter:
    """Starts commands, and Python code that needs a process of its own."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment = environment
        self._folder = folder
        self.started: list[Process] = []

    def __call__(self, *arguments: str) -> Process:
        return self._start([*COMMAND, *arguments])

    def python(self, code: str, *arguments: str) -> Process:
        return self._start([sys.executable, "-c", code, *arguments])

    def _start(self, command: list[str]) -> Process:
        process = Process(command, self._environment, self._folder)
        self.started.append(process)
        return process


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Starter]:
    """Whatever still runs at the end of the test is killed."""
    starter = Starter(environment, tmp_path)
    yield starter
    for process in starter.started:
        process.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a scripted model; returns its name on the command line."""

    def write(replies: list[dict[str, object]], name: str = "echo", **keys: object) -> str:
        path = tmp_path / f"{name}.json"
        content = {"template": "chatml", "context_length": 4096, "replies": replies} | keys
        path.write_text(json.dumps(content), encoding="utf-8")
        return f"scripted:{path}"

    return write
