"""Kernel tests run on the extension; where there is none (macOS), they are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import mlx.core as mx
import pytest

from mlxserve_kernels import ops

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def seed() -> None:
    mx.random.seed(7)


@pytest.fixture
def cpu_kernels() -> None:
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")


@pytest.fixture
def run_python() -> RunPython:
    """Run a program in a new interpreter with the given MLXSERVE_ variables."""

    def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXSERVE_")}
        kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        return subprocess.run(
            [sys.executable, "-c", program],
            env=kept | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
