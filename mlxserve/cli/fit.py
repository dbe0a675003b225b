"""``mlxserve fit``: what a model needs, and what of it fits which Mac."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxserve.cli.sizes import parse_size


def fit_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a built-in name or a hub repo id.")
    ],
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=parse_size, help="Memory of the Mac, e.g. 64G.", show_default="all Macs"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of each sequence; shows how many fit at once."),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Sequences at once; shows how long each can be.", show_default="1"
        ),
    ] = None,
    kv_bits: Annotated[
        int, typer.Option(metavar="16|8|4", help="Bits of keys and values, as for serve.")
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what fits which Mac: weights at each width, keys and values, context, and the limit of speed.

    Only config.json (or a GGUF file's header) is read; of a hub repository, nothing else is downloaded. The
    tokens a second are the bound that memory bandwidth sets, not a measurement.

    Example:
      mlxserve fit Qwen/Qwen3-8B --memory 32G
      mlxserve fit ./my-model --context 32768 --parallel 4 --json
    """
    from mlxserve.cli.fitting import Question, show_fit

    show_fit(model, Question(memory, context, parallel, kv_bits), as_json=as_json)
