"""A GGUF file's tokenizer as Hugging Face files: tokenizer.json, tokenizer_config.json, chat_template.jinja.

Two kinds exist in the wild. "gpt2" is byte-level BPE with ranked merges and a pre-tokenizer by name.
"llama" is SentencePiece BPE, which joins the pair whose result has the highest score; ranked merges are
rebuilt from these scores (best result first), and bytes fall back to ``<0xNN>`` tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ConversionError
from mlxserve_convert.output_folder import write_json
from mlxserve_convert.pretokenizers import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_UNLIMITED_LENGTH = 10**30
_MAX_TOKEN = 4096
"""Characters; every cut of a token is tried for merges."""
_TEMPLATE = "tokenizer.chat_template"

# Control tokens that end a turn or a text, whatever the metadata calls them.
_END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """``tokenizer`` is the content of tokenizer.json. ``eos_ids``: the file's own end token first, then
    every other token that ends a turn."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    chat_template: str | None
    named_templates: dict[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    num_tokens: int

    def write(self, folder: Path) -> None:
        tokenizer = json.dumps(self.tokenizer, ensure_ascii=False)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        write_json(folder / "tokenizer_config.json", self.config)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8", newline="")
        if self.named_templates:
            named = folder / "additional_chat_templates"
            named.mkdir()
            for name, template in self.named_templates.items():
                (named / f"{name}.jinja").write_text(template, encoding="utf-8", newline="")


def read_tokenizer(metadata: dict[str, Any], path: Path) -> GGUFTokenizer:
    """Raises ConversionError when the file has no tokenizer or one of an unknown kind."""
    return _Reader(metadata, path).read()


class _Reader:
    def __init__(self, metadata: dict[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        self._model = self._get("model")
        tokens = self._texts("tokens")
        if not tokens:
            raise ConversionError(f"{path}: has no tokenizer (tokenizer.ggml.tokens is missing)")
        longest = max(len(token) for token in tokens)
        if longest > _MAX_TOKEN:
            raise ConversionError(f"{path}: a token of {longest} characters, at most {_MAX_TOKEN} are read")
        self._tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        types = self._get("token_type")
        self._types: list[int] = types if types is not None else [_NORMAL] * len(tokens)
        if not isinstance(self._types, list) or any(type(kind) is not int for kind in self._types):
            raise ConversionError(f"{path}: tokenizer.ggml.token_type is no list of integers")
        if len(self._types) != len(tokens):
            raise ConversionError(f"{path}: {len(tokens)} tokens but {len(self._types)} token types")

    def _texts(self, key: str) -> list[str]:
        value = self._get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConversionError(f"{self._path}: tokenizer.ggml.{key} is no list of texts")
        return value

    def _template(self, key: str) -> str:
        value = self._metadata[key]
        if not isinstance(value, str):
            raise ConversionError(f"{self._path}: {key} is no text")
        return value

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def read(self) -> GGUFTokenizer:
        if self._model == "gpt2":
            tokenizer, add_bos = self._byte_level()
        elif self._model == "llama":
            tokenizer, add_bos = self._sentence_piece(), True
        else:
            raise ConversionError(
                f"{self._path}: tokenizer model {str(self._model)[:40]!r} is not supported, only: gpt2, llama"
            )
        add_bos = self._flag("add_bos_token", add_bos)
        add_eos = self._flag("add_eos_token", False)
        bos_id, eos_id = self._token_id("bos_token_id"), self._token_id("eos_token_id")
        tokenizer["added_tokens"] = list(self._added_tokens())
        tokenizer["post_processor"] = self._post_processor(
            bos_id if add_bos else None, eos_id if add_eos else None
        )
        return GGUFTokenizer(
            tokenizer=tokenizer,
            config=self._config(add_bos=add_bos, add_eos=add_eos),
            chat_template=self._template(_TEMPLATE) if _TEMPLATE in self._metadata else None,
            named_templates=self._named_templates(),
            bos_id=bos_id,
            eos_ids=self._eos_ids(eos_id),
            pad_id=self._token_id("padding_token_id"),
            num_tokens=len(self._tokens),
        )

    def _flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        return default if value is None else bool(value)

    def _token_id(self, key: str) -> int | None:
        value = self._get(key)
        if value is None or (isinstance(value, int) and value in (-1, 0xFFFFFFFF)):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self._tokens):
            raise ConversionError(
                f"{self._path}: tokenizer.ggml.{key} is {repr(value)[:40]}, the vocabulary has "
                f"{len(self._tokens)} tokens"
            )
        return value

    def _eos_ids(self, eos_id: int | None) -> tuple[int, ...]:
        found = [eos_id, self._token_id("eot_token_id"), self._token_id("eom_token_id")]
        found += [
            index
            for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if token in _END_NAMES and kind == _CONTROL
        ]
        return tuple(dict.fromkeys(index for index in found if index is not None))

    def _vocabulary(self) -> dict[str, int]:
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        if len(vocabulary) != len(self._tokens):
            twice = next(token for index, token in enumerate(self._tokens) if vocabulary[token] != index)
            raise ConversionError(f"{self._path}: token {twice!r} occurs twice in the vocabulary")
        return vocabulary

    def _byte_level(self) -> tuple[dict[str, Any], bool]:
        name = self._get("pre")
        pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre is None:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            found = (
                "no pre-tokenizer is named"
                if name is None
                else f"pre-tokenizer {str(name)[:40]!r} is not known"
            )
            raise ConversionError(f"{self._path}: {found} (tokenizer.ggml.pre), only: {known}")
        vocabulary = self._vocabulary()
        merges = [self._merge(merge, vocabulary) for merge in self._texts("merges")]
        if not merges:
            raise ConversionError(f"{self._path}: a gpt2 tokenizer needs merges (tokenizer.ggml.merges)")
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in pre.patterns
        ]
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }, pre.add_bos

    def _merge(self, merge: str, vocabulary: dict[str, int]) -> list[str]:
        # A space inside the first part cannot occur, but a part may begin with one.
        left, _, right = merge[1:].partition(" ")
        pair = [merge[:1] + left, right]
        if any(part not in vocabulary for part in (*pair, "".join(pair))):
            raise ConversionError(
                f"{self._path}: merge {merge[:100]!r} joins tokens that the vocabulary lacks"
            )
        return pair

    def _sentence_piece(self) -> dict[str, Any]:
        vocabulary = self._vocabulary()
        scores = self._get("scores")
        if scores is not None and not _are_numbers(scores):
            raise ConversionError(f"{self._path}: tokenizer.ggml.scores is no list of finite numbers")
        if scores is None or len(scores) != len(self._tokens):
            found = 0 if scores is None else len(scores)
            raise ConversionError(f"{self._path}: {len(self._tokens)} tokens but {found} scores")
        add_prefix = self._flag("add_space_prefix", True)
        unknown = self._token_id("unknown_token_id")
        has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if add_prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if add_prefix else []
        decoders = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *strip,
        ]
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else self._tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges_from_scores(self._mergeable(), scores),
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model,
        }

    def _mergeable(self) -> dict[str, int]:
        kinds = (_NORMAL, _UNUSED)
        return {
            token: index
            for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in kinds
        }

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                yield {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": kind != _USER_DEFINED,
                }

    def _post_processor(self, first: int | None, last: int | None) -> dict[str, Any] | None:
        if first is None and last is None:
            return None
        used = {self._tokens[index]: index for index in (first, last) if index is not None}

        def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
            def special(index: int | None) -> list[dict[str, Any]]:
                if index is None:
                    return []
                return [{"SpecialToken": {"id": self._tokens[index], "type_id": type_id}}]

            text = {"Sequence": {"id": sequence, "type_id": type_id}}
            return [*special(first), text, *special(last)]

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()
            },
        }

    def _config(self, *, add_bos: bool, add_eos: bool) -> dict[str, Any]:
        architecture = self._metadata.get("general.architecture")
        length = self._metadata.get(f"{architecture}.context_length")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": add_bos,
            "add_eos_token": add_eos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": length if isinstance(length, int) else _UNLIMITED_LENGTH,
        }
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        ):
            index = self._token_id(key)
            if index is not None:
                config[name] = self._tokens[index]
        return config

    def _named_templates(self) -> dict[str, str]:
        prefix = f"{_TEMPLATE}."
        named = {
            key.removeprefix(prefix): self._template(key) for key in self._metadata if key.startswith(prefix)
        }
        return {name: text for name, text in named.items() if re.fullmatch(r"[\w-]+", name)}


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item) for item in value
    )


def merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Ranked merges that act as SentencePiece's scores do: pairs with a better result come first. Pairs
    with equally good results keep the order that Hugging Face's converter gives them: longer parts first.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        local = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        local.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[index], len(left), len(right), left, right) for left, right in local]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [[left, right] for *_, left, right in found]
