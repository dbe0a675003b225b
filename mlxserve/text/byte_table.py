"""The bytes of every token, from the ``decoder`` of a tokenizer.json.

Sources: the ``tokenizers`` file format; GPT-2's byte alphabet (the printable Latin-1 characters stand for
themselves, the other 68 bytes for U+0100 onwards); SentencePiece's ``▁`` and ``<0xNN>`` pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tokenizers import AddedToken

from mlxserve.text.detokenizer import ByteTable

_SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

TokenBytes = Callable[[str], bytes]


def build_byte_table(
    vocabulary: Mapping[str, int],
    added: Mapping[int, AddedToken],
    decoder: object,
) -> ByteTable | None:
    """``vocabulary`` includes the ``added`` tokens. None when this decoder does more than join bytes."""
    reading = _reading(decoder)
    if reading is None:
        return None
    to_bytes, leading = reading
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    for token_id, entry in added.items():
        # Added tokens are plain text in every format, never in the byte alphabet.
        data = entry.content.encode() if to_bytes is _byte_level else _pieces(entry.content)
        table[token_id] = b"" if entry.special else data
    return ByteTable(table, leading)


def _reading(decoder: object) -> tuple[TokenBytes, Literal["none", "one", "token"]] | None:
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds and set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return _byte_level, "none"
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _SPACE_MARK:
        scheme = steps[0].get(
            "prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never"
        )
        return _pieces, "none" if scheme == "never" else "token"
    if not kinds or not all(map(_is_sentencepiece_step, steps)) or "Replace" not in kinds:
        return None
    to_bytes = _pieces_with_bytes if "ByteFallback" in kinds else _pieces
    if "Strip" not in kinds:
        return to_bytes, "none"
    is_last_and_fused = kinds.index("Strip") == len(kinds) - 1 and "Fuse" in kinds
    return (to_bytes, "one") if is_last_and_fused else None


def _steps(decoder: object) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder.get("decoders", []) for step in _steps(part)]


def _is_sentencepiece_step(step: Mapping[str, Any]) -> bool:
    match step.get("type"):
        case "Replace":
            return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "
        case "Strip":
            return (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0)
        case kind:
            return kind in ("ByteFallback", "Fuse")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _pieces(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _pieces_with_bytes(token: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _pieces(token)


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + i): value for i, value in enumerate(others)
    }


_ALPHABET = _byte_alphabet()
