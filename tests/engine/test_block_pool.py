"""The page pool against a dictionary of reference counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxserve.engine.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 4), spare=st.integers(0, 12))
    def create(self, size: int, spare: int) -> None:
        self.pool = BlockPool(size, size + spare)
        self.size = size
        self.held: Counter[int] = Counter()

    @rule()
    def allocate(self) -> None:
        page = self.pool.allocate()
        if page is None:
            assert len(self.held) == self.size, "a free page was not given out"
        else:
            assert 0 <= page < self.size
            assert page not in self.held, "a held page was given out again"
            self.held[page] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.retain(page)
        self.held[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.held[page] -= 1
        assert self.pool.release(page) is (self.held[page] == 0)
        if not self.held[page]:
            del self.held[page]

    @rule(data=st.data())
    def touch_a_free_page(self, data: st.DataObject) -> None:
        free = sorted(set(range(self.size)) - set(self.held))
        if free:
            page = data.draw(st.sampled_from(free))
            with pytest.raises(ValueError, match=f"page {page} is free"):
                self.pool.retain(page)
            with pytest.raises(ValueError, match=f"page {page} is free"):
                self.pool.release(page)

    @rule(wanted=st.integers(1, 5))
    def grow(self, wanted: int) -> None:
        added = self.pool.grow(wanted)
        assert added >= min(wanted, self.pool.limit - self.size)
        self.size += added
        assert self.size <= self.pool.limit

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.num_pages == self.size
            assert self.pool.num_free == self.size - len(self.held)
            self.pool.check_integrity(self.held)


PoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize(("size", "limit"), [(0, 4), (5, 4), (-1, 1)])
def test_sizes_outside_the_limit_are_refused(size: int, limit: int) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        BlockPool(size, limit)


def test_low_pages_are_used_first_and_again() -> None:
    pool = BlockPool(4, 4)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.release(1)
    assert pool.allocate() == 1


def test_integrity_sees_a_forgotten_release() -> None:
    pool = BlockPool(3, 3)
    page = pool.allocate()
    assert page is not None
    with pytest.raises(AssertionError, match=f"page {page}: counted 1 references, 0 are held"):
        pool.check_integrity({})


def test_integrity_sees_a_reference_that_was_never_counted() -> None:
    pool = BlockPool(3, 3)
    page = pool.allocate()
    assert page is not None
    with pytest.raises(AssertionError, match="counted 1 references, 2 are held"):
        pool.check_integrity({page: 2})


def test_integrity_sees_a_page_that_is_free_twice_and_one_that_is_lost() -> None:
    pool = BlockPool(3, 3)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity({})
    pool = BlockPool(3, 3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="differ"):
        pool.check_integrity({})
