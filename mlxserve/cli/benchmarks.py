"""What ``mlxserve bench`` runs and how it prints."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mlxserve.cli.model_source import PreparedModel, prepare_model
from mlxserve.config import KV_BITS
from mlxserve.engine.benchmark import (
    DecodeRun,
    DecodeShape,
    StockRun,
    measure,
    measure_prefix,
    measure_profile,
    median_run,
    mlx_lm_runner,
    random_prompts,
)
from mlxserve.engine.read_rate import ReadRates, measure_read_rates
from mlxserve.engine.step_profile import PARTS
from mlxserve.errors import UsageError
from mlxserve.models.loader import load_model
from mlxserve.text.tokenizer import load_tokenizer
from mlxserve_kernels import ops

MAX_STREAMS = 256
MAX_CONTEXT = 1 << 20
PEERS = ("mlx-lm",)


def parse_streams(text: str) -> tuple[int, ...]:
    """``1,4,16`` as numbers; UsageError for anything else."""
    return _parse_numbers("--streams", text, MAX_STREAMS)


def parse_contexts(text: str) -> tuple[int, ...]:
    """``128,8192`` as numbers; UsageError for anything else."""
    return _parse_numbers("--context", text, MAX_CONTEXT)


def _parse_numbers(option: str, text: str, maximum: int) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} wants numbers such as 1,4,16, got {text!r}") from None
    if not all(1 <= value <= maximum for value in values):
        raise UsageError(f"{option} wants numbers from 1 to {maximum}, got {text!r}")
    return values


def bench_decode(
    name: str,
    *,
    prompt_tokens: int,
    tokens: int,
    streams: tuple[int, ...],
    repeat: int,
    contexts: tuple[int, ...] | None,
    against: str | None,
    kv_bits: int | None,
    with_profile: bool,
    as_json: bool,
) -> None:
    """Measure and print; the peer's runs alternate with ours. ``contexts`` take the place of
    ``prompt_tokens``."""
    if against is not None and against not in PEERS:
        raise UsageError(f"--against knows {', '.join(PEERS)}, got {against!r}")
    if against is not None and contexts is not None:
        raise UsageError("--context and --against exclude each other: a peer computes its whole prompt")
    if kv_bits not in (None, *KV_BITS):
        raise UsageError(f"--kv-bits knows {', '.join(map(str, KV_BITS))}, got {kv_bits}")
    console = Console(stderr=True)
    source = real_model(name, console)
    shapes = [
        DecodeShape(length, tokens, count, is_context_copied=contexts is not None, kv_bits=kv_bits)
        for length in contexts or (prompt_tokens,)
        for count in streams
    ]
    with console.status(f"Measuring {source.id}"):
        report = _measure_all(source.path, shapes, repeat, against, with_profile)
    report = {"model": source.id, "kernels": ops.implementation(), "kv_bits": kv_bits, **report}
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _print_table(report, tokens)


def bench_kv(name: str, *, history: int, new_tokens: int, repeat: int, as_json: bool) -> None:
    """Measure and print prefix reuse."""
    console = Console(stderr=True)
    source = real_model(name, console)
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


def real_model(name: str, console: Console) -> PreparedModel:
    """A model that is no script; UsageError for one that is."""
    source = prepare_model(name, console=console)
    if source.kind != "folder":
        raise UsageError(f"bench needs a real model, {name} is scripted")
    return source


def _measure_all(
    folder: Path, shapes: list[DecodeShape], repeat: int, against: str | None, with_profile: bool
) -> dict[str, Any]:
    model = load_model(folder)
    peer = None if against is None else mlx_lm_runner(folder)
    peer_shape = replace(shapes[0], streams=1)
    threads = ops.num_threads()
    runs: dict[DecodeShape, list[DecodeRun]] = {shape: [] for shape in shapes}
    peer_runs: list[StockRun] = []
    rates = []
    for _ in range(repeat):
        rates.append(measure_read_rates(threads))
        for shape in shapes:
            runs[shape].append(measure(model, shape, read_rate=rates[-1].best))
        if peer is not None:
            (prompt,) = random_prompts(peer_shape, model.vocab_size)
            peer_runs.append(peer(prompt, peer_shape.tokens))
    medians = {shape: median_run(of_shape) for shape, of_shape in runs.items()}
    report: dict[str, Any] = {
        "threads": threads,
        **read_figures(rates),
        "weight_bytes": model.weight_bytes,
        "runs": [_rounded(run.as_dict()) for run in medians.values()],
    }
    if peer_runs:
        report["peer"] = _peer_figures(against, peer_runs, medians.get(peer_shape))
    if with_profile:
        tokenizer = load_tokenizer(folder)
        report["profiles"] = [
            {
                "prompt_tokens": shape.prompt_tokens,
                "streams": shape.streams,
                **_rounded(measure_profile(model, shape, tokenizer).as_dict()),
            }
            for shape in shapes
        ]
    return report


def read_figures(rates: list[ReadRates]) -> dict[str, float]:
    """The machine's read rate in GB/s, and that of small pages alone; medians."""
    return {
        "read_gbps": round(statistics.median(rate.best for rate in rates) / 1e9, 2),
        "read_gbps_small_pages": round(statistics.median(rate.small_pages for rate in rates) / 1e9, 2),
    }


def _peer_figures(name: str | None, runs: list[StockRun], ours: DecodeRun | None) -> dict[str, Any]:
    prefill = statistics.median(run.prefill_tok_s for run in runs)
    decode = statistics.median(run.decode_tok_s for run in runs)
    figures: dict[str, Any] = {
        "name": name,
        "prefill_tok_s": round(prefill, 2),
        "decode_tok_s": round(decode, 2),
    }
    if ours is not None and ours.prefill_tok_s is not None:
        figures |= {
            "prefill_ratio": round(ours.prefill_tok_s / prefill, 2),
            "decode_ratio": round(ours.decode_tok_s / decode, 2),
        }
    return figures


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}


def _print_table(report: dict[str, Any], tokens: int) -> None:
    table = Table(
        title=f"{report['model']}: {tokens} new tokens; {report['threads']} threads, "
        f"{report['kernels']} kernels, {report['read_gbps']} GB/s read"
    )
    for heading in ("prompt", "streams", "prefill tok/s", "decode tok/s", "MB a token", "of bandwidth"):
        table.add_column(heading, justify="right")
    for run in report["runs"]:
        prefill = run["prefill_tok_s"]
        table.add_row(
            str(run["prompt_tokens"]),
            str(run["streams"]),
            "copied" if prefill is None else f"{prefill:.1f}",
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
    if profiles := report.get("profiles"):
        console.print(_profile_table(profiles))


def _profile_table(profiles: list[dict[str, Any]]) -> Table:
    table = Table(title="Milliseconds of a decode step on the engine thread (medians)")
    table.add_column("part")
    for profile in profiles:
        table.add_column(f"{profile['prompt_tokens']} × {profile['streams']}", justify="right")
    names = {**PARTS, "step_ms": "the whole step", "host_ms": "the step without waiting for the kernels"}
    names["detokenize_ms"] = "detokenizer, a token (on the event loop)"
    for key, name in names.items():
        table.add_row(name, *(f"{profile[key]:.3f}" for profile in profiles))
    return table
