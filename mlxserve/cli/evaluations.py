"""What ``mlxserve eval`` measures and how it prints."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlxserve.cli.model_source import prepare_model
from mlxserve.engine.scoring import (
    OnTokens,
    ScoredModel,
    StoredLogits,
    open_scored,
    perplexity,
    shipped_text,
    target_log_probabilities,
    text_windows,
    tokens_of,
)
from mlxserve.engine.windows import DEFAULT_CONTEXT, Window
from mlxserve.errors import UsageError
from mlxserve_kernels import ops


@dataclass(frozen=True, slots=True)
class Wishes:
    """None where the command line says nothing."""

    text: Path | None
    context: int | None
    stride: int | None
    max_tokens: int | None


def measure_perplexity(name: str, wishes: Wishes, *, as_json: bool) -> None:
    """Loads, measures and prints."""
    text = _text(wishes.text)
    console = Console(stderr=True)
    model_id, model = _open(name, console)
    context, stride = _sizes(wishes, model)
    windows = text_windows(model, text, context=context, stride=stride, max_tokens=wishes.max_tokens)
    with _progress(console, f"Reading with {model_id}", windows) as on_tokens:
        found = target_log_probabilities(model.scorer, windows, on_tokens)
    value = perplexity(found)
    report = {
        "model": model_id,
        "kernels": ops.implementation(),
        "text": _text_name(wishes.text),
        "context": context,
        "stride": stride,
        "tokens": int(found.size),
        "perplexity": round(value, 5),
        "nats_per_token": round(-float(found.mean()), 6),
    }
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
        return
    typer.echo(f"{model_id}: perplexity {value:.3f} over {found.size} tokens of {report['text']}")
    typer.echo(f"Windows of {context} tokens, {stride} apart")


def measure_kl(first: str, second: str, wishes: Wishes, *, as_json: bool) -> None:
    """Loads one after the other, measures and prints."""
    text = _text(wishes.text)
    console = Console(stderr=True)
    with tempfile.TemporaryFile() as file:
        stored = StoredLogits(file)
        first_id, model = _open(first, console)
        context, stride = _sizes(wishes, model)
        windows = text_windows(model, text, context=context, stride=stride, max_tokens=wishes.max_tokens)
        tokens, vocab_size = tokens_of(model.tokenizer, text), model.tokenizer.vocab_size
        with _progress(console, f"Reading with {first_id}", windows) as on_tokens:
            stored.write(model.scorer, windows, on_tokens)
        del model
        gc.collect()
        mx.clear_cache()
        second_id, model = _open(second, console)
        if model.tokenizer.vocab_size != vocab_size or tokens_of(model.tokenizer, text) != tokens:
            raise UsageError(f"{first_id} and {second_id} have different tokens and cannot be compared")
        with _progress(console, f"Reading with {second_id}", windows) as on_tokens:
            found = stored.compare(model.scorer, windows, on_tokens)
    report: dict[str, Any] = {
        "a": first_id,
        "b": second_id,
        "kernels": ops.implementation(),
        "text": _text_name(wishes.text),
        "context": context,
        "stride": stride,
        "tokens": found.num_tokens,
        "mean_kl": found.mean_kl,
        "p99_kl": found.p99_kl,
        "max_kl": found.max_kl,
        "same_top": found.same_top,
        "perplexity_a": found.perplexity_a,
        "perplexity_b": found.perplexity_b,
    }
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
        return
    typer.echo(
        f"KL({first_id} || {second_id}): mean {found.mean_kl:.5f} nats a token, 99 % under "
        f"{found.p99_kl:.4f}, largest {found.max_kl:.4f}"
    )
    typer.echo(f"The same likeliest token at {found.same_top:.2%} of {found.num_tokens} positions")
    typer.echo(f"Perplexity {found.perplexity_a:.3f} and {found.perplexity_b:.3f} on {report['text']}")
    typer.echo(f"Windows of {context} tokens, {stride} apart")


def _text(path: Path | None) -> str:
    if path is None:
        return shipped_text()
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path}: is not UTF-8, byte {error.start}") from error


def _text_name(path: Path | None) -> str:
    return "Faraday, The Chemical History of a Candle (1861)" if path is None else str(path)


def _open(name: str, console: Console) -> tuple[str, ScoredModel]:
    source = prepare_model(name, console=console)
    if source.kind == "scripted":
        raise UsageError(f"{name} is a scripted model, it predicts nothing")
    with console.status(f"Loading {source.id}"):
        return source.id, open_scored(source.path)


def _sizes(wishes: Wishes, model: ScoredModel) -> tuple[int, int]:
    limit = model.context_length or DEFAULT_CONTEXT
    context = wishes.context if wishes.context is not None else min(DEFAULT_CONTEXT, limit)
    return context, wishes.stride if wishes.stride is not None else max(1, context // 2)


@contextmanager
def _progress(console: Console, title: str, windows: Sequence[Window]) -> Iterator[OnTokens]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=sum(len(window.targets) for window in windows))
        yield lambda done: progress.update(task, completed=done)
