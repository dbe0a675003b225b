"""``mlxserve list``: what lies in the local store."""

from __future__ import annotations

from typing import Annotated

import typer


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models in the local store and those that were pulled from the hub.

    Example:
      mlxserve list
    """
    import json
    from dataclasses import replace

    from mlxserve.cli.model_details import describe_pull, describe_stored
    from mlxserve.config import home_dir
    from mlxserve.hub import BUILTIN_MODELS, list_pulls, list_stored

    names = {model.path: model.name for model in BUILTIN_MODELS.values()}
    entries = [replace(entry, name=names.get(entry.path, entry.name)) for entry in list_stored()]
    rows = [describe_stored(entry) for entry in entries] + [describe_pull(pull) for pull in list_pulls()]
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], ensure_ascii=False))
        return
    if not rows:
        typer.echo(f"no models in {home_dir()}; get one with: mlxserve pull smollm2")
        return
    table = [("NAME", "FORMAT", "ARCHITECTURE", "BITS", "CONTEXT", "SIZE"), *(row.columns() for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
