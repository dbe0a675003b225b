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
    context: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Decode at these context lengths instead. Only the first 512 tokens are computed, the "
            "keys and values of the rest are copies of theirs.",
        ),
    ] = None,
    kv_bits: Annotated[
        int | None,
        typer.Option(metavar="8|4", help="Keep keys and values as integers of so many bits."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where a decode step's time goes as well.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill and decode of the engine, without HTTP, on random prompts.

    Example:
      mlxserve bench decode smollm2 --prompt-tokens 512 --tokens 64 --streams 1,4,16 --json
    """
    from mlxserve.cli.benchmarks import bench_decode, parse_contexts, parse_streams

    bench_decode(
        model,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        streams=parse_streams(streams),
        repeat=repeat,
        contexts=None if context is None else parse_contexts(context),
        against=against,
        kv_bits=kv_bits,
        with_profile=profile,
        as_json=json,
    )


@bench_app.command("serve")
def serve_command(
    model: ModelArgument = DEFAULT_MODEL,
    streams: Annotated[
        str, typer.Option(metavar="N,…", help="Numbers of clients that stream together.")
    ] = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each prompt.")] = 64,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="New tokens of each stream.")] = 64,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each; medians are shown.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the HTTP API beside the engine without it, in turn, on random prompts.

    A server and clients that stream from it run on this machine; so do the clients' costs. Both figures count
    the time in which all streams decode.

    Example:
      mlxserve bench serve smollm2 --streams 1,16 --json
    """
    from mlxserve.cli.benchmarks import parse_streams
    from mlxserve.cli.serve_benchmark import bench_serve

    bench_serve(
        model,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        streams=parse_streams(streams),
        repeat=repeat,
        as_json=json,
    )


@bench_app.command("kernels")
def kernels_command(
    shape: Annotated[
        str, typer.Option(metavar="NAME", help="Whose sizes to take: smollm2, llama-1b or qwen3-moe.")
    ] = "llama-1b",
    only: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Only these kernels (default: all).")
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each; medians are shown.")] = 5,
    reference_limit: Annotated[
        float,
        typer.Option(metavar="S", min=0, help="Leave the reference out where one call takes longer."),
    ] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure each kernel beside its reference in plain mlx, in turn, at a model's sizes.

    Example:
      mlxserve bench kernels --shape llama-1b --only quantized_matmul,paged_attention
    """
    from mlxserve.cli.kernel_benchmarks import bench_kernels

    bench_kernels(
        shape,
        only=None if only is None else tuple(only.split(",")),
        repeat=repeat,
        reference_limit_s=reference_limit,
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
