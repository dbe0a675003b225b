"""The tokenizer of a model folder, on the ``tokenizers`` library."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from mlxserve.errors import ModelLoadError
from mlxserve.json_file import read_json_object
from mlxserve.text.byte_table import build_byte_table
from mlxserve.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    StreamDetokenizer,
    decode_with,
)
from mlxserve.text.end_tokens import collect_eos_ids, token_text
from mlxserve.text.literal_tokenizer import LiteralTokenizer, literal_tokenizer
from mlxserve.text.rendered import RenderedPrompt


def load_tokenizer(folder: Path) -> FolderTokenizer:
    """Needs ``tokenizer.json``; reads the folder's ``config.json``, ``generation_config.json`` and
    ``tokenizer_config.json`` where they exist.

    Raises ModelLoadError, naming the file, for one that is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder}: no tokenizer.json; a model folder must have one")
    spec = read_json_object(path)
    try:
        tokenizer = HfTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ModelLoadError(f"{path}: not a usable tokenizer: {' '.join(str(error).split())}") from None
    # A tokenizer.json may ask for padding or truncation, which belong to training.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return FolderTokenizer(folder, tokenizer, spec.get("decoder"))


class FolderTokenizer:
    """Satisfies the ``Tokenizer`` protocol. ``bos_text`` and ``eos_text`` are "" where there is none."""

    def __init__(self, folder: Path, tokenizer: HfTokenizer, decoder: object) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._table = build_byte_table(vocabulary, added, decoder)
        self._controls = {token_id: token.content for token_id, token in added.items() if token.special}
        self._lock = threading.Lock()
        self._literal: LiteralTokenizer | None = None
        config = read_json_object(folder / "tokenizer_config.json")
        self.bos_text = token_text(config.get("bos_token"))
        self.eos_text = token_text(config.get("eos_token"))
        self.bos_id = tokenizer.token_to_id(self.bos_text) if self.bos_text else None
        self.eos_ids = collect_eos_ids(folder, tokenizer, self._controls)
        self.control_tokens = frozenset(self._controls.values())
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt: control tokens in ``text`` are read as control tokens, as elsewhere in the field.
        ``add_special_tokens`` lets the tokenizer's own post-processor add what it adds (``<s>``), but
        never a second BOS before a text that begins with one. A lone surrogate becomes ``?``.
        """
        ids = self._tokenizer.encode(_well_formed(text), add_special_tokens=add_special_tokens).ids
        has_two = self.bos_id is not None and ids[:2] == [self.bos_id] * 2
        return ids[1:] if add_special_tokens and has_two and text.startswith(self.bos_text) else ids

    def encode_rendered(self, rendered: RenderedPrompt) -> list[int]:
        """The first prompt whose user text holds a control token's text builds a second tokenizer, once."""
        if rendered.controls is None:
            return self.encode(rendered.text, add_special_tokens=False)
        return self._literal_twin().encode(replace(rendered, text=_well_formed(rendered.text)))

    def _literal_twin(self) -> LiteralTokenizer:
        with self._lock:
            if self._literal is None:
                self._literal = literal_tokenizer(self._tokenizer, self._controls)
            return self._literal

    def decode(self, ids: Sequence[int]) -> str:
        return decode_with(self.detokenizer(), ids)

    def token_bytes(self, token_id: int) -> bytes:
        if self._table is not None:
            return self._table.get(token_id)
        return self._tokenizer.decode([token_id]).encode()

    def is_control(self, token_id: int) -> bool:
        return token_id in self._controls

    def detokenizer(self) -> Detokenizer:
        if self._table is not None:
            return ByteDetokenizer(self._table)
        return StreamDetokenizer(self._tokenizer)


def _well_formed(text: str) -> str:
    """Lone surrogates, which JSON allows, have no UTF-8; each becomes one ``?``, so spans stay right."""
    return text.encode("utf-8", "replace").decode("utf-8")
