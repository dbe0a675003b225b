"""``mlxserve show``: what a model is, from its files alone."""

from __future__ import annotations

from typing import Annotated

import typer


def show_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A stored name, a folder or a .gguf file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's architecture, size, bits per weight and context length. Loads and downloads nothing.

    Example:
      mlxserve show smollm2
    """
    import json

    from mlxserve.cli.model_details import describe
    from mlxserve.errors import ModelNotFoundError, UsageError
    from mlxserve.hub import find_pull, parse_reference, resolve

    source = resolve(model)
    if source.path is None:
        reference = parse_reference(source.name)
        pulled = None if reference is None else find_pull(reference)
        if pulled is not None and not pulled.is_whole:
            raise ModelNotFoundError(
                f"{model} is on this machine only in part ({pulled.state()}); go on with: "
                f"mlxserve pull {model}"
            )
        raise ModelNotFoundError(f"{model} is not on this machine; get it with: mlxserve pull {model}")
    if source.kind == "scripted":
        raise UsageError(f"{model} is a scripted model, it has no weights to show")
    details = describe(source.name, source.path)
    if as_json:
        typer.echo(json.dumps(details.as_dict(), ensure_ascii=False))
        return
    for name, value in details.as_dict().items():
        typer.echo(f"{name:16} {'-' if value is None else value}")
