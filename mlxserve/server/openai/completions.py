"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET

from mlxserve.server.generation import ChoiceEvent, End
from mlxserve.server.openai.reply import Completion, CompletionChoice, Reason, Usage
from mlxserve.server.openai.run import answer, translated
from mlxserve.server.openai.schema import CompletionRequest
from mlxserve.server.openai.translate import Job, translate_completion
from mlxserve.text.tool_parser import ContentDelta


async def completions(request: web.Request) -> web.StreamResponse:
    job = await translated(request, CompletionRequest, translate_completion)
    return await answer(request, job, CompletionShape(job))


class CompletionShape:
    """Implements ``Shape`` (see there) for completions."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: set[int] = set()

    def chunks(self, choice: int, event: ChoiceEvent) -> Sequence[Completion]:
        chunks = []
        if choice not in self._opened:
            self._opened.add(choice)
            if echo := self._echo(choice):
                chunks.append(self._chunk(choice, echo))
        match event:
            case ContentDelta(text=text):
                chunks.append(self._chunk(choice, text))
            case End(reason=reason):
                chunks.append(self._chunk(choice, "", reason))
            case _:
                raise AssertionError(f"no such event in completions: {event}")
        return chunks

    def usage_chunk(self, usage: Usage) -> Completion:
        return Completion(self._job.id, self._job.created, self._job.model.id, [], usage)

    def whole(self, events: Sequence[Sequence[ChoiceEvent]], usage: Usage) -> Completion:
        choices = [self._choice(index, choice) for index, choice in enumerate(events)]
        return Completion(self._job.id, self._job.created, self._job.model.id, choices, usage)

    def _choice(self, index: int, events: Sequence[ChoiceEvent]) -> CompletionChoice:
        text = "".join(event.text for event in events if isinstance(event, ContentDelta))
        end = events[-1]
        assert isinstance(end, End)
        return CompletionChoice(index, self._echo(index) + text, end.reason)

    def _echo(self, choice: int) -> str:
        return self._job.prompt_of(choice).text if self._job.is_echo else ""

    def _chunk(self, choice: int, text: str, reason: Reason | None = None) -> Completion:
        job = self._job
        usage = None if job.options.has_usage_chunk else UNSET
        return Completion(job.id, job.created, job.model.id, [CompletionChoice(choice, text, reason)], usage)
