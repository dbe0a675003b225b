"""GET /health, /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from mlxserve.engine.served_model import ServedModel
from mlxserve.server.keys import REGISTRY


class Health(msgspec.Struct):
    status: Literal["ok", "engine_dead"]
    running: int
    waiting: int


class ModelCard(msgspec.Struct):
    """``context_length`` and its twin ``max_model_len`` are the window that the server enforces. ``parent``
    is the base of an adapter."""

    id: str
    created: int
    context_length: int
    max_model_len: int
    parent: str | UnsetType = UNSET
    object: Literal["model"] = "model"
    owned_by: str = "mlxserve"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


async def health(request: web.Request) -> web.Response:
    """Counts over all models; 503 when the engine thread of any is dead."""
    stats = [engine.stats() for engine in request.app[REGISTRY].engines]
    is_alive = all(engine.is_alive for engine in stats)
    body = Health(
        status="ok" if is_alive else "engine_dead",
        running=sum(engine.num_running for engine in stats),
        waiting=sum(engine.num_waiting for engine in stats),
    )
    return json_reply(body, status=200 if is_alive else 503)


async def list_models(request: web.Request) -> web.Response:
    return json_reply(ModelList([model_card(model) for model in request.app[REGISTRY]]))


async def show_model(request: web.Request) -> web.Response:
    return json_reply(model_card(request.app[REGISTRY].get(request.match_info["model_id"])))


def model_card(model: ServedModel) -> ModelCard:
    limit = model.context_length
    return ModelCard(model.id, model.created, limit, limit, parent=model.parent or UNSET)


def json_reply(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
