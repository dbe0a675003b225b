"""What low-rank adapters add to products."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import FLOAT_TYPES, MIN_DEVICE_SIZE, SIMD_SIZE, KernelMaker
from mlxserve_kernels.metal_kernels.weights import padded, tile_rows

_PIECE = 256
_RANKS = 64
_SIMDGROUPS = 4

_INNER = """
threadgroup int list[SIMDGROUPS * ROWS];
low_rank_inner<RANK, ROWS, SIMDGROUPS>(
    x, a, slots, partial, threadgroups_per_grid.y, a_shape[1], list + simdgroup_index_in_threadgroup * ROWS,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""

_OUTER = """
threadgroup int list[SIMDGROUPS * ROWS];
threadgroup float inner[ROWS * RANKS];
low_rank_outer<RANK, ROWS, SIMDGROUPS, WIDTH>(
    partial, b, slots, scales, y, partial_shape[0], threadgroups_per_grid.y, b_shape[2], inner,
    list + simdgroup_index_in_threadgroup * ROWS, threadgroup_position_in_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class AdapterKernels:
    """Kernels made by `make`, for few rows: what finds an adapter's rows looks at all slots."""

    def __init__(self, make: KernelMaker) -> None:
        header = maker.source("members.h") + maker.source("low_rank.h")
        self._inner = make("low_rank_inner", ["x", "a", "slots"], ["partial"], _INNER, header)
        self._outer = make("low_rank_outer", ["partial", "b", "slots", "scales"], ["y"], _OUTER, header)

    def lora_delta(
        self, x: mx.array, a: mx.array, b: mx.array, slots: mx.array, scales: mx.array
    ) -> mx.array:
        """``ops.lora_delta``: row t is ``scales[s] * (x[t] @ a[s]) @ b[s]``, s = slots[t], and 0 for s = -1.

        x [T, K] of FLOAT_TYPES; a [S, K, R] and b [S, R, N] of one of FLOAT_TYPES, starting at a multiple of
        16 bytes of their buffers; slots int32 [T], from -1 to S - 1; scales float32 [S]. Returns [T, N] in
        the dtype of x; sums are float32, rounded once. An adapter is read once for each MAX_TILE_ROWS of its
        rows, not at all where it has none. Raises ValueError for other shapes and dtypes; slots are not
        looked at.
        """
        _check(x, a, b, slots, scales)
        rows, size = x.shape
        count, _, rank = a.shape
        outputs = b.shape[2]
        if not (rows and size and count and rank and outputs):
            return mx.zeros((rows, outputs), dtype=x.dtype)
        tile = tile_rows(rows)
        width = 4 if outputs % 4 == 0 else 1
        pieces = -(-size // _PIECE)
        slots = padded(slots, MIN_DEVICE_SIZE)
        shared = [("RANK", rank), ("ROWS", tile), ("SIMDGROUPS", _SIMDGROUPS)]
        threads = _SIMDGROUPS * SIMD_SIZE
        (partial,) = self._inner(
            inputs=[_large(x), _large(a), slots],
            template=shared,
            grid=(threads * -(-pieces // _SIMDGROUPS), rows, -(-rank // _columns(rank))),
            threadgroup=(threads, 1, 1),
            output_shapes=[(pieces, rows, rank)],
            output_dtypes=[mx.float32],
        )
        (y,) = self._outer(
            inputs=[_large(partial), _large(b), slots, padded(scales, MIN_DEVICE_SIZE)],
            template=[*shared, ("WIDTH", width), ("RANKS", _RANKS)],
            grid=(threads * -(-outputs // (threads * width)), rows, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, outputs)],
            output_dtypes=[x.dtype],
        )
        return y


def _check(x: mx.array, a: mx.array, b: mx.array, slots: mx.array, scales: mx.array) -> None:
    fits = x.ndim == 2 and a.ndim == b.ndim == 3 and a.shape[1] == x.shape[1]
    fits = fits and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
    if not (fits and slots.shape == x.shape[:1] and scales.shape == a.shape[:1]):
        raise ValueError(
            f"lora_delta: x {list(x.shape)}, a {list(a.shape)}, b {list(b.shape)}, slots {list(slots.shape)} "
            f"and scales {list(scales.shape)} do not fit together"
        )
    is_read = x.dtype in FLOAT_TYPES and a.dtype in FLOAT_TYPES and a.dtype == b.dtype
    if not is_read or slots.dtype != mx.int32 or scales.dtype != mx.float32:
        raise ValueError(
            f"lora_delta: no kernel for x {x.dtype}, a {a.dtype}, b {b.dtype}, slots {slots.dtype}, scales "
            f"{scales.dtype}"
        )


def _columns(rank: int) -> int:
    """RankLanes::columns of low_rank.h."""
    width = 4 if rank % 4 == 0 else 1
    lanes = -(-rank // width)
    return min(1 << (lanes - 1).bit_length(), SIMD_SIZE) * width


def _large(a: mx.array) -> mx.array:
    """With at least MIN_DEVICE_SIZE elements: zeros behind along the first axis, which add nothing."""
    return padded(a, -(-MIN_DEVICE_SIZE * a.shape[0] // a.size))
