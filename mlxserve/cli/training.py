"""A training run on a terminal: what it says, and how it is stopped."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mlxserve.cli.model_source import prepare_model
from mlxserve.errors import UsageError
from mlxserve.tuning.dataset import DataSummary
from mlxserve.tuning.session import RunPlan, TrainRequest, train
from mlxserve.tuning.settings import TrainSettings
from mlxserve.tuning.trainer import EvalReport, Outcome, StepReport

_EXIT_INTERRUPTED = 130
_SHOWN_PROBLEMS = 10
_SHOWN_LINES = 8
_SHOWN_TEXT = 200


def run_training(
    model: str,
    settings: TrainSettings,
    output: Path,
    *,
    resume: Path | None,
    prompts: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Trains, with progress on stderr and the outcome on stdout. Ctrl-C ends after the step at hand,
    with exit code 130."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    prepared = prepare_model(model, console=console)
    if prepared.kind != "folder":
        raise UsageError(f"{model}: a scripted model cannot be trained")
    request = TrainRequest(
        prepared.path, prepared.id, output, settings, resume, None if prompts is None else tuple(prompts)
    )
    view = _View(console, settings)
    with _stop_after_step() as stop, view:
        outcome = train(request, view, stop.is_set)
    _print_outcome(outcome, output, model, as_json=as_json)
    if outcome.reason == "interrupted":
        raise typer.Exit(_EXIT_INTERRUPTED)


class _Stop:
    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True


@contextmanager
def _stop_after_step() -> Iterator[_Stop]:
    """The first Ctrl-C or SIGTERM is kept for the end of a step, a second one ends at once."""
    stop = _Stop()
    previous = {signum: signal.signal(signum, stop.on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class _View:
    """Implements ``Watcher``: a live view on a terminal, a line a report elsewhere."""

    def __init__(self, console: Console, settings: TrainSettings) -> None:
        self._console = console
        self._every = settings.report_every
        self._progress = Progress(
            TextColumn("Training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=None, start=False)
        self._live: Live | None = None
        self._lines: list[str] = []
        self._window: list[StepReport] = []
        self._last_step = 0

    def __enter__(self) -> _View:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_data(self, summary: DataSummary) -> None:
        for name, split in summary.splits.items():
            self._console.print(
                f"{name}: {split.num_examples} of {split.num_rows} rows, {split.num_tokens} tokens, "
                f"{split.masked_share:.0%} masked, {split.num_cut} cut, {split.num_skipped} left out, "
                f"{split.num_bad} bad, longest {split.longest}"
            )
        for problem in (*summary.bad, *summary.skipped)[:_SHOWN_PROBLEMS]:
            self._console.print(f"  {problem}", markup=False)
        more = summary.num_bad + summary.num_skipped - _SHOWN_PROBLEMS
        if more > 0:
            self._console.print(f"  and {more} more (mlxserve lora check-data shows all)")
        for note in summary.notes:
            self._console.print(f"note: {note}", markup=False)

    def on_plan(self, plan: RunPlan) -> None:
        share = plan.num_trained_parameters / max(plan.num_parameters, 1)
        needed = plan.memory.total(recomputes=plan.recomputes) / 1e9
        recomputed = ", activations are recomputed" if plan.recomputes else ""
        self._console.print(
            f"Training {plan.num_trained_parameters:,} parameters ({share:.3%}) in {plan.num_layers} layers "
            f"for {plan.num_steps} steps; about {needed:.1f} GB of memory{recomputed}"
        )
        if plan.first_step:
            self._console.print(f"Going on after step {plan.first_step}")
        self._progress.update(self._task, total=plan.num_steps)
        self._progress.start_task(self._task)
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._shown, refresh_per_second=4)
            self._live.start()

    def on_step(self, report: StepReport) -> None:
        self._window.append(report)
        self._last_step = report.step
        self._progress.advance(self._task)
        if report.step % self._every == 0:
            self._say(self._train_line())
            self._window.clear()

    def _train_line(self) -> str:
        weight = sum(report.num_trained for report in self._window)
        loss = sum(report.loss * report.num_trained for report in self._window) / max(weight, 1)
        seconds = sum(report.seconds for report in self._window)
        tokens = sum(report.num_tokens for report in self._window)
        last = self._window[-1]
        return (
            f"step {last.step}: loss {loss:.4f} over {weight} tokens, rate {last.learning_rate:.2e}, "
            f"gradient {last.gradient_norm:.3f}, {tokens / max(seconds, 1e-9):.0f} tok/s, "
            f"{last.peak_bytes / 1e9:.2f} GB"
        )

    def on_eval(self, report: EvalReport) -> None:
        best = " (best so far)" if report.is_best else ""
        self._say(f"step {report.step}: validation loss {report.loss:.4f}{best}, {report.seconds:.1f} s")

    def on_save(self, step: int) -> None:
        self._say(f"step {step}: saved")

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        when = "before" if step == 0 else f"after {step} steps"
        self._say(f"{when}: {_short(prompt)} -> {_short(text)}")

    def _say(self, line: str) -> None:
        if self._live is None:
            self._console.print(line, markup=False)
        else:
            self._lines.append(f"{time.strftime('%H:%M:%S')} {line}")

    def _shown(self) -> Group:
        table = Table.grid()
        for line in self._lines[-_SHOWN_LINES:]:
            table.add_row(line.replace("[", "\\["))
        return Group(table, self._progress)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_TEXT else line[:_SHOWN_TEXT] + " …"


def _print_outcome(outcome: Outcome, output: Path, model: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"output": str(output), **msgspec.to_builtins(outcome)}))
        return
    loss = "" if outcome.last_loss is None else f", loss {outcome.last_loss:.4f}"
    best = (
        ""
        if outcome.best_loss is None
        else f", best validation loss {outcome.best_loss:.4f} at {outcome.best_step}"
    )
    typer.echo(f"{outcome.reason.capitalize()} at step {outcome.step}{loss}{best}. Saved in {output}")
    if outcome.reason == "interrupted":
        typer.echo(f"Go on with: mlxserve lora train {model} … --resume {output}")
    else:
        typer.echo(f"Serve it with: mlxserve serve {model} --adapter NAME={output}")
