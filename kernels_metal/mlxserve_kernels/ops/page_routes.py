"""Writing pages with steps in flight where nothing may alias its input: into tails, or through the pools."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import metal
from mlxserve_kernels.page_rows import TOKEN_SIZE, KvPages, KvRows


def write_tails(
    rows: KvRows, pools: KvPages, tails: KvPages, pieces: mx.array, *, kv_bits: int | None = None
) -> tuple[mx.array | None, KvPages]:
    """The tails of a new step, one a piece, in their order; and q, rotated where ``rows`` have a rope.

    pieces int32 [N, 8], of numbers that are known: source, first slot, number of new rows, the first of
    these, and four that are not read. A tail is its source with rows ``first_row:first_row + num`` of k
    and v in slots ``first_slot:``. The source is a page of the pools, ``-1 - r`` for row r of the old tails,
    or NO_SOURCE: what gets no row is 0 then. Pools, old tails and rows as in ``write_pages``; all stay as
    they are, whatever is in flight.

    >>> pools, tails = (KvPages(mx.zeros((1, 1, 4, 2)), mx.zeros((1, 1, 2, 4))) for _ in range(2))
    >>> rows = KvRows(mx.ones((1, 1, 4)), mx.ones((1, 1, 4)))
    >>> pieces = mx.array([[0, 1, 1, 0, 0, 0, 0, 0]], dtype=mx.int32)
    >>> write_tails(rows, pools, tails, pieces)[1].values[0, 0].tolist()
    [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    """
    kernels = metal("write_tails" if rows.rope is None else "rope_and_write_tails")
    if kernels is None or not kernels.pages.takes(rows, pools, tails, kv_bits=kv_bits):
        return reference.write_tails(rows, pools, tails, pieces, kv_bits=kv_bits)
    return kernels.pages.write_tails(rows, pools, tails, pieces, kv_bits=kv_bits)


def write_through(
    rows: KvRows, pools: KvPages, slot_mapping: mx.array, order: mx.array, *, kv_bits: int | None = None
) -> tuple[mx.array | None, mx.array]:
    """``write_pages`` through the pools, which stay the same arrays; returns q, rotated where ``rows`` have a
    rope, and a token, int32 [8].

    Contract: what reads or writes these pages later takes the token (``paged_attention``'s ``order``), and
    ``order`` comes after all that read or wrote them before: a token, or ``order_behind`` the result of the
    step before. Raises ValueError where ``dispatch.page_route`` cannot be ``through``.
    """
    kernels = metal("write_pages" if rows.rope is None else "rope_and_write_pages")
    if kernels is None or not kernels.pages.takes(rows, pools, kv_bits=kv_bits):
        raise ValueError("write_through: no Metal kernel writes such pages")
    return kernels.pages.write_pages(rows, pools, slot_mapping, order, kv_bits=kv_bits)


def copy_through(pools: KvPages, source_ids: mx.array, target_ids: mx.array, order: mx.array) -> mx.array:
    """``copy_pages`` through the pools; order, token and errors as in ``write_through``."""
    kernels = metal("copy_pages")
    if kernels is None:
        raise ValueError("copy_through: no Metal kernel copies pages")
    return kernels.pages.copy_pages(pools, source_ids, target_ids, order)


def order_behind(result: mx.array) -> mx.array:
    """An order that comes after ``result``, an array of at least one number."""
    one = result.reshape(-1)[:1].astype(mx.int32)
    # A copy: a view of the result would be no new array for a kernel to wait for.
    return mx.contiguous(mx.broadcast_to(one, (TOKEN_SIZE,)))
