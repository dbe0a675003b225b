"""A twin of a tokenizer for which the published texts of control tokens are ordinary text.

In the twin every control token has another, unguessable name. A prompt whose own control tokens are
written by those names, and whose user text is left as it is, encodes in one pass with the tokenizer's own
normalization, and the user's ``<|im_end|>`` is ten characters.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from mlxserve.text.rendered import RenderedPrompt


@dataclass(frozen=True, slots=True)
class LiteralTokenizer:
    tokenizer: HfTokenizer
    names: Mapping[str, str]

    def encode(self, rendered: RenderedPrompt) -> list[int]:
        """``rendered.controls`` must be set."""
        parts: list[str] = []
        position = 0
        for start, end in rendered.controls or ():
            parts += (rendered.text[position:start], self.names[rendered.text[start:end]])
            position = end
        parts.append(rendered.text[position:])
        return self.tokenizer.encode("".join(parts), add_special_tokens=False).ids


def literal_tokenizer(tokenizer: HfTokenizer, controls: Mapping[int, str]) -> LiteralTokenizer:
    """Costs as much time and memory as loading the tokenizer again."""
    nonce = secrets.token_hex(8)
    names = {text: f"\ue000{nonce}.{token_id}\ue001" for token_id, text in controls.items()}
    spec = json.loads(tokenizer.to_str())
    for added in spec["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    spec["post_processor"] = None
    _rename_model(spec["model"], names)
    return LiteralTokenizer(HfTokenizer.from_str(json.dumps(spec)), names)


def _rename_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in names:
        model["unk_token"] = names[unknown]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]


def _touches(merge: str | list[str], names: Mapping[str, str]) -> bool:
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first in names or second in names or first + second in names
