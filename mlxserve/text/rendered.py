"""Rendered prompts that know which control tokens are the template's own.

A user who writes ``<|im_end|>`` in a message means these ten characters. Before rendering, every
occurrence of a control token's text in the user's strings is enclosed in two private-use characters
that the input does not contain. After rendering, enclosed occurrences are text, the others are control
tokens, and the marks are gone. The control text itself stays whole, so that templates which look for it
(``'</think>' in content``) work as they do without marks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mlxserve.errors import InvalidRequestError

_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the template wrote it.

    ``controls`` are the spans of ``text``, in order, that are control tokens. None says that no user
    string holds a control token's text, so every occurrence in ``text`` is the template's.
    """

    text: str
    controls: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class ControlPattern:
    """Finds control tokens in text: leftmost, then longest."""

    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, control_tokens: Collection[str]) -> ControlPattern:
        texts = {token for token in control_tokens if token}
        return cls(re.compile(_trie_pattern(texts)) if texts else None)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        if self.pattern is not None:
            for match in self.pattern.finditer(text):
                yield match.span()

    def occurs_in(self, value: object) -> bool:
        """Whether a control token's text occurs in any string of ``value``."""
        if self.pattern is None:
            return False
        pattern = self.pattern
        return any(pattern.search(text) for text in _strings(value))


@dataclass(frozen=True, slots=True)
class Marks:
    """One pair of marks, chosen so that neither it nor its JSON escape occurs in the input."""

    controls: ControlPattern
    opening: str
    closing: str

    @classmethod
    def for_input(cls, controls: ControlPattern, value: object) -> Marks:
        texts = [text.lower() for text in _strings(value)]
        unused = (
            chr(code)
            for code in _PRIVATE_USE
            if not any(chr(code) in text or f"\\u{code:04x}" in text for text in texts)
        )
        free = list(islice(unused, 2))
        if len(free) < 2:
            raise InvalidRequestError("the messages use every private-use character", param="messages")
        return cls(controls, free[0], free[1])

    def mark(self, value: Any) -> Any:
        """A copy of ``value`` with each control text in its strings, keys included, enclosed."""
        if isinstance(value, str):
            if self.controls.pattern is None:
                return value
            return self.controls.pattern.sub(lambda m: f"{self.opening}{m[0]}{self.closing}", value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(item) for item in value]
        return value

    def unmark(self, text: str) -> str:
        return text.replace(self.opening, "").replace(self.closing, "")

    def read(self, rendered: str) -> RenderedPrompt:
        """Take the marks out of ``rendered``; what they do not enclose is the template's."""
        rendered = self._unescaped(rendered)
        parts: list[str] = []
        controls: list[tuple[int, int]] = []
        length = position = 0
        for start, end in self.controls.spans(rendered):
            before = self.unmark(rendered[position:start])
            token = rendered[start:end]
            parts += (before, token)
            length += len(before) + len(token)
            if not (rendered.endswith(self.opening, 0, start) and rendered.startswith(self.closing, end)):
                controls.append((length - len(token), length))
            position = end
        parts.append(self.unmark(rendered[position:]))
        return RenderedPrompt("".join(parts), tuple(controls))

    def _unescaped(self, rendered: str) -> str:
        """Undo the JSON escapes of a template that asks for ASCII."""
        for mark in (self.opening, self.closing):
            rendered = re.sub(rf"\\u{ord(mark):04x}", mark, rendered, flags=re.IGNORECASE)
        return rendered


def _trie_pattern(texts: set[str]) -> str:
    """One pattern for all texts, longest first. Shared beginnings are tried once: a vocabulary may have
    thousands of control tokens that begin with ``<``, and user text many ``<``."""
    if texts == {""}:
        return ""
    by_first: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_first.setdefault(text[0], set()).add(text[1:])
    branches = [re.escape(first) + _trie_pattern(rest) for first, rest in sorted(by_first.items())]
    if len(branches) == 1 and "" not in texts:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _strings(item)
