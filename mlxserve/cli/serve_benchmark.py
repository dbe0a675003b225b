"""What ``mlxserve bench serve`` runs and how it prints: the HTTP API beside the engine without it."""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import typer
from aiohttp import web
from rich.console import Console
from rich.table import Table

from mlxserve.cli.benchmarks import real_model
from mlxserve.cli.model_source import PreparedModel
from mlxserve.cli.side_process import Answer, SideProcess
from mlxserve.cli.stream_client import StreamTimes, decode_rate, read_streams
from mlxserve.config import DEFAULT_HOST, DEFAULT_PAGE_SIZE, EngineConfig
from mlxserve.errors import UsageError
from mlxserve.text.tokenizer import load_tokenizer
from mlxserve_kernels import ops

_SEED = 11


@dataclass(frozen=True, slots=True)
class _Question:
    """A run of the engine: these prompts together, ``tokens`` new ones each."""

    prompts: list[tuple[int, ...]]
    tokens: int


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of each side, on the same prompts."""

    engine_tok_s: float
    http_tok_s: float
    streams: list[StreamTimes]


def bench_serve(
    name: str, *, prompt_tokens: int, tokens: int, streams: tuple[int, ...], repeat: int, as_json: bool
) -> None:
    """Measure and print. Both sides are processes of their own and run in turn on the same prompts, which
    are others in each repeat: the server's prefix cache never has them."""
    console = Console(stderr=True)
    source = real_model(name, console)
    # Twice what a run needs: the prefix cache keeps the run before, as it does in a server at work.
    pages = -(-(prompt_tokens + tokens) // DEFAULT_PAGE_SIZE) + 1
    config = EngineConfig(max_running=max(streams), kv_pages=2 * max(streams) * pages)
    vocab_size = load_tokenizer(source.path).vocab_size
    rng = np.random.default_rng(_SEED)
    runs: dict[int, list[_Run]] = {count: [] for count in streams}
    with (
        console.status(f"Measuring {source.id}"),
        SideProcess("engine", _open_engine, source.path) as engine,
        SideProcess("server", _open_server, source, config) as server,
    ):
        about = engine.ask(None)
        ids_end = min(vocab_size, about["vocab_size"])
        url, context_length = server.ask(None)
        _check_room(prompt_tokens, tokens, context_length)
        for index in range(repeat + 1):
            for count in streams:
                prompts = rng.integers(3, ids_end, size=(count, prompt_tokens)).tolist()
                question = _Question([tuple(prompt) for prompt in prompts], tokens)
                run = _run_both(engine, url, question, is_engine_first=index % 2 == 0)
                # The first one is to warm up.
                if index:
                    runs[count].append(run)
    report = {
        "model": source.id,
        "kernels": ops.implementation(),
        "threads": ops.num_threads(),
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "repeat": repeat,
        "runs": [_figures(count, of_count) for count, of_count in runs.items()],
    }
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _print_table(report)


def _check_room(prompt_tokens: int, tokens: int, context_length: int) -> None:
    if prompt_tokens + tokens > context_length:
        raise UsageError(
            f"{prompt_tokens} prompt and {tokens} new tokens are more than the context holds: "
            f"{context_length}"
        )


def _run_both(engine: SideProcess, url: str, question: _Question, *, is_engine_first: bool) -> _Run:
    engine_tok_s = engine.ask(question) if is_engine_first else None
    streams = asyncio.run(read_streams(url, question.prompts, question.tokens))
    if engine_tok_s is None:
        engine_tok_s = engine.ask(question)
    return _Run(engine_tok_s, decode_rate(streams), streams)


# In the processes of the sides


def _open_engine(folder: Path) -> Answer:
    """Answers a question with the engine's tokens a second while all streams decode, None with what the
    model is."""
    from mlxserve.engine.benchmark import DecodeShape, decode_core, drain, run_streams
    from mlxserve.models.loader import load_model

    model = load_model(folder)

    def answer(question: _Question | None) -> Any:
        if question is None:
            return {"vocab_size": model.vocab_size}
        shape = DecodeShape(len(question.prompts[0]), question.tokens, len(question.prompts))
        core = decode_core(model, shape)
        run = run_streams(core, shape, question.prompts)
        drain(core, shape)
        return run.num_decoded / max(run.ended - run.prefilled, 1e-9)

    return answer


def _open_server(source: PreparedModel, config: EngineConfig) -> Answer:
    """A server as ``mlxserve serve`` runs one, on a free port and a thread of its own. Answers with its URL
    and context length."""
    from mlxserve.cli.opening import load_model
    from mlxserve.server.app import create_app, make_runner

    model = load_model(source, config, console=Console(stderr=True, quiet=True))
    listener = socket.create_server((DEFAULT_HOST, 0))

    async def start() -> None:
        runner = make_runner(create_app([model]))
        await runner.setup()
        await web.SockSite(runner, listener).start()

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(start(), loop).result()
    url = f"http://{DEFAULT_HOST}:{listener.getsockname()[1]}"
    return lambda question: (url, model.context_length)


# Figures


def _figures(count: int, runs: Sequence[_Run]) -> dict[str, Any]:
    """Medians over the repeats; latencies over all streams of all repeats, in milliseconds."""
    streams = [stream for run in runs for stream in run.streams]
    num_pieces = sum(len(stream.pieces) for stream in streams)
    return {
        "streams": count,
        "engine_tok_s": round(statistics.median(run.engine_tok_s for run in runs), 2),
        "http_tok_s": round(statistics.median(run.http_tok_s for run in runs), 2),
        "ratio": round(statistics.median(run.http_tok_s / run.engine_tok_s for run in runs), 3),
        "first_token_ms": _percentiles([stream.first_s for stream in streams]),
        "gap_ms": _percentiles([gap for stream in streams for gap in stream.gaps_s]),
        "tokens_per_piece": round(sum(stream.num_tokens for stream in streams) / num_pieces, 3),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        raise UsageError(
            "no stream had two pieces of text, so there is nothing between them: give more --tokens"
        )
    values = np.percentile(np.array(seconds) * 1e3, [50, 90, 99, 100])
    return dict(
        zip(("p50", "p90", "p99", "max"), (round(value, 3) for value in values.tolist()), strict=True)
    )


def _print_table(report: dict[str, Any]) -> None:
    table = Table(
        title=f"{report['model']}: {report['prompt_tokens']} prompt and {report['tokens']} new tokens; "
        f"{report['threads']} threads, {report['kernels']} kernels"
    )
    for heading in ("streams", "engine tok/s", "HTTP tok/s", "ratio", "first token ms", "between tokens ms"):
        table.add_column(heading, justify="right")
    for run in report["runs"]:
        table.add_row(
            str(run["streams"]),
            f"{run['engine_tok_s']:.1f}",
            f"{run['http_tok_s']:.1f}",
            f"{run['ratio']:.1%}",
            _spread(run["first_token_ms"]),
            _spread(run["gap_ms"]),
        )
    console = Console()
    console.print(table)
    console.print("Milliseconds: half of all within the first number, 99 % within the second.")


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['p50']:.1f} / {figures['p99']:.1f}"
