"""``mlxserve rm``: remove a model from the local store."""

from __future__ import annotations

from typing import Annotated

import typer


def rm_command(
    model: Annotated[str, typer.Argument(metavar="NAME", help="A name that `mlxserve list` shows.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model, and what was imported from it, from the local store. Nothing else is ever removed.

    Example:
      mlxserve rm smollm2 --yes
    """
    from mlxserve.errors import MlxserveError, ModelNotFoundError
    from mlxserve.hub import BUILTIN_MODELS, find_stored, list_stored, remove_stored
    from mlxserve.hub.store import related_paths

    builtin = BUILTIN_MODELS.get(model)
    entry = find_stored(builtin.path.name if builtin is not None else model)
    if entry is None:
        known = ", ".join(stored.name for stored in list_stored()) or "nothing"
        raise ModelNotFoundError(f"no model named {model!r} in the store, which holds: {known}")
    paths = related_paths(entry)
    if not yes:
        listing = "\n".join(f"  {path}" for path in paths)
        try:
            is_wanted = typer.confirm(f"{listing}\nRemove?", err=True)
        except typer.Abort as abort:
            if isinstance(abort.__context__, EOFError):
                raise MlxserveError("nothing was removed: there was no answer (--yes does not ask)") from None
            raise
        if not is_wanted:
            raise MlxserveError("nothing was removed")
    freed = remove_stored(entry)
    typer.echo(f"removed {model}, {freed / 1e6:.1f} MB")
