"""Ids of KV pages with reference counts. Knows nothing of tensors: the target owns the memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class BlockPool:
    """Hands out page ids ``0 .. num_pages-1`` and counts who holds each.

    A page is free exactly when its count is 0. Holders are sequences and the prefix cache; each
    calls ``retain`` once for every reference it keeps and ``release`` once when it drops it.
    ``grow`` adds pages up to ``limit``; the pool never shrinks. Not thread-safe: the engine thread
    owns it.
    """

    def __init__(self, num_pages: int, limit: int) -> None:
        if not 0 < num_pages <= limit:
            raise ValueError(f"num_pages must be in 1..limit ({limit}), got {num_pages}")
        self.limit = limit
        self._counts = [0] * num_pages
        # Taken from the end: low ids first, so that a small load touches little memory.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, page: int) -> int:
        """References that are held on ``page``."""
        return self._counts[page]

    def allocate(self) -> int | None:
        """A free page, held once by the caller; None when there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._counts[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more reference on a page that someone holds."""
        if self._counts[page] == 0:
            raise ValueError(f"page {page} is free and cannot be retained")
        self._counts[page] += 1

    def release(self, page: int) -> bool:
        """Drop one reference; True when the page became free."""
        if self._counts[page] == 0:
            raise ValueError(f"page {page} is free and cannot be released")
        self._counts[page] -= 1
        if self._counts[page]:
            return False
        self._free.append(page)
        return True

    def release_all(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.release(page)

    def grow(self, num_wanted: int) -> int:
        """Make room for ``num_wanted`` more pages by at least doubling, within the limit.

        Returns the number of pages added; the caller must grow the tensors to ``num_pages`` before
        a new page is used.
        """
        size = self.num_pages
        target = min(self.limit, max(size + num_wanted, 2 * size))
        self._counts.extend([0] * (target - size))
        self._free[:0] = range(target - 1, size - 1, -1)
        return target - size

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless counts equal ``holders`` (page -> references) and the free
        list is exactly the pages that nobody holds."""
        for page, count in enumerate(self._counts):
            held = holders.get(page, 0)
            assert count == held, f"page {page}: counted {count} references, {held} are held"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        unheld = {page for page, count in enumerate(self._counts) if count == 0}
        assert free == unheld, f"free list and counts differ: {free ^ unheld}"
