"""What ``mlxserve bench`` runs and how it prints."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mlxserve.cli.model_source import PreparedModel, prepare_model
from mlxserve.engine.benchmark import (
    DecodeRun,
    DecodeShape,
    measure,
    measure_prefix,
    median_run,
    mlx_lm_runner,
    read_bandwidth,
)
from mlxserve.errors import UsageError
from mlxserve.models.loader import load_model
from mlxserve_kernels import ops

MAX_STREAMS = 256
PEERS = ("mlx-lm",)


def parse_streams(text: str) -> tuple[int, ...]:
    """``1,4,16`` as numbers; UsageError for anything else."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--streams wants numbers such as 1,4,16, got {text!r}") from None
    if not all(1 <= value <= MAX_STREAMS for value in values):
        raise UsageError(f"--streams wants numbers from 1 to {MAX_STREAMS}, got {text!r}")
    return values


def bench_decode(
    name: str,
    *,
    prompt_tokens: int,
    tokens: int,
    streams: tuple[int, ...],
    repeat: int,
    against: str | None,
    as_json: bool,
) -> None:
    """Measure and print; the peer's runs alternate with ours."""
    if against is not None and against not in PEERS:
        raise UsageError(f"--against knows {', '.join(PEERS)}, got {against!r}")
    console = Console(stderr=True)
    source = _real_model(name, console)
    with console.status(f"Measuring {source.id}"):
        report = _measure_all(
            source.path, [DecodeShape(prompt_tokens, tokens, count) for count in streams], repeat, against
        )
    report = {"model": source.id, "kernels": ops.implementation(), **report}
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _print_table(report, prompt_tokens, tokens)


def bench_kv(name: str, *, history: int, new_tokens: int, repeat: int, as_json: bool) -> None:
    """Measure and print prefix reuse."""
    console = Console(stderr=True)
    source = _real_model(name, console)
    with console.status(f"Measuring {source.id}"):
        model = load_model(source.path)
        runs = [measure_prefix(model, history_tokens=history, new_tokens=new_tokens) for _ in range(repeat)]
    cold, warm = (
        statistics.median(values) for values in zip(*((r.cold_s, r.next_turn_s) for r in runs), strict=True)
    )
    report = {
        "model": source.id,
        "kernels": ops.implementation(),
        "threads": ops.num_threads(),
        "history_tokens": history,
        "new_tokens": new_tokens,
        "cached_tokens": runs[0].num_cached_tokens,
        "cold_s": round(cold, 4),
        "next_turn_s": round(warm, 4),
        "ratio": round(cold / warm, 2),
    }
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    Console().print(
        f"{source.id}: the first token of a conversation of {history} tokens comes after {cold:.2f} s, "
        f"that of its next turn ({new_tokens} more) after {warm:.3f} s: {cold / warm:.1f} times sooner"
    )


def _real_model(name: str, console: Console) -> PreparedModel:
    source = prepare_model(name, console=console)
    if source.kind != "folder":
        raise UsageError(f"bench needs a real model, {name} is scripted")
    return source


def _measure_all(folder: Path, shapes: list[DecodeShape], repeat: int, against: str | None) -> dict[str, Any]:
    model = load_model(folder)
    peer = None if against is None else mlx_lm_runner(folder)
    peer_shape = DecodeShape(shapes[0].prompt_tokens, shapes[0].tokens, 1)
    threads = ops.num_threads()
    runs: dict[int, list[DecodeRun]] = {shape.streams: [] for shape in shapes}
    peer_runs: list[tuple[float, float]] = []
    rates = []
    for _ in range(repeat):
        rates.append(read_bandwidth(threads))
        for shape in shapes:
            runs[shape.streams].append(measure(model, shape, read_rate=rates[-1]))
        if peer is not None:
            peer_runs.append(peer(peer_shape))
    medians = {count: median_run(of_count) for count, of_count in runs.items()}
    report: dict[str, Any] = {
        "threads": threads,
        "read_gbps": round(statistics.median(rates) / 1e9, 2),
        "weight_bytes": model.weight_bytes,
        "runs": [_rounded(run.as_dict()) for run in medians.values()],
    }
    if peer_runs:
        prefill, decode = (statistics.median(figures) for figures in zip(*peer_runs, strict=True))
        report["peer"] = {
            "name": against,
            "prefill_tok_s": round(prefill, 2),
            "decode_tok_s": round(decode, 2),
        }
        if 1 in medians:
            report["peer"] |= {
                "prefill_ratio": round(medians[1].prefill_tok_s / prefill, 2),
                "decode_ratio": round(medians[1].decode_tok_s / decode, 2),
            }
    return report


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}


def _print_table(report: dict[str, Any], prompt_tokens: int, tokens: int) -> None:
    table = Table(
        title=f"{report['model']}: {prompt_tokens} prompt tokens, {tokens} new; {report['threads']} threads, "
        f"{report['kernels']} kernels, {report['read_gbps']} GB/s read"
    )
    for heading in ("streams", "prefill tok/s", "decode tok/s", "MB a token", "of bandwidth"):
        table.add_column(heading, justify="right")
    for run in report["runs"]:
        table.add_row(
            str(run["streams"]),
            f"{run['prefill_tok_s']:.1f}",
            f"{run['decode_tok_s']:.1f}",
            f"{run['bytes_per_token'] / 1e6:.1f}",
            f"{run['bandwidth_fraction']:.0%}",
        )
    console = Console()
    console.print(table)
    if peer := report.get("peer"):
        console.print(
            f"{peer['name']}, one stream: prefill {peer['prefill_tok_s']:.1f} tok/s, "
            f"decode {peer['decode_tok_s']:.1f} tok/s"
        )
