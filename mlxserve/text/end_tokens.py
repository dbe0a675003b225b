"""Which tokens end a turn: the union of everything that a model folder says about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from mlxserve.errors import ModelLoadError
from mlxserve.json_file import read_json_object
from mlxserve.text.template_source import find_template_source

END_OF_TURN_MARKERS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|eom|>",
        "<end_of_turn>",
        "<turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|return|>",
        "<|call|>",
        "<|end|>",
    }
)
"""Control tokens that by their publishers' documents end the model's turn."""

_CHANNEL_MARKERS = ("<|channel|>", "<|content|>", "<|begin|>")
"""In formats with channels, ``<|end|>`` ends one message, and the turn goes on with the next."""


def collect_eos_ids(folder: Path, tokenizer: HfTokenizer, controls: Mapping[int, str]) -> frozenset[int]:
    """``eos_token_id`` of config.json (and its ``text_config``) and generation_config.json, ``eos_token``
    of tokenizer_config.json, and every END_OF_TURN_MARKERS control token that the chat template writes.

    A token text that the vocabulary lacks can never be generated and is left out. Raises ModelLoadError
    for an ``eos_token_id`` that is neither an id nor a list of ids.
    """
    ids = {*_config_ids(folder / "config.json"), *_config_ids(folder / "generation_config.json")}
    text = token_text(read_json_object(folder / "tokenizer_config.json").get("eos_token"))
    named = tokenizer.token_to_id(text) if text else None
    return frozenset(ids | ({named} if named is not None else set()) | set(_template_ids(folder, controls)))


def token_text(value: object) -> str:
    """The text of a token entry of tokenizer_config.json: a string or an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _config_ids(path: Path) -> Iterator[int]:
    config = read_json_object(path)
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        value = part.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ModelLoadError(f"{path}: eos_token_id must be a token id or a list of them, not {value!r}")
        yield from ids


def _template_ids(folder: Path, controls: Mapping[int, str]) -> Iterator[int]:
    found = find_template_source(folder)
    if found is None:
        return
    source = found.source + (found.tools_source or "")
    has_channels = any(marker in source for marker in _CHANNEL_MARKERS)
    for token_id, text in controls.items():
        if text in END_OF_TURN_MARKERS and text in source and not (text == "<|end|>" and has_channels):
            yield token_id
