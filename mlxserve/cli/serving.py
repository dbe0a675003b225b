"""The life of ``mlxserve serve``: bind, load, serve, stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from mlxserve.engine.served_adapters import load_adapter
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import InvalidRequestError, UsageError
from mlxserve.server.app import create_app, make_runner


@dataclass(frozen=True, slots=True)
class Binding:
    host: str
    port: int
    api_key: str | None


def serve(
    names: Sequence[str],
    binding: Binding,
    config: EngineConfig,
    max_context: int | None,
    adapters: Sequence[str] = (),
) -> None:
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
            wishes = [_adapter_wish(text) for text in adapters]
            models = _load_all(names, config, max_context, console)
            models += _load_adapters(models, wishes, console)
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


@dataclass(frozen=True, slots=True)
class _AdapterWish:
    model: str | None
    name: str
    folder: Path


def _adapter_wish(text: str) -> _AdapterWish:
    """Of an ``--adapter`` option: NAME=DIR or MODEL:NAME=DIR."""
    target, equals, folder = text.partition("=")
    model, colon, name = target.rpartition(":")
    if not equals or not folder or not name:
        raise UsageError(f"--adapter {text!r} is not NAME=DIR or MODEL:NAME=DIR")
    return _AdapterWish(model if colon else None, name, Path(folder))


def _load_adapters(
    models: Sequence[ServedModel], wishes: Sequence[_AdapterWish], console: Console
) -> list[ServedModel]:
    loaded: list[ServedModel] = []
    for wish in wishes:
        base = _base_of(models, wish)
        if any(f"{base.id}:{wish.name}" == other.id for other in loaded):
            raise UsageError(f"two adapters of {base.id} have the same name {wish.name!r}")
        try:
            with console.status(f"Loading {base.id}:{wish.name}"):
                loaded.append(load_adapter(base, wish.name, wish.folder))
        except InvalidRequestError as error:
            raise UsageError(f"--adapter {wish.name}: {error}") from None
    return loaded


def _base_of(models: Sequence[ServedModel], wish: _AdapterWish) -> ServedModel:
    ids = ", ".join(model.id for model in models)
    if wish.model is None:
        if len(models) > 1:
            raise UsageError(
                f"--adapter {wish.name}: of which model? write MODEL:{wish.name}=DIR; models: {ids}"
            )
        return models[0]
    for model in models:
        if model.id == wish.model:
            return model
    raise UsageError(f"--adapter {wish.model}:{wish.name}: no such model is served, only: {ids}")


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
