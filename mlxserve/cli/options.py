"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxserve.cli.sizes import parse_size

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model to run.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Stop after this many new tokens.", show_default="what the context holds"
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        min=0.0,
        max=2.0,
        help="0 always takes the likeliest token.",
        show_default="the model's default",
    ),
]
TopK = Annotated[int | None, typer.Option(metavar="N", min=1, help="Sample from the K likeliest tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="X", min=0.0, max=1.0, help="Sample from the likeliest tokens that hold this share."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="X", min=0.0, max=1.0, help="Leave out tokens less likely than this times the likeliest."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, max=2**64 - 1, help="Makes sampling repeatable.", show_default="a random one"
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=parse_size,
        help="Memory for weights and KV, e.g. 12G; of several models, each has this much.",
        show_default="derived from this machine",
    ),
]
