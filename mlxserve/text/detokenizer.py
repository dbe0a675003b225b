"""Incremental detokenizers: ids in, text out, never half a character.

Contract of all: one a request, not shared between threads; the joined results of ``push`` and the one
``finish`` equal the tokenizer's ``decode`` of all ids pushed. Control tokens give no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that is certain after this token; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is still held, an incomplete character as U+FFFD. Call once, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTable:
    """The bytes of every token id of one vocabulary, and how the first of them lose their space.

    ``leading`` "one" drops one space at the start of the text, "token" drops all spaces of the first
    token (SentencePiece's marker), "none" drops nothing.
    """

    token_bytes: Sequence[bytes]
    leading: Literal["none", "one", "token"] = "none"

    def get(self, token_id: int) -> bytes:
        """Empty for a control token and for an id outside the vocabulary."""
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings that only need to be joined."""

    __slots__ = ("_at_start", "_decoder", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = table.leading != "none"

    def push(self, token_id: int) -> str:
        data = self._table.get(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ") if self._table.leading == "one" else data.replace(b" ", b"")
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """For decoders with rules of their own (WordPiece, CTC): the library's incremental decoding."""

    __slots__ = ("_ids", "_num_sent", "_stream", "_tokenizer")

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_sent = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_sent += len(text)
        return text

    def finish(self) -> str:
        return self._tokenizer.decode(self._ids)[self._num_sent :]


def decode_with(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    """All ids through a fresh detokenizer."""
    parts = [detokenizer.push(token_id) for token_id in ids]
    parts.append(detokenizer.finish())
    return "".join(parts)
