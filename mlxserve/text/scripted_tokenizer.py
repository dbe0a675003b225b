"""The tokenizer of scripted models: UTF-8 bytes, two control tokens, then the script's pieces."""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.text.detokenizer import ByteDetokenizer, ByteTable, decode_with
from mlxserve.text.rendered import ControlPattern, RenderedPrompt

EOS_TEXT = "<eos>"
BOS_TEXT = "<bos>"
EOS_ID = 256
BOS_ID = 257
FIRST_PIECE_ID = 258


class ScriptedTokenizer:
    """Ids 0-255 are bytes, 256 ``<eos>``, 257 ``<bos>``, from 258 on ``pieces`` and ``specials``.

    Text encodes to bytes alone: never to a piece, and to a control token only where a template wrote
    it. ``pieces`` maps ids to bytes, ``specials`` ids to control texts; together they are dense.
    """

    def __init__(self, pieces: dict[int, bytes], specials: dict[int, str]) -> None:
        self._control_ids = {EOS_TEXT: EOS_ID, BOS_TEXT: BOS_ID} | {text: i for i, text in specials.items()}
        self._controls = frozenset(self._control_ids.values())
        self._pattern = ControlPattern.of(self._control_ids.keys())
        table = [bytes([value]) for value in range(256)] + [b"", b""]
        table += [
            pieces.get(i, b"") for i in range(FIRST_PIECE_ID, FIRST_PIECE_ID + len(pieces) + len(specials))
        ]
        self._table = ByteTable(table)

    @property
    def vocab_size(self) -> int:
        return len(self._table.token_bytes)

    @property
    def bos_id(self) -> int | None:
        return BOS_ID

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({EOS_ID})

    @property
    def control_tokens(self) -> frozenset[str]:
        return frozenset(self._control_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes; a lone surrogate becomes ``?``. No ``<bos>`` is added."""
        return list(text.encode("utf-8", "replace"))

    def encode_rendered(self, rendered: RenderedPrompt) -> list[int]:
        controls = self._pattern.spans(rendered.text) if rendered.controls is None else rendered.controls
        ids: list[int] = []
        position = 0
        for start, end in controls:
            ids += self.encode(rendered.text[position:start])
            ids.append(self._control_ids[rendered.text[start:end]])
            position = end
        return ids + self.encode(rendered.text[position:])

    def decode(self, ids: Sequence[int]) -> str:
        return decode_with(self.detokenizer(), ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.get(token_id)

    def is_control(self, token_id: int) -> bool:
        return token_id in self._controls

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer(self._table)
