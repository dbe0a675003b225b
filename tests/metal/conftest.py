"""Metal on this machine: x86-64 Linux with the compiler of the `ziglang` wheel."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_on_host import Host, MetalFault, MetalHostError, MetalSourceError, Report, Settings, summary
from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import HOST_PERMISSIONS

RunBody = Callable[..., mx.array]
Plant = Callable[[tuple[str, ...], str, str], None]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return True
    return None


@pytest.fixture(scope="session")
def cache_dir(request: pytest.FixtureRequest) -> Path:
    """Compiled kernels, kept from run to run by their content."""
    return Path(request.config.cache.mkdir("metal_on_host"))  # type: ignore[union-attr]


REPORTS: list[Report] = []
"""Of every launch of a kernel of ours; `--kernel-report` and `-v` end with their summary."""


_WEIGHTS = ("w", "scales", "biases")
STREAMED = frozenset(
    (
        *(f"{part}{name}" for part in ("", "gate_", "up_") for name in _WEIGHTS),
        *("a", "b"),
        *(f"{part}_{name}" for part in ("k", "v") for name in ("pool", "tails", "old")),
    )
)
"""Buffers of weights, adapters, keys and values: for few rows each byte of them is read once."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    is_wanted = terminalreporter.config.getoption("--kernel-report") or terminalreporter.verbosity > 0
    if REPORTS and is_wanted:
        terminalreporter.section("Metal kernels")
        terminalreporter.write_line(summary(REPORTS, STREAMED))


@pytest.fixture
def host(cache_dir: Path) -> Iterator[Host]:
    """Runs kernels of ours in three schedules."""
    host = Host(Settings(cache_dir=cache_dir, seeds=(0, 1, 2), **HOST_PERMISSIONS))
    yield host
    REPORTS.extend(host.reports)


@pytest.fixture
def run_body(cache_dir: Path) -> RunBody:
    """Runs a body with an input `x` and an output `y` of its shape and dtype, x.size threads in one group."""

    def run(
        body: str,
        x: mx.array,
        *,
        header: str = "",
        threads: int | None = None,
        threadgroup: int | None = None,
        output: tuple[tuple[int, ...], mx.Dtype] | None = None,
        settings: dict[str, Any] | None = None,
        **call: Any,
    ) -> mx.array:
        host = Host(Settings(cache_dir=cache_dir, **(settings or {})))
        kernel = host.metal_kernel(
            "body", ["x"], ["y"], "uint i = thread_position_in_grid.x;\n" + body, header
        )
        n = threads or x.size
        shape, dtype = output or (x.shape, x.dtype)
        (y,) = kernel(
            inputs=[x],
            grid=(n, 1, 1),
            threadgroup=(threadgroup or n, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
            **call,
        )
        return y

    return run


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts `new` in place of `old` in these headers of ours, for kernels that are made from then on."""

    def plant(names: tuple[str, ...], old: str, new: str) -> None:
        source = maker.source
        planted = {name: source(name).replace(old, new) for name in names}
        assert any(planted[name] != source(name) for name in names), old
        monkeypatch.setattr(maker, "source", lambda name: planted.get(name) or source(name))

    return plant


def kind_of(error: MetalHostError) -> str:
    """Of a fault; "source" where the compiler or Metal's rules refuse the kernel."""
    if isinstance(error, MetalFault):
        return error.kind
    assert isinstance(error, MetalSourceError)
    return "source"
