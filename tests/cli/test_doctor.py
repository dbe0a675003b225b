"""``mlxserve doctor``: on Linux as it is, a Mac's side with the parts that need one replaced."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxserve.cli import build_app, diagnosis
from mlxserve.models import kernel_choice
from mlxserve_kernels import dispatch, ops
from mlxserve_kernels.self_test import Verdict
from mlxserve_kernels.self_test_cases import CPU_KERNELS, KERNELS
from tests.cli.conftest import Result

Run = Callable[..., Result]
ON_LINUX = pytest.mark.skipif(platform.system() != "Linux", reason="what Linux says")
ON_X86 = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="metal_on_host runs on x86-64 Linux",
)


@ON_LINUX
def test_linux_says_what_runs(run: Run) -> None:
    if not ops.implementation().startswith("cpu"):
        pytest.skip("the C++ extension is not in use")
    result = run("doctor", MLXSERVE_THREADS="1", MLXSERVE_CPU_ISA="portable")
    assert (result.code, result.err) == (0, "")
    assert "cpu-portable (this CPU has portable" in result.out
    assert ", 1 threads, products exact\n" in result.out
    assert all(f" {name} " in result.out for name in CPU_KERNELS)
    assert result.out.endswith("Metal kernels run on Macs only; --metal-host checks them on this CPU.\n")


@ON_LINUX
def test_json(run: Run) -> None:
    report = json.loads(run("doctor", "--json", MLXSERVE_KERNELS="reference").out)
    assert report["ok"] is True
    assert (report["kernels"], report["decoder"], report["cpu"]) == ("reference", "blocks", None)
    assert (report["checked"], report["metal_on_host"]) == ([], None)


@ON_X86
def test_the_metal_kernels_are_checked_on_this_cpu(run: Run) -> None:
    result = run("doctor", "--metal-host", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert [verdict["kernel"] for verdict in report["metal_on_host"]] == list(KERNELS)
    assert {verdict["status"] for verdict in report["metal_on_host"]} == {"used"}


@ON_LINUX
def test_what_this_machine_cannot_do(run: Run) -> None:
    result = run("doctor", "--again", MLXSERVE_KERNELS="reference")
    line = "error: --again is for Macs that run the Metal kernels; here the reference kernels run\n"
    assert result == Result(2, "", line)
    result = run("doctor", MLXSERVE_DECODER="all")
    line = "error: MLXSERVE_DECODER must be one of fused, ops, blocks, got 'all'\n"
    assert result == Result(2, "", line)


def invoke(*arguments: str) -> tuple[int, str]:
    argv = ["doctor", *arguments]
    result = CliRunner().invoke(build_app(argv), argv)
    return result.exit_code, result.stdout


@pytest.mark.parametrize("status", ["used", "slower", "wrong", "failed"])
def test_a_mac_shows_its_choice(status: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = KERNELS
    verdicts = [Verdict(first, status, "how it went", 12.5, 20.25)]  # type: ignore[arg-type]
    verdicts += [Verdict(name, "used", "fine", 1.0, 2.0) for name in others]
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "_settled", None)
    monkeypatch.setattr(diagnosis, "run_self_test", lambda: verdicts)
    chosen = dispatch.Selection("metal", metal=object(), proven=frozenset())  # type: ignore[arg-type]
    is_broken = status in ("wrong", "failed")
    with dispatch.using(chosen):
        code, out = invoke("--again")
        assert code == (1 if is_broken else 0)
        assert "Metal kernels on this Mac" in out
        assert "decoder layers   ops" in out
        assert "how it went" in out and "12.5" in out and "20.2" in out
        # The choice was kept: a start goes by it.
        monkeypatch.setattr(kernel_choice, "run_self_test", None)
        code, out = invoke("--json")
        report = json.loads(out)
        assert report["decoder"] == "ops"
        assert [v["status"] for v in report["checked"]] == [status, *["used"] * len(others)]
        assert report["ok"] is not is_broken
        assert (dispatch.metal(first) is not None) is (status == "used")


def test_a_broken_cpu_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ops.implementation().startswith("cpu"):
        pytest.skip("the C++ extension is not in use")
    plain = diagnosis.cases_of
    monkeypatch.setattr(
        diagnosis,
        "cases_of",
        lambda name, **how: [replace(case, tolerance=-1.0) for case in plain(name, **how)],
    )
    code, out = invoke("--json")
    assert code == 1
    assert {verdict["status"] for verdict in json.loads(out)["checked"]} == {"wrong"}
