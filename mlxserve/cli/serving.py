"""The life of ``mlxserve serve``: bind, load, serve, stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web
from rich.console import Console

from mlxserve.cli.listening import (
    base_url,
    bind_sockets,
    close_sockets,
    is_reachable_from_network,
    unavailable,
)
from mlxserve.cli.opening import open_model
from mlxserve.cli.stopping import StopSignals
from mlxserve.config import EngineConfig
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import UsageError
from mlxserve.server.app import create_app

_DRAIN_S = 3.0
"""How long a client that reads slowly may take to receive the end of its stream."""


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
            models = _open_all(names, config, max_context, console)
            asyncio.run(_run(models, sockets, binding, signals, console))
        finally:
            close_sockets(sockets)


def _open_all(
    names: Sequence[str], config: EngineConfig, max_context: int | None, console: Console
) -> list[ServedModel]:
    models: list[ServedModel] = []
    for name in names:
        model = open_model(name, config, console=console, max_context=max_context)
        if any(model.id == other.id for other in models):
            raise UsageError(f"two of the models to serve have the same id {model.id!r}")
        models.append(model)
    return models


async def _run(
    models: Sequence[ServedModel],
    sockets: Sequence[socket.socket],
    binding: Binding,
    signals: StopSignals,
    console: Console,
) -> None:
    stop = signals.watch()
    runner = web.AppRunner(
        create_app(models, api_key=binding.api_key), shutdown_timeout=_DRAIN_S, access_log=None
    )
    await runner.setup()
    try:
        for sock in sockets:
            try:
                await web.SockSite(runner, sock).start()
            except OSError as error:
                raise unavailable(binding.host, binding.port, error) from error
        for model in models:
            console.print(f"Serving [bold]{model.id}[/bold] (context {model.context_length} tokens)")
        console.print(f"Ready at [bold]{base_url(sockets[0])}/v1[/bold] (Ctrl-C stops)")
        await stop.wait()
        console.print("Stopping ...")
    finally:
        await _close(models, runner)


async def _close(models: Sequence[ServedModel], runner: web.AppRunner) -> None:
    """Close the port, end every stream by closing its engine, then let the responses drain."""
    for site in list(runner.sites):
        await site.stop()
    await asyncio.gather(*(model.close() for model in models))
    await runner.cleanup()
