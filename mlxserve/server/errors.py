"""The one map from exceptions to HTTP status and OpenAI's error body.

Every error reply, of whatever route, has the form
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from mlxserve.errors import (
    EngineDeadError,
    ForbiddenError,
    InvalidRequestError,
    MlxserveError,
    ModelNotFoundError,
    QueueFullError,
)

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it goes over the wire."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON object, for a plain reply or for an event in a stream that has begun."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body, content_type="application/json", headers=self.headers
        )


UNAUTHORIZED = ErrorReply(
    401,
    INVALID_REQUEST,
    "this server needs its API key, sent as 'Authorization: Bearer KEY'",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def error_reply(error: Exception) -> ErrorReply:
    """Status and body of any error. One that is not ours is a bug: its text goes to the log alone."""
    message = str(error)
    match error:
        case InvalidRequestError():
            return ErrorReply(400, INVALID_REQUEST, message, error.param, error.code)
        case ForbiddenError():
            return ErrorReply(403, INVALID_REQUEST, message, None, error.code)
        case ModelNotFoundError():
            return ErrorReply(404, INVALID_REQUEST, message, "model", error.code)
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ErrorReply(429, "rate_limit_error", message, None, error.code, headers)
        case EngineDeadError():
            return ErrorReply(503, SERVER_ERROR, message, None, error.code)
        case MlxserveError():
            return ErrorReply(500, SERVER_ERROR, message, None, error.code)
        case _:
            logger.error("a request failed", exc_info=error)
            message = "internal error; the server's log has it"
            return ErrorReply(500, SERVER_ERROR, message, None, MlxserveError.code)


def http_error_reply(request: web.Request, error: web.HTTPException) -> ErrorReply:
    """The same form for what aiohttp itself refuses: unknown paths, wrong methods, too large bodies."""
    headers: dict[str, str] = {}
    match error:
        case web.HTTPNotFound():
            message = f"no such path: {request.method} {request.path}"
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} takes {allowed}, not {error.method}"
            headers["Allow"] = allowed
        case web.HTTPRequestEntityTooLarge():
            message = error.text or "the body is too large"
        case _:
            message = error.reason
    type_ = INVALID_REQUEST if error.status < 500 else SERVER_ERROR
    return ErrorReply(error.status, type_, message, None, _HTTP_CODES.get(error.status), headers)
