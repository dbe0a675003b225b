"""Keys and values in pages."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension, metal


def write_pages(
    k_pool: mx.array,
    v_pool: mx.array,
    k: mx.array,
    v: mx.array,
    slot_mapping: mx.array,
    *,
    kv_bits: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Write rows of keys and values to their slots; returns the pools' new handles.

    k_pool [P, H, D, page_size], v_pool [P, H, page_size, Dv]: two buffers, contiguous, never the same;
    k [T, H, D], v [T, H, Dv]: converted to the pool's dtype; slot_mapping int32 [T]: row t goes to page
    ``slot // page_size``, slot ``slot % page_size``. Slots of one call must differ from each other.
    With ``kv_bits`` 8 or 4 the pools are uint8 [P, H, bytes] (see ``quantized_pages``), D and Dv multiples of
    32, page_size one of 16: each row is rounded alone, so what it becomes depends on nothing beside it.

    Contract: from here on only the new handles are read. With the extension they share the pools' memory
    and a reader scheduled earlier sees the old content, one scheduled later the new: steps may be in flight.
    ``reference`` writes in place only while nothing else holds the pools (see supports_steps_in_flight).

    >>> pool = mx.zeros((2, 1, 4, 1))
    >>> row = mx.ones((1, 1, 1))
    >>> keys, _ = write_pages(pool, mx.zeros((2, 1, 4, 1)), row, row, mx.array([6], dtype=mx.int32))
    >>> keys[1, 0].tolist()
    [[0.0], [0.0], [1.0], [0.0]]
    """
    cpu = extension()
    if cpu is None:
        return reference.write_pages(k_pool, v_pool, k, v, slot_mapping, kv_bits=kv_bits)
    bits = native_bits(kv_bits)
    written: tuple[mx.array, mx.array] = cpu.write_pages(k_pool, v_pool, k, v, slot_mapping, bits)
    return written


def rope_and_write_pages(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    positions: mx.array,
    slot_mapping: mx.array,
    *,
    rope: Rope | None,
    kv_bits: int | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Turn queries and keys by their positions and write keys and values to their slots, as ``write_pages``
    does; returns the queries and the pools' new handles.

    q [T, H, D], k [T, H_kv, D], v [T, H_kv, Dv]; positions, slot_mapping int32 [T]; ``rope`` None turns
    nothing. The contract of ``write_pages`` holds.
    """
    if rope is not None:
        q, k = rotate(q, positions, rope), rotate(k, positions, rope)
    return q, *write_pages(k_pool, v_pool, k, v, slot_mapping, kv_bits=kv_bits)


def rotate(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    """Heads [T, H, D], each turned by the position of its row: int32 [T]."""
    kernels = metal("rope")
    if kernels is None or x.dtype not in FLOAT_TYPES:
        return reference.rotate(x, positions, rope)
    return kernels.pages.rotate(x, positions, rope)


def copy_pages(
    k_pool: mx.array, v_pool: mx.array, source_ids: mx.array, target_ids: mx.array
) -> tuple[mx.array, mx.array]:
    """Copy whole pages (copy-on-write); returns the pools' new handles, as ``write_pages`` does.

    source_ids, target_ids int32 [C]. No target may be a source or another target of the same call.

    >>> pool, other = mx.array([1.0, 2.0]).reshape(2, 1, 1, 1), mx.zeros((2, 1, 1, 1))
    >>> first, second = mx.array([0], dtype=mx.int32), mx.array([1], dtype=mx.int32)
    >>> copy_pages(pool, other, first, second)[0].flatten().tolist()
    [1.0, 1.0]
    """
    cpu = extension()
    if cpu is None:
        return reference.copy_pages(k_pool, v_pool, source_ids, target_ids)
    copied: tuple[mx.array, mx.array] = cpu.copy_pages(k_pool, v_pool, source_ids, target_ids)
    return copied


def resize_rows(a: mx.array, num_rows: int) -> mx.array:
    """A copy of the first ``num_rows`` of a [N, ...], zeros behind where N is smaller; evaluated. The
    extension puts it into large pages, which are read faster from end to end: for weights and pools.

    >>> resize_rows(mx.array([1.0, 2.0]), 3).tolist()
    [1.0, 2.0, 0.0]
    """
    cpu = extension()
    resized: mx.array = reference.resize_rows(a, num_rows) if cpu is None else cpu.resize_rows(a, num_rows)
    mx.eval(resized)
    return resized


def native_bits(kv_bits: int | None) -> int:
    """For the extension, where 0 stands for pools of floats."""
    if kv_bits == 0:
        raise ValueError("kv_bits must be 8 or 4, got 0")
    return kv_bits or 0
