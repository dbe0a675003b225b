"""Preprocessed text as tokens that know their file and line, and ways to move about in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from metal_on_host.errors import MetalSourceError

_TOKEN = re.compile(
    r"""(?P<marker>^[ \t]*\#[^\n]*)
      | (?P<space>\s+)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<string>"(?:\\.|[^"\\])*")
      | (?P<char>'(?:\\.|[^'\\])*')
      | (?P<op>::|->|\.)
      | (?P<punct>.)""",
    re.VERBOSE | re.MULTILINE,
)
_MARKER = re.compile(r'\s*#\s*(?:line\s+)?(\d+)\s+"((?:\\.|[^"\\])*)"')
_OPEN = {"(": ")", "[": "]", "{": "}", "<": ">"}


@dataclass(slots=True)
class Token:
    kind: str
    text: str
    line: int
    file: str


def tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    line, file = 1, "<source>"
    for match in _TOKEN.finditer(text):
        kind, part = match.lastgroup or "punct", match.group()
        tokens.append(Token(kind, part, line, file))
        marker = _MARKER.match(part) if kind == "marker" else None
        if marker:
            line, file = int(marker.group(1)) - 1, marker.group(2)
        line += part.count("\n")
    return tokens


class TokenText:
    """A token list that is edited in place: a removed token keeps its line breaks."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens

    # Moving about: significant tokens only, brackets matched.

    def _next(self, i: int) -> int:
        i += 1
        while i < len(self.tokens) and (
            self.tokens[i].kind in ("space", "marker") or not self.tokens[i].text
        ):
            i += 1
        return i

    def _previous(self, i: int) -> int:
        i -= 1
        while i >= 0 and (self.tokens[i].kind in ("space", "marker") or not self.tokens[i].text):
            i -= 1
        return i

    def _at(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def _close(self, i: int) -> int:
        """The index of the bracket that closes the one at `i`."""
        opening, closing = self._at(i), _OPEN[self._at(i)]
        depth = 0
        angle = opening == "<"
        while i < len(self.tokens):
            text = self.tokens[i].text
            if angle and text in ("(", "["):
                i = self._close(i)
            elif text == opening:
                depth += 1
            elif text == closing:
                depth -= 1
                if depth == 0:
                    return i
            i += 1
        raise MetalSourceError(f"unbalanced {opening}")

    def _blank(self, start: int, end: int) -> None:
        """Removes tokens but keeps their line breaks."""
        for token in self.tokens[start:end]:
            if token.kind == "space":
                token.text = "\n" * token.text.count("\n") or " "
            elif token.kind != "marker":
                token.text = ""

    def _text(self, start: int, end: int) -> str:
        parts = (" " if t.kind in ("space", "marker") else t.text for t in self.tokens[start:end])
        return re.sub(r"\s+", " ", "".join(parts)).strip()

    def _names(self, name: str) -> Iterator[int]:
        return (i for i, token in enumerate(self.tokens) if token.kind == "name" and token.text == name)

    def _split(self, start: int, end: int) -> list[tuple[int, int]]:
        """Top-level comma separated ranges."""
        parts, begin, i = [], start, start
        while i < end:
            text = self.tokens[i].text
            if text in ("(", "[", "{") or (text == "<" and self.tokens[self._previous(i)].kind == "name"):
                i = self._close(i)
            elif text == ",":
                parts.append((begin, i))
                begin = i + 1
            i += 1
        if self._text(begin, end):
            parts.append((begin, end))
        return parts

    def _where(self, i: int) -> str:
        return f"{self.tokens[i].file}:{self.tokens[i].line}"

    def _open(self, i: int) -> int:
        """The index of the parenthesis that the one at `i` closes."""
        depth = 0
        while i >= 0:
            depth += (self._at(i) == ")") - (self._at(i) == "(")
            if depth == 0:
                return i
            i -= 1
        raise MetalSourceError("unbalanced )")
