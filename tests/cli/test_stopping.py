"""Signals at awkward moments: while a model loads, and a second one while the server stops."""

from __future__ import annotations

import signal

import pytest

from tests.cli.conftest import Starter

LOADING = """
import sys, threading
from mlxserve.cli import opening, run

def load_for_ever(path, config):
    print("loading", file=sys.stderr, flush=True)
    threading.Event().wait()

opening.open_scripted = load_for_ever
sys.exit(run(sys.argv[1:]))
"""

IMPORTING = """
import sys
from mlxserve.__main__ import main

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "mlxserve.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
main()
"""

STOPPING = """
import asyncio, os, signal, sys
from mlxserve.cli.stopping import StopSignals

async def main(signals):
    stop = signals.watch()
    print("serving", file=sys.stderr, flush=True)
    await stop.wait()
    print("stopping", file=sys.stderr, flush=True)
    if len(sys.argv) == 1:
        await asyncio.Event().wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    print("stopped", file=sys.stderr, flush=True)

with StopSignals() as signals:
    asyncio.run(main(signals))
"""


@pytest.mark.parametrize(
    ("command", "signum", "code"),
    [
        ("serve", signal.SIGINT, 130),
        ("serve", signal.SIGTERM, 0),
        ("generate", signal.SIGINT, 130),
        ("chat", signal.SIGINT, 130),
    ],
)
def test_a_signal_during_the_load_ends_the_process(
    start: Starter, script: object, command: str, signum: signal.Signals, code: int
) -> None:
    assert callable(script)
    options = {"serve": ["--port", "0"], "generate": ["--prompt", "a"], "chat": []}[command]
    process = start.python(LOADING, command, script([{"match": "", "pieces": ["a"], "end": "eos"}]), *options)
    process.wait_for("loading")
    process.signal(signum)
    assert process.end() == code
    assert process.lines == ["loading"]


def test_a_second_ctrl_c_forces_the_end(start: Starter) -> None:
    process = start.python(STOPPING)
    process.wait_for("serving")
    process.signal(signal.SIGINT)
    process.wait_for("stopping")
    process.signal(signal.SIGINT)
    assert process.end() == 130


def test_a_second_sigterm_changes_nothing(start: Starter) -> None:
    process = start.python(STOPPING, "once more")
    process.wait_for("serving")
    process.signal(signal.SIGTERM)
    assert process.end() == 0
    assert process.lines[-1] == "stopped"


def test_a_ctrl_c_amid_the_first_imports_is_no_traceback(start: Starter) -> None:
    process = start.python(IMPORTING)
    assert process.end() == 130
    assert process.lines == []
