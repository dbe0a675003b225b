"""``mlxserve pull``: fetch a model now, so that later commands need no network."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxserve.config import DEFAULT_MODEL


def pull_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A built-in name, OWNER/NAME, OWNER/NAME@REVISION or OWNER/NAME:FILE.gguf."
        ),
    ] = DEFAULT_MODEL,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="A branch, tag or commit, as after the @.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Fetch the files that match instead of what a model needs; may be repeated.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Leave out files that match; may be repeated.", show_default=False
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use no network: only check that the model is here and whole.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Download a model, or what is missing of it; does nothing if it is there and whole.

    A repository of the Hugging Face hub goes to the hub's own cache. An interrupted download goes on where
    it stopped. HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE act as in huggingface-hub.

    Example:
      mlxserve pull smollm2
      mlxserve pull owner/name --revision v1.1
    """
    import json
    from dataclasses import replace

    from rich.console import Console

    from mlxserve.cli import model_source
    from mlxserve.errors import ModelLoadError, UsageError
    from mlxserve.hub import BUILTIN_MODELS, Patterns, parse_reference, pull_builtin, resolve

    console = Console(stderr=True)
    patterns = Patterns(tuple(include or ()), tuple(exclude or ()))
    if model in BUILTIN_MODELS:
        if revision is not None or patterns != Patterns():
            raise UsageError(f"{model} is one file: --revision, --include and --exclude are for repositories")
        builtin = BUILTIN_MODELS[model]
        if offline and not builtin.is_pulled:
            raise ModelLoadError(f"{model}: was not pulled, and --offline allows no download")
        with console.status(f"Downloading {builtin.name} ({builtin.num_bytes / 1e6:.0f} MB)"):
            path = builtin.path if offline else pull_builtin(builtin)
    else:
        source = resolve(model)
        reference = parse_reference(source.name)
        if source.kind != "hub" or reference is None:
            raise UsageError(f"{model} is on this machine already ({source.path}), there is nothing to pull")
        if revision is not None:
            if reference.revision not in (None, revision):
                raise UsageError(f"--revision {revision} and @{reference.revision} are two revisions")
            reference = parse_reference(str(replace(reference, revision=revision)))
            if reference is None:
                raise UsageError(f"--revision {revision!r} is not the name of a revision")
        path = model_source.pull(reference, patterns, console=console, offline=offline).model_path
    if as_json:
        typer.echo(json.dumps({"model": model, "path": str(path)}))
    else:
        typer.echo(f"{model} is at {path}")
