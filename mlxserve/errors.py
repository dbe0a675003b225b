"""The exception tree. Every error that a user can cause or meet is one of these.

MlxserveError
├── InvalidRequestError            a request that can never be served as it is (HTTP 400)
│   ├── UnsupportedFieldError      a field or value that this version does not support, by name
│   ├── ContextLengthError         the prompt does not fit the context, with both numbers
│   └── TemplateError              the chat template refused the messages, in its own words
├── ForbiddenError                 allowed to others, not to this client (HTTP 403)
├── ModelNotFoundError             no such model (HTTP 404, exit code 1)
├── ModelLoadError                 a model folder or file that cannot be loaded, and why
│   └── UnsupportedModelError      an architecture or format that this version does not serve
├── ConversionError                a conversion that cannot be done, and why
├── QueueFullError                 too many waiting requests (HTTP 429, Retry-After)
├── EngineDeadError                the engine thread has ended (HTTP 503)
├── RequestFailedError             one request failed inside the engine (HTTP 500)
├── PortUnavailableError           the server's address cannot be bound (exit code 1)
└── UsageError                     a wrong command line, option or environment value (exit code 2)

Each class has a stable ``code``; API dialects map classes to status and body in one place.
"""

from __future__ import annotations


class MlxserveError(Exception):
    """Base of all errors with a message that is fit for a user. ``str(error)`` is one line."""

    code = "internal_error"


class InvalidRequestError(MlxserveError):
    """The request is wrong. ``param`` names the field, in the dialect's spelling, where there is one."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class UnsupportedFieldError(InvalidRequestError):
    """A field, or a value of it, that this version does not support."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and output, do not fit the context window."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str, num_prompt_tokens: int, context_length: int) -> None:
        super().__init__(message, param=param)
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length


class TemplateError(InvalidRequestError):
    """The chat template raised, or cannot be rendered, for these messages."""

    code = "chat_template_error"


class ForbiddenError(MlxserveError):
    """What this client may not do."""

    code = "forbidden"


class ModelNotFoundError(MlxserveError):
    """No model has this name."""

    code = "model_not_found"


class ModelLoadError(MlxserveError):
    """A model that exists but cannot be loaded."""

    code = "model_load_error"


class UnsupportedModelError(ModelLoadError):
    """A model whose architecture or format this version does not serve, by name."""

    code = "unsupported_model"


class ConversionError(MlxserveError):
    """A conversion that cannot be done; nothing was written."""

    code = "conversion_error"


class QueueFullError(MlxserveError):
    """The waiting queue is full. ``retry_after_s`` is a hint in seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(MlxserveError):
    """The engine thread has ended; no request can be served until a restart."""

    code = "engine_dead"


class RequestFailedError(MlxserveError):
    """One request failed inside the engine; others go on."""

    code = "request_failed"


class PortUnavailableError(MlxserveError):
    """The address to listen on is taken or not allowed."""

    code = "port_unavailable"


class UsageError(MlxserveError):
    """A wrong option, argument or environment value."""

    code = "usage_error"
