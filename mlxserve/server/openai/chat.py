"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET

from mlxserve.server.generation import ChoiceEvent, End
from mlxserve.server.openai.reply import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    FunctionCall,
    Reason,
    ToolCallItem,
    Usage,
)
from mlxserve.server.openai.run import answer, translated
from mlxserve.server.openai.schema import ChatRequest
from mlxserve.server.openai.translate import Job, translate_chat
from mlxserve.text.tool_parser import ContentDelta, ToolCall


async def chat_completions(request: web.Request) -> web.StreamResponse:
    job = await translated(request, ChatRequest, translate_chat)
    return await answer(request, job, ChatShape(job))


class ChatShape:
    """Implements ``Shape`` (see there) for chat."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: set[int] = set()
        self._num_calls = [0] * job.num_choices

    def chunks(self, choice: int, event: ChoiceEvent) -> Sequence[ChatChunk]:
        chunks = []
        if choice not in self._opened:
            self._opened.add(choice)
            chunks.append(self._chunk(choice, Delta(role="assistant", content="")))
        match event:
            case ContentDelta(text=text):
                chunks.append(self._chunk(choice, Delta(content=text)))
            case ToolCall():
                item = _tool_call_item(event)
                item.index = self._num_calls[choice]
                self._num_calls[choice] += 1
                chunks.append(self._chunk(choice, Delta(tool_calls=[item])))
            case End(reason=reason):
                chunks.append(self._chunk(choice, Delta(), reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self._job.id, self._job.created, self._job.model.id, [], usage)

    def whole(self, events: Sequence[Sequence[ChoiceEvent]], usage: Usage) -> ChatCompletion:
        choices = [_choice(index, choice) for index, choice in enumerate(events)]
        return ChatCompletion(self._job.id, self._job.created, self._job.model.id, choices, usage)

    def _chunk(self, choice: int, delta: Delta, reason: Reason | None = None) -> ChatChunk:
        job = self._job
        usage = None if job.options.has_usage_chunk else UNSET
        return ChatChunk(job.id, job.created, job.model.id, [ChatChunkChoice(choice, delta, reason)], usage)


def _choice(index: int, events: Sequence[ChoiceEvent]) -> ChatChoice:
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    calls = [_tool_call_item(event) for event in events if isinstance(event, ToolCall)]
    message = AssistantMessage(None if calls and not content else content, tool_calls=calls or UNSET)
    end = events[-1]
    assert isinstance(end, End)
    return ChatChoice(index, message, end.reason)


def _tool_call_item(call: ToolCall) -> ToolCallItem:
    return ToolCallItem(f"call_{uuid.uuid4().hex[:24]}", FunctionCall(call.name, call.arguments))
