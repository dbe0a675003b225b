"""Whole training runs of tiny models, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model, save_model
from mlx_lm.utils import quantize_model as quantize_stock

from mlxserve.tuning.metrics import read_metrics
from mlxserve.tuning.session import RunPlan, TrainRequest, train
from mlxserve.tuning.settings import make_settings
from mlxserve.tuning.trainer import Outcome
from tests.tiny_models import write_tiny_model

DEADLINE_S = 60


def write_rows(folder: Path, *, count: int = 24, valid: int = 6) -> Path:
    """Prompts and completions of many lengths, that repeat so that there is something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    for name, size in (("train", count), ("valid", valid)):
        rows = []
        for _ in range(size):
            a, b = int(rng.integers(2, 9)), int(rng.integers(1, 5))
            rows.append({"prompt": "ab " * a, "completion": "yes " * b + "no"})
        if size:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def write_quantized(folder: Path, source: Path, **quantization: Any) -> Path:
    """``source`` as mlx-lm quantizes it; the tokenizer is kept."""
    model, config = load_model(source)
    model, config = quantize_stock(model, config, **({"group_size": 64, "bits": 4} | quantization))
    folder.mkdir()
    for file in source.iterdir():
        if "safetensors" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Watcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.plan: RunPlan | None = None
        self.steps: list[Any] = []
        self.evals: list[Any] = []
        self.saves: list[int] = []
        self.samples: list[tuple[int, str, str]] = []

    def on_data(self, summary: Any) -> None: ...

    def on_plan(self, plan: RunPlan) -> None:
        self.plan = plan

    def on_step(self, report: Any) -> None:
        self.steps.append(report)

    def on_eval(self, report: Any) -> None:
        self.evals.append(report)

    def on_save(self, step: int) -> None:
        self.saves.append(step)

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        self.samples.append((step, prompt, text))

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.steps]


DEFAULTS: dict[str, Any] = {
    "rank": 4,
    "targets": ["q_proj", "v_proj"],
    "iters": 6,
    "batch_size": 3,
    "learning_rate": 1e-2,
    "eval_every": 1000,
}


def run(
    model: Path,
    data: Path,
    output: Path,
    *,
    resume: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    prompts: tuple[str, ...] = (),
    **settings: Any,
) -> tuple[Watcher, Outcome]:
    watcher = Watcher()
    made = make_settings(None, {**DEFAULTS, "data": str(data), **settings})
    request = TrainRequest(model, "tiny", output, made, resume, prompts)
    return watcher, train(request, watcher, should_stop)


def adapter(folder: Path) -> dict[str, mx.array]:
    weights = mx.load(str(folder / "adapters.safetensors"))
    assert isinstance(weights, dict)
    return weights


def step_losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(folder) if line["kind"] == "step"}


def assert_same_weights(a: dict[str, mx.array], b: dict[str, mx.array]) -> None:
    assert a.keys() == b.keys() and a
    for name, value in a.items():
        assert np.array_equal(np.array(value), np.array(b[name])), name


def command(arguments: Iterable[Any]) -> list[str]:
    return [sys.executable, "-m", "mlxserve", *map(str, arguments)]


def start(*arguments: Any) -> subprocess.Popen[str]:
    """``mlxserve`` as a process, its output as text."""
    return subprocess.Popen(
        command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Reads the process's lines until that step is reported."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"step {step}:"):
            return
    raise AssertionError(f"the run ended before step {step}")


def write_model(folder: Path, **shape: Any) -> Path:
    return write_tiny_model(folder, **{"context": 256, **shape})
