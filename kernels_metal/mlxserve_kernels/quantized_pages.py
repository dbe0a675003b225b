"""Quantized KV pools: sizes, and rows of keys and values to bytes and back in plain mlx ops.

A pool is one uint8 array [P, H, bytes]. The bytes of a page and head are the integers of its rows, then
float32 scales, then, with 4 bits, float32 biases: one of each for ``GROUP_SIZE`` values of a row. Values are
stored row by row; keys transposed, integer (or scale) i of all rows of the page side by side. A value x of a
group:

8 bits  ``scale = max(|x|) / 127``, ``q = round(x / scale)`` from -127 to 127, one signed byte. It is read as
        ``q * scale``
4 bits  ``bias = min(x)``, ``scale = (max(x) - bias) / 15``, ``q = round((x - bias) / scale)`` from 0 to 15.
        It is read as ``q * scale + bias``. Byte i of a group holds value i low, value i + 16 high

All steps are float32, rounded to nearest, ties to even; where the scale is 0 it divides by 1. A group that
holds a NaN or an infinity, or whose ``max - min`` overflows at 4 bits, has NaN as scale and bias: all of it
is NaN.
"""

from __future__ import annotations

import mlx.core as mx

KV_BITS = (8, 4)
GROUP_SIZE = 32
PAGE_UNIT = 16
"""Page sizes are multiples of this."""


def row_bytes(dim: int, kv_bits: int) -> int:
    """Bytes of one row of ``dim`` values. ValueError for bits or a dim that pools cannot have."""
    if kv_bits not in KV_BITS:
        raise ValueError(f"kv_bits must be 8 or 4, got {kv_bits}")
    if dim < 1 or dim % GROUP_SIZE:
        raise ValueError(f"quantized pools need a D that is a multiple of {GROUP_SIZE}, got {dim}")
    return dim * kv_bits // 8 + dim // GROUP_SIZE * (4 if kv_bits == 8 else 8)


def head_bytes(dim: int, page_size: int, kv_bits: int) -> int:
    """Bytes of the last axis of a pool. ValueError for sizes that pools cannot have."""
    if page_size < 1 or page_size % PAGE_UNIT:
        raise ValueError(
            f"quantized pools need a page size that is a multiple of {PAGE_UNIT}, got {page_size}"
        )
    return page_size * row_bytes(dim, kv_bits)


def page_size_of(pool: mx.array, dim: int, kv_bits: int) -> int:
    """Rows of a page of a pool whose rows have ``dim`` values. Raises ValueError where it is no such pool."""
    if pool.dtype != mx.uint8 or pool.ndim != 3:
        raise ValueError("with kv_bits pools must be uint8 [pages, heads, bytes]")
    page_size = pool.shape[2] // row_bytes(dim, kv_bits)
    if head_bytes(dim, page_size, kv_bits) != pool.shape[2]:
        raise ValueError(f"a pool has {pool.shape[2]} bytes a head, no number of rows of D {dim}")
    return page_size


def pack_rows(x: mx.array, kv_bits: int) -> mx.array:
    """Rows [..., D] as uint8 [..., row_bytes]: integers, scales, biases."""
    row_bytes(x.shape[-1], kv_bits)
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, GROUP_SIZE)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    span = mx.abs(groups).max(axis=-1, keepdims=True) if kv_bits == 8 else high - low
    is_finite = mx.all(mx.isfinite(groups), axis=-1, keepdims=True) & mx.isfinite(span)
    scale = mx.where(is_finite, span / (127.0 if kv_bits == 8 else 15.0), mx.nan)
    divisor = mx.where(is_finite & (scale != 0), scale, 1.0)
    shifted = mx.where(is_finite, groups if kv_bits == 8 else groups - low, 0.0)
    least, most = (-127, 127) if kv_bits == 8 else (0, 15)
    q = mx.round(mx.clip(shifted / divisor, least, most))
    parts = [q.astype(mx.int8).view(mx.uint8), scale.view(mx.uint8)]
    if kv_bits == 4:
        nibbles = q.astype(mx.uint8)
        parts[0] = nibbles[..., :16] | (nibbles[..., 16:] << 4)
        parts.append(mx.where(is_finite, low, mx.nan).view(mx.uint8))
    return mx.concatenate([part.flatten(-2, -1) for part in parts], axis=-1)


def unpack_rows(rows: mx.array, dim: int, kv_bits: int) -> mx.array:
    """The float32 values [..., D] that ``pack_rows`` stored."""
    groups = dim // GROUP_SIZE
    integers, scales, biases = mx.split(rows, [dim * kv_bits // 8, dim * kv_bits // 8 + groups * 4], axis=-1)
    shape = (*rows.shape[:-1], groups, -1)
    scale = mx.contiguous(scales).view(mx.float32)[..., None]
    if kv_bits == 8:
        values = mx.contiguous(integers).view(mx.int8).reshape(shape).astype(mx.float32) * scale
    else:
        pairs = integers.reshape(shape)
        q = mx.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(mx.float32)
        values = q * scale + mx.contiguous(biases).view(mx.float32)[..., None]
    return values.flatten(-2, -1)


def byte_places(rows: mx.array, dim: int, page_size: int, kv_bits: int, *, is_keys: bool) -> mx.array:
    """Where the bytes of ``pack_rows`` go: for rows int32 [...] of a page, indices [..., row_bytes] into the
    bytes of a page and head."""
    scales = (dim // GROUP_SIZE, 4)
    sections = [(dim * kv_bits // 8, 1), scales] if kv_bits == 8 else [(dim // 2, 1), scales, scales]
    places, begin = [], 0
    for count, size in sections:
        items = mx.arange(count)
        at = items * page_size + rows[..., None] if is_keys else rows[..., None] * count + items
        places.append((begin + at[..., None] * size + mx.arange(size)).flatten(-2, -1))
        begin += count * size * page_size
    return mx.concatenate(places, axis=-1)


def write_rows(
    pool: mx.array, x: mx.array, slots: mx.array, page_size: int, kv_bits: int, *, is_keys: bool
) -> mx.array:
    """``x`` [T, H, D] into their slots; the pool's new handle. ValueError where it has another page size."""
    dim = x.shape[-1]
    if pool.shape[2] != (size := head_bytes(dim, page_size, kv_bits)):
        raise ValueError(
            f"a pool has {pool.shape[2]} bytes a head, "
            f"{page_size} rows of D {dim} in {kv_bits} bits are {size}"
        )
    pages = slots // page_size
    places = byte_places(slots % page_size, dim, page_size, kv_bits, is_keys=is_keys)
    pool[pages[:, None], :, places] = pack_rows(x, kv_bits).swapaxes(1, 2)
    return pool


def read_pages(pool: mx.array, dim: int, kv_bits: int, *, is_keys: bool) -> mx.array:
    """All of a pool as float32 [P, H, page_size, D], of keys too.

    >>> pool = mx.zeros((1, 1, head_bytes(32, 16, 8)), dtype=mx.uint8)
    >>> read_pages(pool, 32, 8, is_keys=True).shape
    (1, 1, 16, 32)
    """
    page_size = page_size_of(pool, dim, kv_bits)
    places = byte_places(mx.arange(page_size), dim, page_size, kv_bits, is_keys=is_keys)
    return unpack_rows(pool[:, :, places], dim, kv_bits)
