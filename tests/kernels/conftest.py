"""Kernel tests run on the extension; where there is none (macOS), they are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import extension, num_threads

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def seed() -> None:
    mx.random.seed(7)


@pytest.fixture
def cpu_kernels() -> None:
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest, cpu_kernels: None) -> Iterator[str]:
    """Runs a test on each instruction set that this CPU has."""
    cpu = extension()
    assert cpu is not None
    if request.param not in cpu.available_isas():
        pytest.skip(f"this CPU has no {request.param}")
    in_use = cpu.isa()
    cpu.configure(num_threads(), request.param)
    yield request.param
    cpu.configure(num_threads(), in_use)


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
