"""Scripted models: a JSON file that says which tokens a model plays back.

Keys of the file: ``replies`` (required), ``template`` (default "chatml"), ``context_length`` (default
4096), ``tool_format``, ``reasoning_format``. Keys of a reply: ``pieces`` (required), ``match`` (default
"", which matches everything), ``end`` ("eos" or "run"; default "eos"), ``delay_ms``,
``prefill_delay_ms``, ``burst``. Without ``tool_format`` the template's own format is used, as for a real
model. Any other key, or a wrong type, is a UsageError that names the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxserve.errors import InvalidRequestError, ModelLoadError, UsageError
from mlxserve.text.chat_template import BUILTIN_TEMPLATES, ChatTemplate
from mlxserve.text.scripted_tokenizer import BOS_TEXT, EOS_TEXT, FIRST_PIECE_ID, ScriptedTokenizer
from mlxserve.text.tool_parser import TOOL_FORMATS, detect_tool_format

DEFAULT_CONTEXT_LENGTH = 4096
MAX_BURST = 64
MAX_DELAY_MS = 600_000
KNOWN_TOOL_FORMATS = ("hermes", "qwen3_coder", "mistral", "llama3_json", "glm", "harmony")
KNOWN_REASONING_FORMATS = ("think", "harmony")
REASONING_FORMATS: tuple[str, ...] = ()
"""Reasoning formats whose parser this version has."""

ReplyMode = Literal["pieces", "prompt", "hash"]
ReplyEnd = Literal["eos", "run"]


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """What one request plays.

    In mode "pieces", step i plays ``pieces[i]``: token ids with equal top logits, one unless the script
    says ``any``. Mode "prompt" plays the prompt's own ids, "hash" picks each id from a hash of all
    earlier ones; ``pieces`` is empty then. ``burst`` tokens come a step.
    """

    match: str
    mode: ReplyMode = "pieces"
    pieces: tuple[tuple[int, ...], ...] = ()
    end: ReplyEnd = "eos"
    delay_s: float = 0.0
    prefill_delay_s: float = 0.0
    burst: int = 1


@dataclass(frozen=True, slots=True)
class ScriptedSpec:
    """A scripted model, ready to serve. ``id`` is the file's stem."""

    id: str
    context_length: int
    tokenizer: ScriptedTokenizer
    template: ChatTemplate
    tool_format: str | None
    reasoning_format: str | None
    replies: tuple[ScriptedReply, ...]

    def select(self, script_key: str) -> ScriptedReply:
        """The first reply whose ``match`` occurs in ``script_key``; InvalidRequestError when none does."""
        for reply in self.replies:
            if reply.match in script_key:
                return reply
        raise InvalidRequestError(f"no reply of the scripted model {self.id!r} matches the last user message")


def load_scripted(path: Path) -> ScriptedSpec:
    """Raises UsageError, one line that names file and place, for anything that is not as documented."""
    return _Reader(path).read()


class _Vocabulary:
    """Gives pieces and specials their ids in order of first appearance."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.specials: dict[int, str] = {}
        self._ids: dict[bytes | str, int] = {EOS_TEXT: 256, BOS_TEXT: 257}

    def piece(self, data: bytes) -> int:
        if data not in self._ids:
            self.pieces[self._next()] = data
            self._ids[data] = self._next() - 1
        return self._ids[data]

    def special(self, text: str) -> int:
        if text not in self._ids:
            self.specials[self._next()] = text
            self._ids[text] = self._next() - 1
        return self._ids[text]

    def _next(self) -> int:
        return FIRST_PIECE_ID + len(self.pieces) + len(self.specials)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._vocabulary = _Vocabulary()

    def read(self) -> ScriptedSpec:
        spec = self._json()
        self._keys(spec, "", "template context_length replies tool_format reasoning_format")
        context_length = self._integer(spec, "", "context_length", DEFAULT_CONTEXT_LENGTH, 1, 1 << 24)
        source = self._template_source(spec.get("template", "chatml"))
        items = spec.get("replies")
        if not isinstance(items, list) or not items:
            raise self._error("replies", "must be a list of at least one reply")
        replies = tuple(self._reply(item, f"replies[{i}]") for i, item in enumerate(items))
        tool_format = self._format(spec, "tool_format", KNOWN_TOOL_FORMATS, TOOL_FORMATS)
        tokenizer = ScriptedTokenizer(self._vocabulary.pieces, self._vocabulary.specials)
        return ScriptedSpec(
            id=self._path.stem,
            context_length=context_length,
            tokenizer=tokenizer,
            template=self._template(source, tokenizer),
            tool_format=tool_format or detect_tool_format(source),
            reasoning_format=self._format(
                spec, "reasoning_format", KNOWN_REASONING_FORMATS, REASONING_FORMATS
            ),
            replies=replies,
        )

    def _json(self) -> dict[str, Any]:
        try:
            value = json.loads(self._path.read_bytes())
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self._path}: not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise UsageError(f"{self._path}: must hold a JSON object")
        return value

    def _template_source(self, value: object) -> str:
        if isinstance(value, dict):
            self._keys(value, "template", "file")
            name = value.get("file")
            if not isinstance(name, str):
                raise self._error("template.file", f"must be a string, not {_shown(name)}")
            try:
                return (self._path.parent / name).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise self._error(
                    "template.file", f"cannot read {name}: {getattr(error, 'strerror', None) or error}"
                ) from None
        if not isinstance(value, str):
            raise self._error("template", f'must be a string or {{"file": …}}, not {_shown(value)}')
        if value in BUILTIN_TEMPLATES:
            return BUILTIN_TEMPLATES[value]
        if re.fullmatch(r"[\w.-]+", value):
            raise self._error(
                "template", f"no built-in template {value!r}; there is: {', '.join(BUILTIN_TEMPLATES)}"
            )
        return value

    def _template(self, source: str, tokenizer: ScriptedTokenizer) -> ChatTemplate:
        try:
            return ChatTemplate(
                source, bos_token=BOS_TEXT, eos_token=EOS_TEXT, control_tokens=tokenizer.control_tokens
            )
        except ModelLoadError as error:
            raise self._error("template", str(error)) from None

    def _format(
        self, spec: Mapping[str, Any], key: str, known: tuple[str, ...], supported: tuple[str, ...]
    ) -> str | None:
        if key not in spec:
            return None
        name = spec[key]
        if name in supported:
            return str(name)
        if isinstance(name, str) and name in known:
            there = ", ".join(supported) or "none"
            raise self._error(key, f"this version has no parser for {name!r}; it has: {there}")
        raise self._error(key, f"must be one of {', '.join(known)}, not {_shown(name)}")

    def _reply(self, item: object, place: str) -> ScriptedReply:
        if not isinstance(item, dict):
            raise self._error(place, f"must be an object, not {_shown(item)}")
        self._keys(item, place, "match pieces end delay_ms prefill_delay_ms burst")
        match = item.get("match", "")
        if not isinstance(match, str):
            raise self._error(f"{place}.match", f"must be a string, not {_shown(match)}")
        end = item.get("end", "eos")
        if end not in ("eos", "run"):
            raise self._error(f"{place}.end", f'must be "eos" or "run", not {_shown(end)}')
        mode, pieces = self._pieces(item.get("pieces"), f"{place}.pieces")
        if mode == "pieces" and end == "run" and not pieces:
            raise self._error(f"{place}.pieces", 'must not be empty where "end" is "run"')
        return ScriptedReply(
            match=match,
            mode=mode,
            pieces=pieces,
            end=end,
            delay_s=self._milliseconds(item, place, "delay_ms") / 1000,
            prefill_delay_s=self._milliseconds(item, place, "prefill_delay_ms") / 1000,
            burst=self._integer(item, place, "burst", 1, 1, MAX_BURST),
        )

    def _pieces(self, value: object, place: str) -> tuple[ReplyMode, tuple[tuple[int, ...], ...]]:
        if value == "prompt":
            return "prompt", ()
        if value == "hash":
            return "hash", ()
        if not isinstance(value, list):
            raise self._error(place, f'must be a list, "prompt" or "hash", not {_shown(value)}')
        return "pieces", tuple(self._step(piece, f"{place}[{i}]") for i, piece in enumerate(value))

    def _step(self, piece: object, place: str) -> tuple[int, ...]:
        if not isinstance(piece, dict) or "any" not in piece:
            return (self._piece(piece, place),)
        self._keys(piece, place, "any")
        choices = piece["any"]
        if not isinstance(choices, list) or not choices:
            raise self._error(f"{place}.any", "must be a list of at least one piece")
        ids = [self._piece(choice, f"{place}.any[{i}]") for i, choice in enumerate(choices)]
        return tuple(dict.fromkeys(ids))

    def _piece(self, piece: object, place: str) -> int:
        if isinstance(piece, str):
            return self._vocabulary.piece(self._utf8(piece, place))
        if isinstance(piece, dict) and len(piece) == 1:
            [(key, value)] = piece.items()
            if key == "hex":
                return self._vocabulary.piece(self._hex(value, f"{place}.hex"))
            if key == "special":
                if not isinstance(value, str) or not value:
                    raise self._error(f"{place}.special", f"must be a non-empty string, not {_shown(value)}")
                self._utf8(value, f"{place}.special")
                return self._vocabulary.special(value)
        raise self._error(
            place, f'must be a string, {{"hex": …}}, {{"special": …}} or {{"any": […]}}, not {_shown(piece)}'
        )

    def _hex(self, value: object, place: str) -> bytes:
        if isinstance(value, str) and re.fullmatch(r"(?:[0-9a-fA-F]{2})+", value):
            return bytes.fromhex(value)
        raise self._error(place, f"must be pairs of hexadecimal digits, not {_shown(value)}")

    def _utf8(self, text: str, place: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise self._error(place, "must not hold half of a surrogate pair") from None

    def _milliseconds(self, item: Mapping[str, Any], place: str, key: str) -> float:
        value = item.get(key, 0)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_DELAY_MS:
            return float(value)
        raise self._error(f"{place}.{key}", f"must be a number from 0 to {MAX_DELAY_MS}, not {_shown(value)}")

    def _integer(
        self, item: Mapping[str, Any], place: str, key: str, default: int, low: int, high: int
    ) -> int:
        value = item.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        where = f"{place}.{key}" if place else key
        raise self._error(where, f"must be an integer from {low} to {high}, not {_shown(value)}")

    def _keys(self, value: Mapping[str, Any], place: str, allowed: str) -> None:
        for key in value:
            if key not in allowed.split():
                where = f"{place}.{key}" if place else key
                raise self._error(where, f"unknown key; there is: {', '.join(allowed.split())}")

    def _error(self, place: str, problem: str) -> UsageError:
        return UsageError(f"{self._path}: {place}: {problem}")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."
