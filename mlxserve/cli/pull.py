"""``mlxserve pull``: fetch a model now, so that later commands need no network."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxserve.config import DEFAULT_MODEL


def pull_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name or a hub repo id.")
    ] = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Download a model into the local store; does nothing if it is there and whole.

    Example:
      mlxserve pull smollm2
    """
    import json

    from rich.console import Console

    from mlxserve.cli.model_source import fetch
    from mlxserve.errors import UsageError
    from mlxserve.hub import BUILTIN_MODELS, pull_builtin, resolve

    console = Console(stderr=True)
    if model in BUILTIN_MODELS:
        builtin = BUILTIN_MODELS[model]
        with console.status(f"Downloading {builtin.name} ({builtin.num_bytes / 1e6:.0f} MB)"):
            path = pull_builtin(builtin)
    else:
        source = resolve(model)
        if source.kind != "hub":
            raise UsageError(f"{model} is on this machine already ({source.path}), there is nothing to pull")
        path = fetch(source, console=console)
    if as_json:
        typer.echo(json.dumps({"model": model, "path": str(path)}))
    else:
        typer.echo(f"{model} is at {path}")
