"""``mlxserve bench``: speed on this machine, with the limit that the machine sets."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxserve.cli.options import ModelArgument
from mlxserve.config import DEFAULT_MODEL

bench_app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure speed on this machine. Figures are medians; the machine's read rate is measured with them."""


@bench_app.command("decode")
def decode_command(
    model: ModelArgument = DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each prompt.")] = 512,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="New tokens of each stream.")] = 64,
    streams: Annotated[
        str, typer.Option(metavar="N,…", help="Numbers of streams that decode together.")
    ] = "1,4,16",
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each; medians are shown.")] = 5,
    against: Annotated[
        str | None,
        typer.Option(metavar="mlx-lm", help="Measure stock mlx-lm too, in turn, on one stream."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill and decode of the engine, without HTTP, on random prompts.

    Example:
      mlxserve bench decode smollm2 --prompt-tokens 512 --tokens 64 --streams 1,4,16 --json
    """
    from mlxserve.cli.benchmarks import bench_decode, parse_streams

    bench_decode(
        model,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        streams=parse_streams(streams),
        repeat=repeat,
        against=against,
        as_json=json,
    )


@bench_app.command("kv")
def kv_command(
    model: ModelArgument = DEFAULT_MODEL,
    history: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of the conversation so far.")
    ] = 4096,
    new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the next turn.")] = 32,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Runs; medians are shown.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefix reuse: the time to the first token of a long conversation and of its next turn.

    Example:
      mlxserve bench kv smollm2 --history 4096 --json
    """
    from mlxserve.cli.benchmarks import bench_kv

    bench_kv(model, history=history, new_tokens=new_tokens, repeat=repeat, as_json=json)
