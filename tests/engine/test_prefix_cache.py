"""The prefix cache against an oracle: what it returns is what was stored, as long as it can be."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.engine.block_pool import BlockPool
from mlxserve.engine.prefix_cache import PrefixCache, common_prefix_length

SIZE = 4


@dataclass
class Driver:
    """Stores sequences as the scheduler does: full pages one by one, then the tail. ``content`` is what
    an engine would have written to each page."""

    num_pages: int = 64
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_pages, self.num_pages)
        self.cache = PrefixCache(self.pool, SIZE)

    def insert(self, tokens: list[int], *, with_tail: bool = True) -> bool:
        """False when no page is free (then some of it is stored, as of a sequence that was cut)."""
        node = self.cache.root()
        for start in range(0, len(tokens), SIZE):
            piece = tuple(tokens[start : start + SIZE])
            if len(piece) < SIZE and not with_tail:
                break
            page = self.pool.allocate()
            if page is None:
                return False
            self.content[page] = piece
            if len(piece) == SIZE:
                node = self.cache.insert_full(node, piece, page)
            else:
                self.cache.insert_partial(node, piece, page)
            self.pool.release(page)
        return True

    def matched(self, tokens: list[int], limit: int) -> list[int]:
        """The tokens that the matched pages really hold, as far as the match claims them; released."""
        match = self.cache.match(tokens, limit)
        held: list[int] = []
        for page in match.pages:
            assert len(self.content[page]) == SIZE
            held += self.content[page]
        if match.partial_page is not None:
            assert 0 < match.num_partial <= len(self.content[match.partial_page])
            held += self.content[match.partial_page][: match.num_partial]
            self.pool.release(match.partial_page)
        self.pool.release_all(match.pages)
        self.check()
        return held

    def check(self, held: dict[int, int] | None = None) -> None:
        self.cache.check_integrity()
        holders = dict.fromkeys(self.cache.pages(), 1)
        for page, count in (held or {}).items():
            holders[page] = holders.get(page, 0) + count
        self.pool.check_integrity(holders)


tokens_lists = st.lists(st.integers(0, 2), min_size=1, max_size=3 * SIZE + 2)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(stored=st.lists(tokens_lists, min_size=1, max_size=8), asked=tokens_lists, cut=st.integers(0, 3))
def test_match_is_the_longest_common_prefix(stored: list[list[int]], asked: list[int], cut: int) -> None:
    driver = Driver()
    for tokens in stored:
        assert driver.insert(tokens)
        driver.check()
    limit = max(len(asked) - cut, 0)
    longest = max(common_prefix_length(tokens, asked[:limit]) for tokens in stored)
    assert driver.matched(asked, limit) == asked[:longest]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("insert"), tokens_lists),
            st.tuples(st.just("match"), tokens_lists),
            st.tuples(st.just("hold"), tokens_lists),
            st.tuples(st.just("evict"), st.integers(1, 4)),
        ),
        max_size=25,
    )
)
def test_nothing_foreign_is_ever_returned_and_held_pages_stay(actions: list[tuple[str, object]]) -> None:
    driver = Driver(num_pages=12)
    held: dict[int, int] = {}
    for kind, argument in actions:
        if kind == "evict":
            assert isinstance(argument, int)
            evictable, free = driver.cache.num_evictable(), driver.pool.num_free
            freed = driver.cache.evict(argument)
            assert freed == min(argument, evictable)
            assert driver.pool.num_free == free + freed
            assert all(driver.pool.count(page) for page in held)
        elif kind == "insert":
            assert isinstance(argument, list)
            driver.insert(argument)
        else:
            assert isinstance(argument, list)
            match = driver.cache.match(argument, len(argument))
            found = [token for page in match.pages for token in driver.content[page]]
            assert found == argument[: len(found)]
            if match.partial_page is not None:
                tail = driver.content[match.partial_page][: match.num_partial]
                assert list(tail) == argument[len(found) : len(found) + match.num_partial]
                driver.pool.release(match.partial_page)
            if kind == "hold":
                for page in match.pages:
                    held[page] = held.get(page, 0) + 1
            else:
                driver.pool.release_all(match.pages)
        driver.check(held)
    for page, count in held.items():
        driver.pool.release_all([page] * count)
    driver.cache.evict(driver.num_pages)
    assert driver.pool.num_free == driver.num_pages
    assert driver.cache.num_pages == 0


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE - 1])
def test_a_full_hit_leaves_the_last_token(length: int) -> None:
    driver, tokens = Driver(), list(range(length))
    driver.insert(tokens)
    assert driver.matched(tokens, length - 1) == tokens[:-1]


def test_least_recently_used_goes_first() -> None:
    driver = Driver()
    a, b, c = [1] * SIZE, [2] * SIZE, [0] * SIZE
    for tokens in (a, b, c):
        driver.insert(tokens)
    driver.matched(a, SIZE)
    assert driver.cache.evict(1) == 1
    assert [driver.matched(tokens, SIZE) for tokens in (a, b, c)] == [a, [], c]
    assert driver.cache.evict(1) == 1
    assert [driver.matched(tokens, SIZE) for tokens in (a, c)] == [[], c]


def test_leaves_go_before_what_they_stand_on() -> None:
    driver, tokens = Driver(), list(range(3 * SIZE))
    driver.insert(tokens)
    for left in (2, 1, 0):
        assert driver.cache.evict(1) == 1
        assert driver.matched(tokens, len(tokens)) == tokens[: left * SIZE]


def test_a_page_under_a_used_one_is_not_evictable() -> None:
    driver, tokens = Driver(), list(range(2 * SIZE))
    driver.insert(tokens)
    match = driver.cache.match(tokens, len(tokens))
    assert driver.cache.num_evictable() == 0
    assert driver.cache.evict(5) == 0
    driver.pool.release_all(match.pages)
    assert driver.cache.evict(5) == 2


def test_a_longer_page_takes_the_place_of_a_tail_that_it_covers() -> None:
    driver = Driver()
    driver.insert([1, 2])
    driver.insert([1, 2, 3])
    driver.insert([1, 2, 3, 4, 5])
    driver.insert([1, 2])
    assert driver.cache.num_pages == 2
    assert driver.pool.num_free == driver.num_pages - 2


def test_equal_full_pages_are_stored_once() -> None:
    driver, tokens = Driver(), tuple(range(SIZE))
    pages = [driver.pool.allocate() for _ in range(2)]
    assert None not in pages
    nodes = [
        driver.cache.insert_full(driver.cache.root(), tokens, page) for page in pages if page is not None
    ]
    assert nodes[0] is nodes[1]
    assert nodes[1].page == pages[0]
    driver.check({page: 1 for page in pages if page is not None})


def test_clear_gives_back_all_but_what_sequences_hold() -> None:
    driver, tokens = Driver(), list(range(2 * SIZE + 1))
    driver.insert(tokens)
    match = driver.cache.match(tokens, SIZE)
    driver.cache.clear()
    assert driver.cache.num_pages == 0
    driver.check({match.pages[0]: 1})


def test_integrity_sees_planted_errors() -> None:
    driver, tokens = Driver(), list(range(2 * SIZE))
    driver.insert(tokens)
    child = driver.cache.root().children[0][0]
    child.tokens = (0,)
    with pytest.raises(AssertionError, match="a partial page has children"):
        driver.cache.check_integrity()
    child.tokens = tuple(range(SIZE))
    child.children[SIZE][0].page = child.page
    with pytest.raises(AssertionError, match="in the tree twice"):
        driver.cache.check_integrity()
    driver.cache.root().children.clear()
    with pytest.raises(AssertionError, match="counted 0 nodes, 2 are recorded"):
        driver.cache.check_integrity()
