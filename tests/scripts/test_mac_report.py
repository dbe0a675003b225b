"""scripts/mac_report: what it says without a Mac, and its parts with the harness in the GPU's place."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxserve.models import kernel_choice
from mlxserve_kernels import dispatch
from mlxserve_kernels.self_test import Verdict
from mlxserve_kernels.self_test_cases import KERNELS

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import mac_report  # noqa: E402

SMALL = mac_report.Plan(
    parity_models=("tiny-llama",),
    speed_model="tiny-llama",
    prompt_tokens=8,
    tokens=4,
    streams=(1, 2),
    repeat=1,
)


@pytest.mark.skipif(mx.metal.is_available(), reason="this is a Mac")
def test_it_needs_a_mac(tmp_path: Path) -> None:
    for command in ([str(SCRIPTS / "mac_report")], [sys.executable, str(SCRIPTS / "mac_report.py")]):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: scripts/mac_report needs a Mac")
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="what metal_on_host runs on"
)
def test_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [Verdict(name, "used", "fine", 1.0, 2.5) for name in KERNELS]
    monkeypatch.setattr(
        mac_report, "diagnose", lambda **how: {**FACTS, "checked": [v.as_dict() for v in verdicts]}
    )
    with dispatch.using(dispatch.metal_selection(dispatch.host_maker())):
        report = mac_report.make_report(SMALL, tmp_path)
    found = json.loads(report.as_json())
    assert found["ok"] is True, found
    (parity,) = found["parity"]
    assert parity["tokens_equal"] is True
    assert 0 <= parity["largest_logit_difference"] < 0.02
    assert [entry["route"] for entry in found["routes"]] == list(reversed(dispatch.PAGE_ROUTES))
    assert all(entry["tokens_equal"] and entry["decode_tok_s"] > 0 for entry in found["routes"])
    assert [entry["streams"] for entry in found["speed"]] == [1, 2]
    assert found["speed"][0]["mlx"]["decode_tok_s"] > 0
    text = report.as_markdown()
    assert "| add_rms_norm | used | fine | 1 | 2.5 |" in text
    assert "chip M9; system macOS 20; " in text
    assert "| streams | mlxserve prefill_tok_s |" in text
    assert text.endswith("All is well.\n")


FACTS: dict[str, Any] = {
    "chip": "M9",
    "system": "macOS 20",
    "version": "1",
    "mlx": "2",
    "kernels": "metal",
    "decoder": "ops",
    "ok": True,
}


def test_parts_that_fail_are_told_and_the_others_go_on() -> None:
    report = mac_report.Report(SMALL)

    def fail() -> Any:
        raise RuntimeError("no\n such | luck")

    report.run({"kernels": fail, "parity": lambda: [{"model": "m", "tokens_equal": False}]})
    found = json.loads(report.as_json())
    assert found["kernels"] == {"error": "RuntimeError: no such | luck"}
    assert found["ok"] is False
    text = report.as_markdown()
    assert "Failed: RuntimeError: no such | luck" in text
    assert "| m | NO |" in text
    assert text.endswith("**Something is wrong: see above.**\n")


def test_the_kernels_are_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a Mac: an earlier choice is no measurement."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "_settled", None)
    runs = []
    verdicts = [Verdict(name, "used", "fine", 1.0, 2.0) for name in KERNELS]
    monkeypatch.setattr("mlxserve.cli.diagnosis.run_self_test", lambda: runs.append(1) or verdicts)
    chosen = dispatch.Selection("metal", metal=object(), proven=frozenset())  # type: ignore[arg-type]
    with dispatch.using(chosen):
        for _ in range(2):
            assert mac_report.kernels()["ok"] is True
    assert len(runs) == 2
    assert replace(verdicts[0]) == kernel_choice.read_verdicts(kernel_choice.this_machine())[0]  # type: ignore[index]
