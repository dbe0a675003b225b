"""The engine thread and its face on the event loop.

The thread is the only one that touches mlx. Requests and aborts cross to it through a locked list,
outputs cross back with ``call_soon_threadsafe``; neither side ever waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mlxserve.config import EngineConfig
from mlxserve.engine.core import EngineCore
from mlxserve.engine.memory import wire_memory
from mlxserve.engine.target import Target
from mlxserve.errors import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from mlxserve.types import EngineStats, GenerationRequest, TokenOutput
from mlxserve_kernels import ops
from mlxserve_kernels.adapters import LowRank

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_AFTER_S = 2
_JOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Something to do between steps, and who waits for it."""

    function: Callable[[EngineCore], Any]
    result: Future[Any]

    def run(self, core: EngineCore) -> None:
        try:
            self.result.set_result(self.function(core))
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            self.result.set_exception(error)


@dataclass(slots=True, eq=False)
class _Mail:
    """What the event loop has sent and the engine thread not yet taken."""

    requests: list[GenerationRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    is_closing: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.requests or self.aborts or self.calls or self.is_closing)


class TokenStream(AsyncIterator[TokenOutput]):
    """The outputs of one request; ends after the terminal one. Unread outputs wait here, so a slow
    reader blocks nobody."""

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._is_finished = False

    def abort(self) -> None:
        """Ask the engine to drop the request within one step. The stream still ends with exactly one
        terminal output. Harmless when the request has ended."""
        self._abort(self.request_id)

    async def __anext__(self) -> TokenOutput:
        if self._is_finished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._is_finished = output.finish_reason is not None
        return output

    def put(self, output: TokenOutput) -> None:
        """Called on the event loop by the engine."""
        self._outputs.put_nowait(output)


class AsyncEngine:
    """One target on its own thread.

    Constructing it starts the thread, on which ``load`` runs; it returns when the target is loaded or
    raises what loading raised. ``submit`` and ``close`` belong to one event loop.
    """

    def __init__(self, load: Callable[[], Target], config: EngineConfig, *, name: str) -> None:
        self._config = config
        self._name = name
        self._wakeup = threading.Condition()
        self._mail = _Mail()
        self._streams: dict[str, TokenStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats: EngineStats | None = None
        self._load_error: BaseException | None = None
        self._death: str | None = None
        self.max_sequence_tokens = 0
        self.vocab_size = 0
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(load, ready), name=f"engine:{name}", daemon=True
        )
        self._thread.start()
        ready.wait()
        if self._load_error is not None:
            raise self._load_error

    # On the event loop

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request; its outputs come through the stream.

        Raises ContextLengthError (with both numbers) for what can never fit the page pool,
        QueueFullError, EngineDeadError, or InvalidRequestError for a prompt that is no prompt.
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        assert self._loop is loop, "an engine belongs to one event loop"
        stream = TokenStream(request.request_id, self._send_abort)
        self._streams[request.request_id] = stream
        if self._death is not None:
            # It died after the check, perhaps without seeing this stream.
            del self._streams[request.request_id]
            self._check(request)
        with self._wakeup:
            self._mail.requests.append(request)
            self._wakeup.notify()
        return stream

    def load_adapter(self, load: Callable[[], Mapping[str, LowRank]]) -> Future[int]:
        """Load an adapter on the engine thread, between steps: ``load`` gives its changes by the paths of
        layers. The result is the id for ``GenerationRequest``, or what was wrong with it. From any thread.
        """
        return self._call(lambda core: core.load_adapter(load))

    def drop_adapter(self, adapter_id: int) -> Future[None]:
        """Refuse new requests of an adapter and forget it when those that it has are done."""
        return self._call(lambda core: core.drop_adapter(adapter_id))

    def _call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        call = _Call(function, Future())
        with self._wakeup:
            if self._death is not None:
                raise EngineDeadError(f"the engine of {self._name} has stopped: {self._death}")
            self._mail.calls.append(call)
            self._wakeup.notify()
        return call.result

    @property
    def max_requests(self) -> int:
        """Requests that may be running or waiting at once."""
        return self._config.max_running + self._config.max_waiting

    def stats(self) -> EngineStats:
        """Counts of now; requests on their way to the engine count as waiting."""
        stats = self._stats
        assert stats is not None
        with self._wakeup:
            num_mailed = len(self._mail.requests)
        return replace(stats, is_alive=self._death is None, num_waiting=stats.num_waiting + num_mailed)

    async def close(self) -> None:
        """End every stream (as aborted) and the thread. Idempotent."""
        with self._wakeup:
            self._mail.is_closing = True
            self._wakeup.notify()
        await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)
        # The last outputs were handed to the loop before the thread ended: let them arrive.
        await asyncio.sleep(0)

    def _check(self, request: GenerationRequest) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine of {self._name} has stopped: {self._death}")
        if not request.prompt_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if request.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        self._check_ids("prompt", request.prompt_ids)
        self._check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias])
        num_tokens = len(request.prompt_ids) + request.max_tokens
        if num_tokens > self.max_sequence_tokens:
            raise ContextLengthError(
                f"prompt and output need {num_tokens} tokens, the KV memory holds {self.max_sequence_tokens}",
                param="max_tokens",
                num_prompt_tokens=len(request.prompt_ids),
                context_length=self.max_sequence_tokens,
            )
        limit = self.max_requests
        if len(self._streams) >= limit:
            raise QueueFullError(
                f"{len(self._streams)} requests are running or waiting, the limit is {limit}",
                retry_after_s=RETRY_AFTER_S,
            )

    def _check_ids(self, param: str, ids: Sequence[int]) -> None:
        """Ids beyond the model's own arrays would be read from memory that is not theirs."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InvalidRequestError(
                f"{param} takes token ids from 0 to {self.vocab_size - 1}, not {wrong}", param=param
            )

    def _send_abort(self, request_id: str) -> None:
        if request_id in self._streams:
            with self._wakeup:
                self._mail.aborts.append(request_id)
                self._wakeup.notify()

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)

    def _deliver_death(self, error: EngineDeadError) -> None:
        """The last thing that a dead or closed engine says: no stream stays open."""
        is_closing = self._mail.is_closing
        for request_id in list(self._streams):
            if is_closing:
                self._deliver([TokenOutput(request_id, (), "abort")])
            else:
                self._deliver([TokenOutput(request_id, (), "error", error=error)])

    # On the engine thread

    def _run(self, load: Callable[[], Target], ready: threading.Event) -> None:
        try:
            core = self._start(load, ready)
            if core is not None:
                self._serve_until_end(core)
        finally:
            ops.release_thread()

    def _start(self, load: Callable[[], Target], ready: threading.Event) -> EngineCore | None:
        try:
            target = load()
            wire_memory(target.weight_bytes)
            core = EngineCore(target, self._config, is_pipelined=ops.supports_steps_in_flight())
            self.max_sequence_tokens = core.max_sequence_tokens
            self.vocab_size = target.vocab_size
            self._stats = core.stats()
        except BaseException as error:  # noqa: BLE001 - raised again by the constructor
            self._load_error = error
            return None
        finally:
            ready.set()
        return core

    def _serve_until_end(self, core: EngineCore) -> None:
        death = "it was closed"
        try:
            self._serve(core)
        except BaseException as error:
            logger.exception("the engine thread died")
            death = f"{type(error).__name__}: {error}"
        finally:
            with self._wakeup:
                self._death = death
                calls, self._mail.calls = self._mail.calls, []
            for call in calls:
                call.result.set_exception(EngineDeadError(f"the engine has stopped: {death}"))
            self._call_loop(self._deliver_death, EngineDeadError(f"the engine has stopped: {self._death}"))

    def _serve(self, core: EngineCore) -> None:
        while True:
            mail = self._take_mail(core)
            if mail.is_closing:
                for call in mail.calls:
                    call.result.set_exception(EngineDeadError("the engine was closed"))
                return
            outputs: list[TokenOutput] = []
            for request in mail.requests:
                outputs += core.add(request)
            # After the requests: an abort may have come in the same mail as its own.
            outputs += [output for output in map(core.abort, mail.aborts) if output is not None]
            for call in mail.calls:
                call.run(core)
            outputs += core.step()
            self._stats = core.stats()
            if outputs:
                self._call_loop(self._deliver, outputs)

    def _take_mail(self, core: EngineCore) -> _Mail:
        """Everything sent so far; waits while there is nothing else to do."""
        if not core.has_work:
            core.rest()
        with self._wakeup:
            while self._mail.is_empty:
                if not core.has_work:
                    self._wakeup.wait()
                elif wait_s := core.wait_s:
                    self._wakeup.wait(wait_s)
                    break
                else:
                    break
            mail = self._mail
            self._mail = _Mail(is_closing=mail.is_closing)
            return mail

    def _call_loop(self, call: Callable[..., None], argument: object) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:
            logger.debug("the event loop is closed; its streams are gone")
