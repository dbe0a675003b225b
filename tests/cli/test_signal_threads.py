"""A signal is acted on whichever thread of the process takes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, signal, sys, threading
from mlxserve.cli.stopping import StopSignals

other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
main = threading.get_ident()

def kill():
    # Only once the main thread waits in its selector, where nothing but the signal can wake it.
    while sys._current_frames()[main].f_code.co_name != "select":
        pass
    signal.pthread_kill(other.ident, signal.{name})

async def serve(signals):
    stop = signals.watch()
    threading.Thread(target=kill, daemon=True).start()
    await stop.wait()
    print("stopped")

with StopSignals() as signals:
    asyncio.run(serve(signals))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_another_thread_takes_stops_the_server(name: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")
