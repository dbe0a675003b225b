"""Which pages are in tails, and what each step's tails are made of. Plain Python on ints.

Where pools cannot be written while a step is in flight, a step writes tails instead: pages outside the pools,
made anew by each step from those of the step before, so that nothing in flight changes. A page stays in a
tail while it is written, and a little longer: until enough of them are waiting to be worth a pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from mlxserve_kernels.page_rows import NO_SOURCE


class Run(Protocol):
    """Consecutive tokens of a sequence in a step: ``num_tokens`` from position ``start`` on, in ``pages``."""

    @property
    def pages(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


Piece = tuple[int, int, int, int]
"""Source, first slot, number of new rows, first row (``ops.write_tails``)."""


class TailTable:
    """Contract: a step calls ``take_closed``, then ``copy`` for each page that is to be copied, then
    ``place`` once; from then on ``entries`` are those of this step."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.rows: dict[int, int] = {}
        """The tail of each page that has one."""
        self._copied: dict[int, int] = {}
        """Entry that holds what a page is to become, until the next tails are placed."""

    def clear(self) -> None:
        self.rows.clear()
        self._copied.clear()

    def take_closed(self, runs: Sequence[Run]) -> list[tuple[int, int]]:
        """(tail, page) of what must now be stored in the pools, behind all that is in flight: the pages that
        the runs do not write, once they are half as many as those that they do. Their tails are forgotten."""
        written = {page for run in runs for page, *_ in self._writes(run)}
        closed = [(row, page) for page, row in self.rows.items() if page not in written]
        if not closed or 2 * len(closed) < len(written):
            return []
        stored = {-1 - row: page for row, page in closed}
        for page in stored.values():
            del self.rows[page]
        self._copied = {target: stored.get(entry, entry) for target, entry in self._copied.items()}
        return closed

    def copy(self, source: int, target: int) -> None:
        """``target`` becomes what ``source`` is now."""
        self._copied[target] = self._entry(source)
        self.rows.pop(target, None)

    def place(self, runs: Iterable[Run]) -> list[Piece]:
        """The tails of a step with these runs, whose tokens follow each other."""
        pieces: dict[int, Piece] = {}
        first_row = 0
        for run in runs:
            for page, slot, count in self._writes(run):
                # Behind its first slot a page holds nothing that will be read.
                is_new = slot == 0 and page not in self._copied
                pieces[page] = (NO_SOURCE if is_new else self._entry(page), slot, count, first_row)
                first_row += count
        for page in (*self._copied, *self.rows):
            if page not in pieces:
                pieces[page] = (self._entry(page), 0, 0, 0)
        self._copied.clear()
        self.rows = {page: row for row, page in enumerate(pieces)}
        return list(pieces.values())

    def entries(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Of a block table: a page itself, or ``-1 - row`` where a tail holds it."""
        rows = self.rows
        return tuple(-1 - rows[page] if page in rows else page for page in pages)

    def _entry(self, page: int) -> int:
        copied = self._copied.get(page)
        if copied is not None:
            return copied
        row = self.rows.get(page)
        return page if row is None else -1 - row

    def _writes(self, run: Run) -> Iterator[tuple[int, int, int]]:
        """Page, first slot and number of slots of each page that a run writes."""
        position, end = run.start, run.start + run.num_tokens
        while position < end:
            index, slot = divmod(position, self._page_size)
            count = min(self._page_size - slot, end - position)
            yield run.pages[index], slot, count
            position += count
