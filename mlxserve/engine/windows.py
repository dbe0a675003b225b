"""A text as windows for scoring: which tokens a model sees together, and which of them count.

Windows of ``context`` tokens begin every ``stride`` tokens. Each begins with what the tokenizer puts before
a text (a BOS, say), which never counts. A token counts once, in the first window that has it, so all but
those of the first window are seen behind at least ``context - stride`` others. The text's first token never
counts: not every model has something before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.errors import UsageError

DEFAULT_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Window:
    """Row ``first_row + i`` of the logits of ``token_ids`` predicts ``targets[i]``."""

    token_ids: tuple[int, ...]
    first_row: int
    targets: tuple[int, ...]


def make_windows(prefix: Sequence[int], token_ids: Sequence[int], context: int, stride: int) -> list[Window]:
    """Raises UsageError for a context or stride that is out of range, and for a text of under two tokens."""
    if context < len(prefix) + 2:
        raise UsageError(f"a context of {context} tokens is too short, at least {len(prefix) + 2} are needed")
    room = context - len(prefix)
    if not 1 <= stride < room:
        raise UsageError(f"the stride must be from 1 to {room - 1} with a context of {context}, not {stride}")
    if len(token_ids) < 2:
        raise UsageError(f"a text of {len(token_ids)} tokens cannot be scored, at least 2 are needed")
    windows = []
    start, scored = 0, 1
    while scored < len(token_ids):
        stop = min(start + room, len(token_ids))
        # The last token predicts nothing that counts.
        inputs = (*prefix, *token_ids[start : stop - 1])
        first_row = len(prefix) + scored - start - 1
        windows.append(Window(inputs, first_row, tuple(token_ids[scored:stop])))
        start, scored = start + stride, stop
    return windows
