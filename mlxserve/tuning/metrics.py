"""metrics.jsonl: a line a step, an evaluation or a sample, in order, also over interruptions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxserve.tuning.trainer import EvalReport, StepReport

METRICS = "metrics.jsonl"


class MetricsFile:
    """Appends lines, each written at once. Opened for a run that goes on after ``step``, it drops the lines
    of later steps: these are made again."""

    def __init__(self, folder: Path, *, after_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        kept = (
            [] if after_step is None else [v for v in read_metrics(folder) if v.get("step", 0) <= after_step]
        )
        fresh = self._path.with_name(f".{METRICS}.new")
        fresh.write_text("".join(_line(value) for value in kept), encoding="utf-8")
        os.replace(fresh, self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def add_step(self, report: StepReport) -> None:
        self._add({"kind": "step", **asdict(report)})

    def add_eval(self, report: EvalReport) -> None:
        self._add({"kind": "eval", **asdict(report)})

    def add_sample(self, step: int, prompt: str, text: str) -> None:
        self._add({"kind": "sample", "step": step, "prompt": prompt, "text": text})

    def _add(self, value: dict[str, Any]) -> None:
        self._file.write(_line(value))

    def close(self) -> None:
        self._file.close()


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's file; one that a killed process left half is nothing."""
    path = folder / METRICS
    return list(_parsed(path)) if path.is_file() else []


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
