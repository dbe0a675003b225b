"""How the process ends."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End now, with stdout and stderr flushed and nothing else: no thread is joined.

    Python's own shutdown would race with engine threads: MLX frees a thread's state after Python has
    joined it, needs the interpreter for that, and aborts the process when it is already gone.
    """
    for stream in (sys.stdout, sys.stderr):
        # OSError: the reader has left. RuntimeError: a signal came in the midst of a write.
        with contextlib.suppress(OSError, RuntimeError):
            stream.flush()
    os._exit(code)
