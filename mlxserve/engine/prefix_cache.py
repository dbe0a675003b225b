"""Prefix reuse: a radix tree over KV pages.

A node is one page and the tokens whose keys and values it holds, after those of its ancestors. Inner
nodes are full pages; a leaf may be partly filled (the tail of a finished sequence). Two children of a
node may begin alike (they differ at some token), never be equal, and none is a prefix of another.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlxserve.engine.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class Node:
    """A cached page. The tree holds one reference on ``page``; a sequence that uses it, another."""

    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    last_used: int = 0
    children: dict[int, list[Node]] = field(default_factory=dict)
    """By the first token of the child."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a prompt is cached. The caller owns one reference on each of ``pages`` and on
    ``partial_page``, and must release them. ``partial_page`` holds ``num_partial`` more tokens of the
    prompt and then others: it must be copied before anything is written to it."""

    pages: list[int]
    node: Node
    partial_page: int | None
    num_partial: int


class PrefixCache:
    """Contract: ``match`` and ``insert`` take a sequence's tokens from its beginning. Pages held by a
    sequence are never evicted; ``evict`` frees least recently used leaves that only the tree holds."""

    def __init__(self, pool: BlockPool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._clock = 0
        self._num_nodes = 0
        self._roots: dict[int | None, Node] = {None: Node((), -1, None)}

    def root(self, adapter_id: int | None = None) -> Node:
        """Where the tokens of an adapter's sequences begin: what it caches is of no use to others."""
        return self._roots.setdefault(adapter_id, Node((), -1, None))

    @property
    def num_pages(self) -> int:
        return self._num_nodes

    def match(self, tokens: Sequence[int], limit: int, adapter_id: int | None = None) -> PrefixMatch:
        """The longest cached prefix of ``tokens[:limit]``, with its pages retained."""
        node, pages, position = self.root(adapter_id), [], 0
        while position + self._page_size <= limit:
            child = self._exact_child(node, tuple(tokens[position : position + self._page_size]))
            if child is None:
                break
            self._touch(child)
            self._pool.retain(child.page)
            pages.append(child.page)
            node, position = child, position + self._page_size
        partial, num_partial = self._best_partial(node, tokens, position, limit)
        if partial is None:
            return PrefixMatch(pages, node, None, 0)
        self._touch(partial)
        self._pool.retain(partial.page)
        return PrefixMatch(pages, node, partial.page, num_partial)

    def insert_full(self, node: Node, tokens: tuple[int, ...], page: int) -> Node:
        """Add the full page ``page`` below ``node``; returns its node.

        If these tokens are cached already, the returned node has another page, which the caller
        should use instead of its own (same bits; one copy in memory).
        """
        assert len(tokens) == self._page_size
        child = self._exact_child(node, tokens)
        if child is None:
            child = self._add(node, tokens, page)
        self._touch(child)
        return child

    def insert_partial(self, node: Node, tokens: tuple[int, ...], page: int) -> None:
        """Add a partly filled last page below ``node``, unless what is cached covers it."""
        assert 0 < len(tokens) < self._page_size
        for child in node.children.get(tokens[0], ()):
            if child.tokens[: len(tokens)] == tokens:
                self._touch(child)
                return
        self._touch(self._add(node, tokens, page))

    def evict(self, num_pages: int) -> int:
        """Free at least ``num_pages`` pages if that many can be freed; returns the number freed."""
        heap = [(leaf.last_used, id(leaf), leaf) for leaf in self._nodes() if self._is_evictable(leaf)]
        heapq.heapify(heap)
        num_freed = 0
        while heap and num_freed < num_pages:
            node = heapq.heappop(heap)[2]
            parent = node.parent
            assert parent is not None
            self._remove(node)
            num_freed += 1
            if parent.parent is not None and self._is_evictable(parent):
                heapq.heappush(heap, (parent.last_used, id(parent), parent))
        return num_freed

    def num_evictable(self, limit: int | None = None) -> int:
        """Pages that ``evict`` could free: whole subtrees that no sequence uses; counts to ``limit``."""
        # A sequence that holds a page holds all pages above it, so counts alone decide.
        evictable = (node for node in self._nodes() if self._pool.count(node.page) == 1)
        return sum(1 for _ in itertools.islice(evictable, limit))

    def clear(self) -> None:
        """Drop every node. Sequences keep their own references but must forget their nodes."""
        for node in list(self._nodes()):
            self._pool.release(node.page)
        self._roots = {None: Node((), -1, None)}
        self._num_nodes = 0

    def forget(self, adapter_id: int) -> None:
        """Drop what an adapter's sequences have cached; none of them is live."""
        root = self._roots.pop(adapter_id, None)
        if root is not None:
            for node in list(_below(root)):
                self._pool.release(node.page)
                self._num_nodes -= 1

    def pages(self) -> Iterator[int]:
        """The pages on which the tree holds a reference."""
        return (node.page for node in self._nodes())

    def check_integrity(self) -> None:
        """Raise AssertionError if the shape of the tree is not as the module says."""
        count = 0
        for node in self._nodes():
            count += 1
            assert 0 < len(node.tokens) <= self._page_size
            assert not node.children or len(node.tokens) == self._page_size, "a partial page has children"
            for first, siblings in node.children.items():
                assert siblings, "an empty list of children"
                assert all(child.parent is node and child.tokens[0] == first for child in siblings)
        assert count == self._num_nodes, f"counted {count} nodes, {self._num_nodes} are recorded"
        pages = list(self.pages())
        assert len(pages) == len(set(pages)), "a page is in the tree twice"

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def _exact_child(self, node: Node, tokens: tuple[int, ...]) -> Node | None:
        for child in node.children.get(tokens[0], ()):
            if child.tokens == tokens:
                return child
        return None

    def _best_partial(
        self, node: Node, tokens: Sequence[int], position: int, limit: int
    ) -> tuple[Node | None, int]:
        if position >= limit:
            return None, 0
        wanted = tuple(tokens[position : min(position + self._page_size, limit)])
        best, best_length = None, 0
        for child in node.children.get(wanted[0], ()):
            length = common_prefix_length(child.tokens, wanted)
            if length > best_length:
                best, best_length = child, length
        return best, best_length

    def _add(self, node: Node, tokens: tuple[int, ...], page: int) -> Node:
        siblings = node.children.setdefault(tokens[0], [])
        covered = [child for child in siblings if child.tokens == tokens[: len(child.tokens)]]
        for child in covered:
            self._remove(child)
        self._pool.retain(page)
        child = Node(tokens, page, node)
        node.children.setdefault(tokens[0], []).append(child)
        self._num_nodes += 1
        return child

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        assert not node.children
        siblings = node.parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[node.tokens[0]]
        self._pool.release(node.page)
        self._num_nodes -= 1

    def _is_evictable(self, node: Node) -> bool:
        return not node.children and self._pool.count(node.page) == 1

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from _below(root)


def _below(root: Node) -> Iterator[Node]:
    stack = [child for siblings in root.children.values() for child in siblings]
    while stack:
        node = stack.pop()
        yield node
        for siblings in node.children.values():
            stack.extend(siblings)


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of equal items at the beginning of both."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
