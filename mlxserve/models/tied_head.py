"""Whether a model's head is its embedding: what the files hold decides, as in a conversion.

mlx-lm believes config.json, or a default of its own that differs from family to family, and then leaves a
head in the files out without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxserve.models.safetensors_file import SourceTensor

_TIE = "tie_word_embeddings"
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"
_PARTS = ("weight", "scales", "biases")
_CHUNK_BYTES = 4 << 20


def settle_tie(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor]) -> dict[str, Any]:
    """The fields of ``config`` to set: ``tie_word_embeddings``, and ``text_config`` where there is one.

    No flag: tied if the files have no head. Tied with another head in the files than the embedding: not
    tied. Empty where nothing changes, and for files without one embedding.
    """
    heads, embeddings = _modules(tensors, _HEAD), _modules(tensors, _EMBEDDING)
    if len(embeddings) != 1 or len(heads) > 1:
        return {}
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else {}
    given = [place[_TIE] for place in (text, config) if place.get(_TIE) is not None]
    flag = bool(given[0]) if given else not heads
    if flag and heads and not _same_module(tensors, heads[0], embeddings[0]):
        flag = False
    if given and all(bool(value) == flag for value in given) and (not text or text.get(_TIE) is not None):
        return {}
    return {_TIE: flag, "text_config": {**text, _TIE: flag}} if text else {_TIE: flag}


def _modules(tensors: Mapping[str, SourceTensor], kind: str) -> list[str]:
    names = (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    return [name for name in names if name.rpartition(".")[2] == kind]


def _same_module(tensors: Mapping[str, SourceTensor], first: str, second: str) -> bool:
    pairs = [(tensors.get(f"{first}.{part}"), tensors.get(f"{second}.{part}")) for part in _PARTS]
    return all(_same_bytes(a, b) for a, b in pairs if a is not None or b is not None)


def _same_bytes(first: SourceTensor | None, second: SourceTensor | None) -> bool:
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as file, second.file.open("rb") as other:
        file.seek(first.offset)
        other.seek(second.offset)
        for start in range(0, first.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, first.num_bytes - start)
            if file.read(size) != other.read(size):
                return False
    return True
