"""Attention over pages."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import extension, metal
from mlxserve_kernels.metal_kernels.attention import takes_attention
from mlxserve_kernels.ops.pages import native_bits
from mlxserve_kernels.page_rows import KvPages


def paged_attention(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    block_tables: mx.array,
    q_starts: mx.array,
    kv_lens: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    kv_bits: int | None = None,
    tails: KvPages | None = None,
    order: mx.array | None = None,
) -> mx.array:
    """Causal attention of several sequences over keys and values in pages. Returns [T, H, Dv], dtype of q.

    q [T, H, D]; pools [P, H_kv, D, page_size] and [P, H_kv, page_size, Dv], H a multiple of H_kv (head h
    reads kv head ``h // (H / H_kv)``); block_tables int32 [S, max_pages]; q_starts int32 [S + 1], from 0,
    ascending, at most T; kv_lens int32 [S].
    Rows ``q_starts[s]:q_starts[s + 1]`` belong to sequence s and are the last of its ``kv_lens[s]`` tokens:
    their keys have been written. The row at position p sees positions 0 to p, with ``window`` only the last
    ``window`` of them (p - window + 1 to p). Position j is slot ``j % page_size`` of page
    ``block_tables[s, j // page_size]``; entries and slots beyond are never read. Rows of no sequence are 0.

    A score is ``(q * scale) . k``, with ``softcap`` then ``softcap * tanh(score / softcap)``; ``sinks`` [H]
    adds one logit a head to the softmax's denominator. Softmax in float32, online over blocks of keys at
    fixed positions. Quantized pools (``kv_bits``, see ``write_pages``) stand for the float32 values that they
    hold; the extension multiplies by the integers, and by their scales once a group.

    Where steps are in flight without the extension, which takes neither: ``tails`` (``write_tails``) are
    named by entries of block_tables below 0, ``-1 - r`` for tail r; behind the token ``order`` the pools hold
    what was written through them (``write_through``).

    >>> keys, values = mx.ones((1, 1, 8, 4)), mx.ones((1, 1, 4, 8))
    >>> def index(*ids): return mx.array(ids, dtype=mx.int32)
    >>> paged_attention(
    ...     mx.ones((3, 2, 8)), keys, values, index(0).reshape(1, 1), index(0, 3), index(3), scale=1.0
    ... ).shape
    (3, 2, 8)
    """
    kernels = metal("paged_attention")
    if kernels is not None and takes_attention(q, k_pool, v_pool, kv_bits):
        if order is not None:
            # An input of the kernel comes from the token: so it runs behind what has written the pages.
            kv_lens = kv_lens + 0 * order[:1]
        return kernels.attention.paged_attention(
            q,
            k_pool,
            v_pool,
            block_tables,
            q_starts,
            kv_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            kv_bits=kv_bits,
            k_tail=None if tails is None else tails.keys,
            v_tail=None if tails is None else tails.values,
        )
    cpu = extension()
    if cpu is None:
        return reference.paged_attention(
            q,
            k_pool,
            v_pool,
            block_tables,
            q_starts,
            kv_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            kv_bits=kv_bits,
            tails=tails,
            order=order,
        )
    if tails is not None or order is not None:
        raise ValueError("paged_attention: the extension writes pages in place, it has no tails and no order")
    sinks = None if sinks is None else sinks.astype(mx.float32)
    output: mx.array = cpu.paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        q_starts,
        kv_lens,
        scale,
        window or 0,
        softcap or 0.0,
        sinks,
        native_bits(kv_bits),
    )
    return output
