"""Rows to examples: tokens through the model's own chat template, and which of them are trained.

Everything is decided on the final text, the one that the model will see. A reply begins where the final
tokens part from those of the prompt that a client's request would have made (the common prefix of the two):
a template that adds an empty thought to the prompt, or that writes older turns otherwise once there is an
answer, moves no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from mlxserve.errors import InvalidRequestError
from mlxserve.text.chat_template import ChatTemplate
from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.text.rendered import RenderedPrompt
from mlxserve.tuning.examples import Example
from mlxserve.tuning.rows import BadRowError, ChatRow, CompletionRow, Row, TextRow

Mask = Literal["last", "all-assistant", "none"]
"""What of a conversation is trained: the last reply, every reply that stands in the final text as the model
would have written it, or everything. Rows of text are trained whole."""

LongRows = Literal["cut", "keep-answer", "skip"]
"""What happens to a row of more than the maximal number of tokens: its end is cut off; or the beginning of
its prompt, as far as the trained tokens need it, and then the end; or it is left out."""

_PROBE = "\uf0e1reply\uf0e2"


@dataclass(frozen=True, slots=True)
class _Encoded:
    token_ids: list[int]
    is_trained: list[bool]


class ExampleMaker:
    """Makes examples for one model. ``template`` None: chat rows are refused, and prompt and completion are
    put one behind the other. ``num_ended`` counts rows that got the end token, as their text had none."""

    def __init__(self, tokenizer: FolderTokenizer, template: ChatTemplate | None, mask: Mask) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._mask = mask
        self.num_ended = 0

    def make(self, row: Row, place: str) -> Example:
        """Raises BadRowError with the reason."""
        try:
            encoded = self._encode(row)
        except InvalidRequestError as error:
            raise BadRowError(str(error)) from None
        if encoded.is_trained:
            encoded.is_trained[0] = False
        return Example(tuple(encoded.token_ids), tuple(encoded.is_trained), place)

    def _encode(self, row: Row) -> _Encoded:
        if isinstance(row, TextRow):
            ids = self._with_end(self._tokenizer.encode(row.text))
            return _Encoded(ids, [True] * len(ids))
        if self._template is None:
            if isinstance(row, CompletionRow):
                return self._plain_completion(row)
            raise BadRowError("the model has no chat template, it cannot be trained on messages")
        return self._chat(ChatRow(row.messages, row.tools), self._template)

    def _plain_completion(self, row: CompletionRow) -> _Encoded:
        if row.tools:
            raise BadRowError("the model has no chat template, it cannot be trained on tools")
        ids = self._with_end(self._tokenizer.encode(row.prompt + row.completion))
        start = 0 if self._mask == "none" else _common(ids, self._tokenizer.encode(row.prompt))
        return _Encoded(ids, [i >= start for i in range(len(ids))])

    def _with_end(self, ids: list[int]) -> list[int]:
        end = self._end_id
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    @cached_property
    def _end_id(self) -> int | None:
        """The EOS of tokenizer_config.json, else the only one there is."""
        named = self._tokenizer.encode(self._tokenizer.eos_text, add_special_tokens=False)
        if self._tokenizer.eos_text and len(named) == 1:
            return named[0]
        return min(self._tokenizer.eos_ids, default=None)

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        """Texts of the end tokens."""
        texts = sorted(self._tokenizer.control_tokens)
        ids = {text: self._tokenizer.encode(text, add_special_tokens=False) for text in texts}
        return tuple(
            text for text in texts if len(ids[text]) == 1 and ids[text][0] in self._tokenizer.eos_ids
        )

    def _chat(self, row: ChatRow, template: ChatTemplate) -> _Encoded:
        speaker = _role(row.messages[-1])
        if self._mask == "last" and speaker != "assistant":
            raise BadRowError(f"the last message is from {speaker}, not from assistant: no reply to train on")
        conversation = _Conversation(row, template, self._tokenizer, self._end_texts)
        ids = conversation.token_ids
        if not ids:
            raise BadRowError("the chat template makes no text of it")
        is_trained = [self._mask == "none"] * len(ids)
        if self._mask != "none":
            for start, end in conversation.replies(only_last=self._mask == "last"):
                is_trained[start:end] = [True] * (end - start)
        if speaker != "assistant" or self._end_id is None or self._has_end(ids):
            return _Encoded(ids, is_trained)
        # Of a template that writes no end after a reply; the model would never stop.
        self.num_ended += 1
        return _Encoded([*ids, self._end_id], [*is_trained, is_trained[-1]])

    def _has_end(self, ids: Sequence[int]) -> bool:
        """Whether the last token is an end token, whitespace behind it aside."""
        tokenizer = self._tokenizer
        for token_id in reversed(ids):
            if token_id in tokenizer.eos_ids:
                return True
            if tokenizer.is_control(token_id) or tokenizer.token_bytes(token_id).strip():
                return False
        return False


class _Conversation:
    """A chat row in its final form, and where its replies lie in it."""

    def __init__(
        self, row: ChatRow, template: ChatTemplate, tokenizer: FolderTokenizer, end_texts: tuple[str, ...]
    ) -> None:
        self._row = row
        self._template = template
        self._tokenizer = tokenizer
        self._end_texts = end_texts
        self._final = self._render(row.messages, is_prompt=False)
        self._check_calls_are_shown()
        self.token_ids = self._without_tail(tokenizer.encode_rendered(self._final))

    def _check_calls_are_shown(self) -> None:
        for index, message in enumerate(self._row.messages):
            for call in message.get("tool_calls") or ():
                name = call["function"]["name"]
                if name not in self._final.text:
                    raise BadRowError(f"the chat template leaves out messages[{index}]'s call of {name}")

    def _without_tail(self, ids: list[int]) -> list[int]:
        """Up to the last reply's end token: a few templates go on behind it, with the next turn's beginning
        or instructions, whatever they are asked for."""
        turn = len(self._row.messages) - 1
        if _role(self._row.messages[turn]) != "assistant":
            return ids
        probed = self._with_probe(turn)
        if probed is None:
            return ids
        length = len(self._final.text) - _common(self._final.text[::-1], probed.text[::-1])
        if self._is_only_end(self._final.text[length:]):
            return ids
        for i in range(self._num_tokens_of(length), len(ids)):
            if ids[i] in self._tokenizer.eos_ids:
                return ids[: i + 1]
        return ids

    def _is_only_end(self, text: str) -> bool:
        """Whether there are only end tokens and whitespace in a text."""
        for end in self._end_texts:
            text = text.replace(end, "")
        return not text.strip()

    def replies(self, *, only_last: bool) -> list[tuple[int, int]]:
        """Spans of tokens, each from a reply's first token to behind its end token and what the template
        puts there. A message of weight 0 is none of them."""
        count = len(self._row.messages)
        spans = []
        for turn in [count - 1] if only_last else range(count):
            message = self._row.messages[turn]
            if _role(message) == "assistant" and message.get("weight") != 0:
                end = self._end(turn)
                if end is not None:
                    spans.append((self._start(turn), end))
        return spans

    def _end(self, turn: int) -> int | None:
        """None for a reply that later turns have changed: the model would not have written it so."""
        if turn == len(self._row.messages) - 1:
            return len(self.token_ids)
        done = self._prefix(turn + 1)
        return None if done is None else _common(self.token_ids, self._tokenizer.encode_rendered(done))

    def _start(self, turn: int) -> int:
        if self._prefix(turn) is not None:
            prompt = self._render_or_none(self._row.messages[:turn], is_prompt=True)
            if prompt is not None:
                return _common(self.token_ids, self._tokenizer.encode_rendered(prompt))
        return self._start_of_content(turn)

    def _prefix(self, count: int) -> RenderedPrompt | None:
        """The first turns alone, if the final text begins with them."""
        rendered = self._render_or_none(self._row.messages[:count], is_prompt=False)
        return rendered if rendered is not None and self._final.text.startswith(rendered.text) else None

    def _start_of_content(self, turn: int) -> int:
        """Where the final text changes when the reply is another: for turns that no request could end in a
        reply (the first of all, two replies in a row), and templates that write the prompt otherwise once
        there is a reply. What the template puts before the reply is not trained then."""
        probed = self._with_probe(turn)
        if probed is None:
            raise BadRowError("the chat template does not show where the reply begins")
        return self._num_tokens_of(_common(self._final.text, probed.text))

    def _with_probe(self, turn: int) -> RenderedPrompt | None:
        """The conversation with another text as the content of a turn, if the template shows it."""
        messages = list(self._row.messages)
        messages[turn] = {**messages[turn], "content": _PROBE}
        probed = self._render_or_none(messages, is_prompt=False)
        return probed if probed is not None and _PROBE in probed.text else None

    def _num_tokens_of(self, length: int) -> int:
        """How many tokens of the final text lie in its first ``length`` characters."""
        controls = self._final.controls
        before = RenderedPrompt(
            self._final.text[:length],
            None if controls is None else tuple(span for span in controls if span[1] <= length),
        )
        final = self._tokenizer.encode_rendered(self._final)
        return _common(final, self._tokenizer.encode_rendered(before))

    def _render(self, messages: Sequence[dict[str, Any]], *, is_prompt: bool) -> RenderedPrompt:
        return self._template.render(messages, tools=self._row.tools, add_generation_prompt=is_prompt)

    def _render_or_none(
        self, messages: Sequence[dict[str, Any]], *, is_prompt: bool
    ) -> RenderedPrompt | None:
        try:
            return self._render(messages, is_prompt=is_prompt)
        except InvalidRequestError:
            return None


def fit(example: Example, max_length: int, rule: LongRows, bos_id: int | None) -> Example | None:
    """The example in at most ``max_length`` tokens, None where the rule is to leave it out. It may have
    nothing left to train."""
    ids, is_trained = example.token_ids, example.is_trained
    if len(ids) <= max_length:
        return example
    if rule == "skip":
        return None
    start = 0
    if rule == "keep-answer" and any(is_trained):
        first = is_trained.index(True)
        last = len(ids) - 1 - is_trained[::-1].index(True)
        start = min(max(last + 1 - max_length, 0), first - 1)
    kept_ids, kept = list(ids[start : start + max_length]), list(is_trained[start : start + max_length])
    if start and ids[0] == bos_id:
        kept_ids[0] = ids[0]
    kept[0] = False
    return Example(tuple(kept_ids), tuple(kept), example.place)


def _role(message: dict[str, Any]) -> str:
    return str(message.get("role"))


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items the two have in common at their beginning."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
