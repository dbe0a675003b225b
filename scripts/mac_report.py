#!/usr/bin/env python3
"""Measure the Metal kernels on a Mac and write ``mac_report.json`` and ``mac_report.md``.

    scripts/mac_report [--output DIR] [--quick] [--model FOLDER]

Each part runs for itself: one that fails is in the report with its error, and the others go on.

kernels   each Metal kernel compiled, compared with MLX's own ops and timed beside them, as by
          mlxserve doctor --again
parity    a random Llama and a random MoE through the engine, with our kernels and with MLX's own ops: the
          largest difference of a logit, and whether all tokens are equal
routes    the ways to write pages while a step is in flight: tokens equal, and tokens a second
speed     decode and prefill of the engine with our kernels beside MLX's own ops, in turn
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

import bench_models  # noqa: E402

from mlxserve.cli.diagnosis import diagnose  # noqa: E402
from mlxserve.config import EngineConfig  # noqa: E402
from mlxserve.engine.benchmark import DecodeShape, measure, median_run  # noqa: E402
from mlxserve.engine.core import EngineCore  # noqa: E402
from mlxserve.engine.model_target import ModelTarget  # noqa: E402
from mlxserve.engine.scheduler import ScheduledBatch  # noqa: E402
from mlxserve.engine.target import StepInputs  # noqa: E402
from mlxserve.models.loader import load_model  # noqa: E402
from mlxserve.types import GenerationRequest, SamplingParams  # noqa: E402
from mlxserve_convert import ConvertOptions, convert  # noqa: E402
from mlxserve_kernels import dispatch, ops  # noqa: E402


@dataclass(frozen=True)
class Plan:
    """How much is measured. ``speed_model`` is a shape of bench_models or a model folder."""

    parity_models: tuple[str, ...] = ("tiny-llama", "tiny-moe")
    speed_model: str = "llama-1b"
    prompt_tokens: int = 512
    tokens: int = 64
    streams: tuple[int, ...] = (1, 4, 16)
    repeat: int = 5


QUICK = Plan(tokens=32, streams=(1, 4), repeat=3)


class RecordingTarget(ModelTarget):
    """Keeps the logits of every step that samples."""

    def __init__(self, folder: Path, page_size: int) -> None:
        super().__init__(load_model(folder), page_size)
        self.logits: list[np.ndarray] = []

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        logits = super().forward(batch, inputs)
        if batch.num_sampled:
            self.logits.append(np.array(logits.astype(mx.float32)))
        return logits


def build(name: str, folder: Path) -> Path:
    """A random model in the shape of that name as an MLX folder; a folder as it is."""
    if name not in bench_models.SHAPES:
        return Path(name)
    source, target = folder / f"{name}.gguf", folder / name
    if not target.is_dir():
        bench_models.write_model(source, bench_models.SHAPES[name])
        convert(source, target, ConvertOptions())
        source.unlink()
    return target


def serve(folder: Path) -> tuple[list[list[int]], list[np.ndarray]]:
    """Tokens and logits of two prompts that come in chunks and decode over the ends of pages."""
    config = EngineConfig(max_running=2, page_size=16, max_step_tokens=24, kv_pages=16, prefix_cache=False)
    target = RecordingTarget(folder, config.page_size)
    core = EngineCore(target, config, is_pipelined=ops.supports_steps_in_flight())
    rng = np.random.default_rng(5)
    tokens: dict[str, list[int]] = {}
    for length in (37, 25):
        prompt = tuple(rng.integers(3, target.vocab_size, length).tolist())
        tokens[str(length)] = []
        core.add(GenerationRequest(str(length), prompt, 24, SamplingParams(temperature=0)))
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise output.error
            tokens[output.request_id] += output.token_ids
    return list(tokens.values()), target.logits


def parity(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    results = []
    for name in plan.parity_models:
        model = build(name, folder)
        ours, logits = serve(model)
        with dispatch.using(dispatch.REFERENCE):
            plain, expected = serve(model)
        scale = max(float(np.abs(b).max()) for b in expected)
        # Steps can be compared as long as they had the same tokens before them.
        gaps = [
            float(np.abs(a - b).max()) for a, b in zip(logits, expected, strict=False) if a.shape == b.shape
        ]
        results.append(
            {
                "model": name,
                "tokens_equal": ours == plain,
                "first_logit_difference": gaps[0] / scale,
                "largest_logit_difference": max(gaps) / scale,
            }
        )
    return results


def routes(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """Each in the engine, with steps in flight where it allows them."""
    model = build(plan.parity_models[0], folder)
    results: list[dict[str, Any]] = []
    expected: list[list[int]] | None = None
    for route in reversed(dispatch.PAGE_ROUTES):
        with environment(MLXSERVE_PAGE_ROUTE=route):
            try:
                tokens, _ = serve(model)
                speed = decode_speed(build(plan.speed_model, folder), plan, 1)
            except Exception as error:  # noqa: BLE001 - a route that this Mac has not is a result
                results.append({"route": route, "error": one_line(error)})
                continue
        expected = expected or tokens
        results.append({"route": route, "tokens_equal": tokens == expected, **speed})
    return results


def decode_speed(folder: Path, plan: Plan, streams: int) -> dict[str, Any]:
    model = load_model(folder)
    shape = DecodeShape(plan.prompt_tokens, plan.tokens, streams)
    runs = [measure(model, shape, read_rate=1.0) for _ in range(plan.repeat)]
    median = median_run(runs)
    return {"prefill_tok_s": median.prefill_tok_s, "decode_tok_s": median.decode_tok_s}


def speed(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """Both sides are loaded and run in turn."""
    model, ours = build(plan.speed_model, folder), dispatch.selection()
    sides = {"mlxserve": ours, "mlx": dispatch.REFERENCE}
    loaded = {}
    for name, selection in sides.items():
        with dispatch.using(selection):
            loaded[name] = load_model(model)
    results = []
    for streams in plan.streams:
        shape = DecodeShape(plan.prompt_tokens, plan.tokens, streams)
        runs: dict[str, list[Any]] = {name: [] for name in sides}
        for _ in range(plan.repeat):
            for name, selection in sides.items():
                with dispatch.using(selection):
                    runs[name].append(measure(loaded[name], shape, read_rate=1.0))
        medians = {name: median_run(found) for name, found in runs.items()}
        entry: dict[str, Any] = {"streams": streams}
        for name, run in medians.items():
            entry[name] = {"prefill_tok_s": run.prefill_tok_s, "decode_tok_s": run.decode_tok_s}
        entry["decode_ratio"] = medians["mlxserve"].decode_tok_s / medians["mlx"].decode_tok_s
        results.append(entry)
    return results


def kernels() -> dict[str, Any]:
    return diagnose(is_again=dispatch.selection().name == "metal", on_host=False)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Report:
    """Parts by name, in the order in which they ran: what they gave, or ``{"error": line}``."""

    plan: Plan
    parts: dict[str, Any] = field(default_factory=dict)

    def run(self, parts: Mapping[str, Callable[[], Any]]) -> None:
        for name, call in parts.items():
            sys.stderr.write(f"{name} ...\n")
            try:
                self.parts[name] = call()
            except Exception as error:  # noqa: BLE001 - the report says so, and the other parts count
                self.parts[name] = {"error": one_line(error)}

    @property
    def is_good(self) -> bool:
        """Whether all parts ran, no kernel is broken and all tokens are equal."""
        return not any(_is_bad(part) for part in self.parts.values())

    def as_json(self) -> str:
        content = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "plan": vars(self.plan),
            **self.parts,
        }
        return json.dumps(content | {"ok": self.is_good}, indent=1) + "\n"

    def as_markdown(self) -> str:
        lines = ["# Metal kernels on a Mac", ""]
        for name, part in self.parts.items():
            lines += [f"## {name}", ""]
            if isinstance(part, dict) and "error" in part:
                lines += [f"Failed: {part['error']}", ""]
            elif name == "kernels":
                facts = ("chip", "system", "version", "mlx", "kernels", "decoder")
                lines += ["; ".join(f"{fact} {part[fact]}" for fact in facts), "", *table(part["checked"])]
            else:
                lines += table([_flat(entry) for entry in part])
        lines.append("All is well." if self.is_good else "**Something is wrong: see above.**")
        return "\n".join(lines) + "\n"


def _is_bad(part: Any) -> bool:
    if isinstance(part, dict):
        return "error" in part or part.get("ok") is False
    return any("error" in entry or entry.get("tokens_equal") is False for entry in part)


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Objects in objects as one, their names joined."""
    flat: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            flat |= {f"{name} {inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table with a column for every name that a row has, and an empty line."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(row.get(name)) for name in names)} |")
    return [*lines, ""]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def make_report(plan: Plan, folder: Path) -> Report:
    report = Report(plan)
    report.run(
        {
            "kernels": kernels,
            "parity": lambda: parity(plan, folder),
            "routes": lambda: routes(plan, folder),
            "speed": lambda: speed(plan, folder),
        }
    )
    return report


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure the Metal kernels on this Mac.")
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="where the report goes")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--model", metavar="FOLDER", help="an MLX model folder to measure the speed of")
    options = parser.parse_args(argv)
    if not mx.metal.is_available():
        parser.exit(2, "error: scripts/mac_report needs a Mac with MLX's Metal backend\n")
    plan = QUICK if options.quick else Plan()
    if options.model is not None:
        plan = Plan(**vars(plan) | {"speed_model": options.model})
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = make_report(plan, Path(folder))
    for name, text in (("mac_report.json", report.as_json()), ("mac_report.md", report.as_markdown())):
        (options.output / name).write_text(text, encoding="utf-8")
    sys.stdout.write(report.as_markdown())
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
