"""What a run leaves on the disk: saves, metrics, report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxserve.errors import UsageError
from mlxserve.tuning import checkpoints as checkpoints_module
from mlxserve.tuning.checkpoints import Checkpoints, Saved
from mlxserve.tuning.metrics import MetricsFile, read_metrics
from mlxserve.tuning.report import write_report
from mlxserve.tuning.trainer import EvalReport, StepReport

CONFIG: dict[str, Any] = {"fine_tune_type": "lora", "num_layers": 1}


def saved(step: int) -> Saved:
    weights = {"a": mx.full((2, 3), step, mx.float32)}
    return Saved(weights, {"v.a": mx.full((2, 3), -step, mx.float32)}, {"progress": {"step": step}})


def test_a_save_is_read_back(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path / "run")
    assert not run.has_state
    for step in (1, 2):
        run.save(saved(step), CONFIG)
    assert run.has_state
    found = run.load()
    assert found.progress == {"progress": {"step": 2}}
    assert found.weights["a"].tolist() == [[2] * 3] * 2
    assert found.optimizer["v.a"].tolist() == [[-2] * 3] * 2
    assert mx.load(str(tmp_path / "run" / "adapters.safetensors"))["a"].tolist() == [[2] * 3] * 2
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text()) == CONFIG
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(7))
def test_a_run_that_is_killed_while_it_saves_has_a_whole_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Killed at every rename and every sync of the second save."""
    run = Checkpoints(tmp_path / "run")
    run.save(saved(1), CONFIG)
    calls = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module.os, "rename", counted(os.rename))
        patch.setattr(checkpoints_module, "sync", counted(lambda path: None))
        with pytest.raises(Killed):
            run.save(saved(2), CONFIG)
    found = Checkpoints(tmp_path / "run").load()
    step = found.progress["progress"]["step"]
    assert step in (1, 2)
    assert found.weights["a"].tolist() == [[step] * 3] * 2
    Checkpoints(tmp_path / "run").save(saved(3), CONFIG)
    assert Checkpoints(tmp_path / "run").load().progress == {"progress": {"step": 3}}


def test_nothing_to_resume_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no saved state to resume from"):
        Checkpoints(tmp_path).load()


def step_report(step: int, loss: float = 1.0) -> StepReport:
    return StepReport(step, loss, 1e-4, 0.5, 10, 20, 0.1, 1000)


def test_metrics_of_steps_that_are_made_again_are_dropped(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        first.add_step(step_report(step))
    first.add_eval(EvalReport(3, 0.5, 100, 1.0, True))
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "los')
    again = MetricsFile(tmp_path, after_step=2)
    again.add_step(step_report(3, 0.7))
    again.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 0.7)]


def test_the_report_holds_all_it_needs(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.add_sample(0, "<b>hi</b>", "before & after")
    for step in range(1, 3001):
        metrics.add_step(step_report(step, 3.0 / step))
    metrics.add_eval(EvalReport(3000, 0.5, 100, 1.0, True))
    metrics.add_sample(3000, "<b>hi</b>", "learnt")
    metrics.close()
    page = write_report(tmp_path, "tiny, <lora>", {"rank": 8}).read_text()
    assert "<script" not in page and "http" not in page
    assert "tiny, &lt;lora&gt;" in page and "&lt;b&gt;hi&lt;/b&gt;" in page
    assert "before &amp; after" in page and "learnt" in page
    assert page.count("<svg") == 3
    assert len(page) < 100_000


def test_a_report_without_figures_is_written(tmp_path: Path) -> None:
    assert "No figures yet" in write_report(tmp_path, "x", {}).read_text()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = Checkpoints(tmp_path / "run"), Checkpoints(tmp_path / "run")
    with first.hold(), pytest.raises(UsageError, match="another run is being trained there"), second.hold():
        pass
    with second.hold():
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"), Checkpoints(tmp_path / "file").hold():
        pass
