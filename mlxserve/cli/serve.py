"""``mlxserve serve``: serve models over HTTP until Ctrl-C."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxserve.cli.options import MemoryLimit
from mlxserve.config import DEFAULT_HOST, DEFAULT_MODEL, DEFAULT_PORT, EngineConfig

_DEFAULTS = EngineConfig()


def serve_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Models to serve side by side.", show_default=DEFAULT_MODEL),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for every network.")
    ] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 picks a free one.")
    ] = DEFAULT_PORT,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key that clients must send as a bearer token.")
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens of prompt and answer together.",
            show_default="what the model supports",
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests that run at once; more wait.")
    ] = _DEFAULTS.max_running,
    queue: Annotated[
        int, typer.Option(metavar="N", min=0, help="Requests that may wait; one more gets status 429.")
    ] = _DEFAULTS.max_waiting,
    memory_limit: MemoryLimit = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="Also serve an adapter, as MODEL:NAME; with several models: MODEL:NAME=DIR. Repeatable.",
        ),
    ] = None,
) -> None:
    """Serve models over HTTP with OpenAI's API, until Ctrl-C.

    A MODEL of the form scripted:FILE.json plays back given answers, to test a client without a model.

    Example:
      mlxserve serve smollm2 --port 8080
      mlxserve serve ./my-model --host 0.0.0.0 --api-key secret
      mlxserve serve smollm2 --adapter pirate=./adapters
    """
    from mlxserve.cli.serving import Binding, serve

    config = EngineConfig(max_running=parallel, max_waiting=queue, memory_limit=memory_limit)
    binding = Binding(host=host, port=port, api_key=api_key)
    serve(models or [DEFAULT_MODEL], binding, config, max_context, adapter or [])
