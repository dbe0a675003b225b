"""The life of ``mlxserve serve``: bind, load, serve, stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web
from rich.console import Console
from rich.markup import escape

from mlxserve.cli.listening import (
    base_url,
    bind_sockets,
    close_sockets,
    is_reachable_from_network,
    unavailable,
)
from mlxserve.cli.model_source import prepare_model
from mlxserve.cli.opening import load_model
from mlxserve.cli.stopping import StopSignals
from mlxserve.config import EngineConfig
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import UsageError
from mlxserve.server.app import create_app, make_runner


@dataclass(frozen=True, slots=True)
class Binding:
    host: str
    port: int
    api_key: str | None


def serve(names: Sequence[str], binding: Binding, config: EngineConfig, max_context: int | None) -> None:
    """Serve until the first SIGINT or SIGTERM, which ends all streams and frees the port."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with StopSignals() as signals:
        sockets = bind_sockets(binding.host, binding.port)
        try:
            if binding.api_key is None and is_reachable_from_network(sockets):
                console.print(
                    f"warning: {binding.host} can be reached from the network and no --api-key is set:"
                    " anyone there can use this server",
                    style="yellow",
                )
            models = _load_all(names, config, max_context, console)
            asyncio.run(_run(models, sockets, binding, signals, console))
        finally:
            close_sockets(sockets)


def _load_all(
    names: Sequence[str], config: EngineConfig, max_context: int | None, console: Console
) -> list[ServedModel]:
    sources = [prepare_model(name, console=console) for name in names]
    for index, source in enumerate(sources):
        if any(source.id == other.id for other in sources[:index]):
            raise UsageError(f"two of the models to serve have the same id {source.id!r}")
    return [load_model(source, config, console=console, max_context=max_context) for source in sources]


async def _run(
    models: Sequence[ServedModel],
    sockets: Sequence[socket.socket],
    binding: Binding,
    signals: StopSignals,
    console: Console,
) -> None:
    stop = signals.watch()
    runner = make_runner(create_app(models, api_key=binding.api_key))
    await runner.setup()
    try:
        for sock in sockets:
            try:
                await web.SockSite(runner, sock).start()
            except OSError as error:
                raise unavailable(binding.host, binding.port, error) from error
        for model in models:
            console.print(f"Serving [bold]{escape(model.id)}[/bold] (context {model.context_length} tokens)")
        console.print(f"Ready at [bold]{base_url(sockets[0])}/v1[/bold] (Ctrl-C stops)")
        await stop.wait()
        console.print("Stopping ...")
    finally:
        # Closes the port, then the engines, which ends every stream, then waits for the responses.
        await runner.cleanup()
