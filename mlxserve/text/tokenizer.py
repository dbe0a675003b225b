"""What every tokenizer offers to the engine's callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlxserve.text.detokenizer import Detokenizer
from mlxserve.text.folder_tokenizer import FolderTokenizer, load_tokenizer
from mlxserve.text.rendered import RenderedPrompt

__all__ = ["Detokenizer", "FolderTokenizer", "RenderedPrompt", "Tokenizer", "load_tokenizer"]


class Tokenizer(Protocol):
    """Thread-safe; detokenizers that it hands out are not."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's output head may be wider."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a turn, from all sources of the model."""
        ...

    @property
    def control_tokens(self) -> frozenset[str]:
        """Texts that ``encode_rendered`` reads as control tokens where a template wrote them."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt, as for ``/v1/completions``. Text of control tokens in it is read as control
        tokens by a real tokenizer, as bytes by a scripted one."""
        ...

    def encode_rendered(self, rendered: RenderedPrompt) -> list[int]:
        """A chat prompt: exactly what the template wrote, nothing added. The template's control tokens
        become control ids, the user's own text never does."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's text in UTF-8, possibly half a character; empty for a control token."""
        ...

    def is_control(self, token_id: int) -> bool: ...

    def detokenizer(self) -> Detokenizer: ...
