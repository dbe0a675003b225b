"""GET, POST /v1/adapters and DELETE /v1/adapters/{id}: adapters that come and go while the server runs."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path

import msgspec
from aiohttp import web

from mlxserve.engine.served_adapters import adapter_model_id, load_adapter
from mlxserve.errors import ForbiddenError, InvalidRequestError, ModelLoadError
from mlxserve.server.keys import HAS_API_KEY, REGISTRY
from mlxserve.server.openai.decode import decode_body
from mlxserve.server.status import ModelCard, json_reply, model_card

_JSON = "application/json"


class AdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """``path`` is a folder on the server's machine. ``model`` is the base, where several are served."""

    name: str
    path: str
    model: str | None = None


class AdapterList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Deleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "model"


async def list_adapters(request: web.Request) -> web.Response:
    cards = [model_card(model) for model in request.app[REGISTRY] if model.parent is not None]
    return json_reply(AdapterList(cards))


async def add_adapter(request: web.Request) -> web.Response:
    """Loads an adapter; requests that run meanwhile are not disturbed."""
    _check_allowed(request)
    # A page in a browser can send any other type to a local server without asking.
    if request.content_type != _JSON:
        raise InvalidRequestError(f"the body must be sent as {_JSON}, not {request.content_type}")
    body = decode_body(await request.read(), AdapterRequest)
    registry = request.app[REGISTRY]
    base = registry.base(body.model)
    registry.reserve(adapter_model_id(base, body.name))
    try:
        model = await asyncio.to_thread(load_adapter, base, body.name, Path(body.path))
    except ModelLoadError as error:
        registry.release(adapter_model_id(base, body.name))
        raise InvalidRequestError(str(error), param="path", code=error.code) from error
    except BaseException:
        registry.release(adapter_model_id(base, body.name))
        raise
    registry.add(model)
    return json_reply(model_card(model), status=201)


async def delete_adapter(request: web.Request) -> web.Response:
    """Refuses new requests of an adapter at once; those that run end as they would."""
    _check_allowed(request)
    model = request.app[REGISTRY].get(request.match_info["adapter_id"])
    if model.parent is None or model.adapter_id is None:
        raise InvalidRequestError(f"{model.id} is no adapter and stays", param="model")
    request.app[REGISTRY].remove(model.id)
    await asyncio.wrap_future(model.engine.drop_adapter(model.adapter_id))
    return json_reply(Deleted(model.id))


def _check_allowed(request: web.Request) -> None:
    """With an API key the request has shown it. Without one, only this machine may read its folders."""
    if request.app[HAS_API_KEY] or _is_local(request.remote):
        return
    raise ForbiddenError("adapters are loaded from this machine or with the API key")


def _is_local(remote: str | None) -> bool:
    """No address at all is a socket of this machine."""
    return remote is None or remote == "" or ipaddress.ip_address(remote.partition("%")[0]).is_loopback
