"""The HTTP application: routes, authorization, errors and shutdown."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from mlxserve.engine.served_model import ServedModel
from mlxserve.server import adapters, status
from mlxserve.server.errors import UNAUTHORIZED, error_reply, http_error_reply
from mlxserve.server.keys import HAS_API_KEY, PING_S, REGISTRY
from mlxserve.server.openai.chat import chat_completions
from mlxserve.server.openai.completions import completions
from mlxserve.server.registry import ModelRegistry

DEFAULT_PING_S = 15.0
DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024
SHUTDOWN_TIMEOUT_S = 5.0

_OPEN_PATHS = ("/health",)


def create_app(
    models: Sequence[ServedModel],
    *,
    api_key: str | None = None,
    ping_s: float = DEFAULT_PING_S,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> web.Application:
    """The application that serves ``models``, which it owns from now on: its shutdown closes them.

    With ``api_key`` every route but /health wants it as a bearer token. ``ping_s`` is the longest
    silence in a stream before a comment line is sent. Raises UsageError for two models of one name.
    Run it by ``make_runner``: only then does a disconnect stop a generation that writes nothing yet.
    """
    middlewares = [_errors] if api_key is None else [_errors, _authorization(api_key)]
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    app[REGISTRY] = ModelRegistry(models)
    app[PING_S] = ping_s
    app[HAS_API_KEY] = api_key is not None
    app.router.add_get("/health", status.health)
    app.router.add_get("/v1/models", status.list_models)
    app.router.add_get("/v1/models/{model_id:.+}", status.show_model)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/adapters", adapters.list_adapters)
    app.router.add_post("/v1/adapters", adapters.add_adapter)
    app.router.add_delete("/v1/adapters/{adapter_id:.+}", adapters.delete_adapter)
    app.on_shutdown.append(_close_models)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner in which a handler is cancelled, and so its generation aborted, when its client leaves."""
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S)


async def _close_models(app: web.Application) -> None:
    """Streams end when their engines close; the server then waits for their handlers."""
    await asyncio.gather(*(engine.close() for engine in app[REGISTRY].engines))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything that is raised becomes a reply in OpenAI's form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return http_error_reply(request, error).response()
    except Exception as error:  # noqa: BLE001 - error_reply logs what is not ours
        return error_reply(error).response()


def _authorization(api_key: str) -> Middleware:
    expected = api_key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), expected)
        if is_right or request.path in _OPEN_PATHS:
            return await handler(request)
        return UNAUTHORIZED.response()

    return check
