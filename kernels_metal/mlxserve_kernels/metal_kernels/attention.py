"""Paged attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve_kernels import quantized_pages
from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import (
    FLOAT_TYPES,
    MAX_THREADS,
    MIN_DEVICE_SIZE,
    SIMD_SIZE,
    KernelMaker,
)
from mlxserve_kernels.metal_kernels.weights import padded

SPLIT_KEYS = 256
"""Keys of a split (split_keys in attention.h): where a context is cut, whatever its length."""
THREADS = 128
"""Threads of a tile: 4 simdgroups."""
KEY_UNIT = 8
"""A lane reads as many neighbouring keys at once."""
MAX_THREADGROUP_BYTES = 32768
MAX_PART_VALUES = 1 << 25
"""Splits are merged by a second kernel only where their sums of values are no more."""

_INPUTS = ["q", "k_pool", "v_pool", "k_tail", "v_tail", "block_tables", "q_starts", "kv_lens", "params"]

_TILE = """
typedef Tile<T, KV, BITS, D, DV, PAGE, HEADS, TOKENS, ROW_TILES, WINDOW, HAS_SOFTCAP, HAS_TAIL> TileType;
threadgroup T queries[TileType::Memory::queries];
threadgroup float maxima[TileType::Memory::stats], sums[TileType::Memory::stats];
threadgroup float partial[TileType::Memory::partial];
const AttentionMemory<T> memory = {queries, maxima, sums, partial};
const AttentionInputs<T, KV> in = {
    q, k_pool, v_pool, k_tail, v_tail, block_tables, q_starts, kv_lens, params,
    q_shape[0], q_shape[1], k_pool_shape[1], block_tables_shape[0], block_tables_shape[1]};
"""
_ATTEND_TILE = (
    _TILE
    + """
attend_tile<TileType, T, KV, DV, HEADS, TOKENS, HAS_SINKS>(
    in, memory, sinks, out, threadgroup_position_in_grid, thread_index_in_threadgroup);
"""
)
_ATTEND_SPLIT = (
    _TILE
    + """
attend_split<TileType, T, KV, DV, HEADS, TOKENS>(
    in, memory, part_sums, part_stats, threadgroup_position_in_grid, thread_index_in_threadgroup);
"""
)
_MERGE_SPLITS = """
merge_splits<T, Values<KV, BITS, DV, PAGE>, DV, WINDOW, HAS_SINKS>(
    part_sums, part_stats, q_starts, kv_lens, sinks, out,
    block_tables_shape[0], part_sums_shape[1], part_sums_shape[2], thread_position_in_grid);
"""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes of a call that do not change from step to step."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    page: int
    bits: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def num_columns(self) -> int:
        """Of part sums: those of whole blocks of values (Values::width in attention_pages.h)."""
        wide = {0: 1, 8: 2 if self.value_dim % 64 == 0 else 1, 4: 4 if self.value_dim % 128 == 0 else 2}
        width = SIMD_SIZE * wide[self.bits]
        return -(-self.value_dim // width) * width

    def row_tiles(self, dtype: mx.Dtype, *, is_decode: bool) -> int:
        """8-row tiles of a threadgroup: as few as hold a token's heads, or 4 (2 where memory is short)."""
        most = 4 if _memory_bytes(self.dim, 4, dtype) <= MAX_THREADGROUP_BYTES else 2
        return min(-(-self.group // 8), most) if is_decode else most


def _memory_bytes(dim: int, row_tiles: int, dtype: mx.Dtype) -> int:
    """Threadgroup memory of a tile (TileMemory in attention.h)."""
    rows = 8 * row_tiles
    return rows * (-(-dim // 8) * 8 + 8) * dtype.size + (2 * 4 * rows + 4 * rows * 32) * 4


class AttentionKernels:
    """Kernels made by `make`.

    `split_below`: chunks of fewer threadgroups than that get one for each split, as single rows do. A row's
    bits do not depend on it.
    """

    def __init__(self, make: KernelMaker) -> None:
        self.split_below = 256
        header = "".join(maker.source(f"attention{part}.h") for part in ("_pages", "_splits", "", "_kernels"))
        self._attend_tile = make("attend_tile", [*_INPUTS, "sinks"], ["out"], _ATTEND_TILE, header)
        self._attend_split = make("attend_split", _INPUTS, ["part_sums", "part_stats"], _ATTEND_SPLIT, header)
        self._merge_splits = make(
            "merge_splits",
            ["part_sums", "part_stats", "block_tables", "q_starts", "kv_lens", "sinks"],
            ["out"],
            _MERGE_SPLITS,
            header,
        )

    def paged_attention(
        self,
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
        k_tail: mx.array | None = None,
        v_tail: mx.array | None = None,
    ) -> mx.array:
        """``ops.paged_attention``, with open pages beside the pools. Returns [T, H, Dv] in the dtype of q.

        Shapes, dtypes and meaning are those of ``ops.paged_attention``; the page size is a multiple of 8 (of
        16 with ``kv_bits``), q has a dtype of FLOAT_TYPES. ``k_tail`` and ``v_tail`` are laid out as pools
        are: entry e < 0 of a block table is their page -1 - e. Without them entries that are read must not be
        negative. Arrays are contiguous, or are copied.

        A row's bits depend on its own query, keys and values alone: not on the batch, chunks, placement or
        page size, nor on which kernel runs. With one row a sequence (T == S) a threadgroup takes a split of
        256 keys of one row, and a second kernel merges; else one takes a tile of rows and all of their
        splits.
        The output ``part_sums`` of the first, and ``part_stats``, are written only where a row has a split.

        Raises ValueError for wrong shapes and dtypes.
        """
        shape = _checked(q, k_pool, v_pool, kv_bits)
        _check_indices(block_tables, q_starts, kv_lens)
        has_tail = _check_tails(k_pool, v_pool, k_tail, v_tail)
        if sinks is not None and sinks.shape != (shape.heads,):
            raise ValueError(f"paged_attention: sinks must be [{shape.heads}], got {list(sinks.shape)}")
        if window is not None and window < 1:
            raise ValueError(f"paged_attention: window must be at least 1, got {window}")
        num_tokens, num_sequences = q.shape[0], kv_lens.shape[0]
        if not num_tokens or not num_sequences:
            return mx.zeros((num_tokens, shape.heads, shape.value_dim), dtype=q.dtype)

        is_decode = num_tokens == num_sequences
        row_tiles = shape.row_tiles(q.dtype, is_decode=is_decode)
        heads = min(shape.group, 8 * row_tiles)
        tokens = 1 if is_decode else 8 * row_tiles // heads
        head_tiles = shape.kv_heads * -(-shape.group // heads)
        num_splits = -(-block_tables.shape[1] * shape.page // SPLIT_KEYS)
        tiles = num_tokens if tokens == 1 else num_tokens // tokens + num_sequences + 1
        # Four at least: smaller arrays would come to the second kernel in another address space.
        part_shape = (max(num_splits, 4), num_tokens, shape.heads)
        is_split = (
            num_splits > 1
            and math.prod(part_shape) * shape.num_columns <= MAX_PART_VALUES
            and (is_decode or tiles * head_tiles < self.split_below)
        )

        params = mx.array([scale, softcap or 1.0, *[0.0] * 6], dtype=mx.float32)
        tables, starts, lengths = (
            _padded_columns(block_tables),
            padded(q_starts, MIN_DEVICE_SIZE),
            padded(kv_lens, MIN_DEVICE_SIZE),
        )
        logits = params if sinks is None else padded(sinks.astype(mx.float32), MIN_DEVICE_SIZE)
        inputs = [q, k_pool, v_pool, k_tail if has_tail else k_pool, v_tail if has_tail else v_pool]
        inputs += [tables, starts, lengths, params]
        types: list[tuple[str, Any]] = [("T", q.dtype), ("KV", k_pool.dtype), ("BITS", shape.bits)]
        sizes = [("DV", shape.value_dim), ("PAGE", shape.page), ("WINDOW", window or 0)]
        has_sinks = ("HAS_SINKS", sinks is not None)
        template = [
            *types,
            *sizes,
            ("D", shape.dim),
            ("HEADS", heads),
            ("TOKENS", tokens),
            ("ROW_TILES", row_tiles),
            ("HAS_SOFTCAP", softcap is not None),
            ("HAS_TAIL", has_tail),
        ]
        output_shape = (num_tokens, shape.heads, shape.value_dim)
        if not is_split:
            (out,) = self._attend_tile(
                inputs=[*inputs, logits],
                template=[*template, has_sinks],
                grid=(THREADS * head_tiles, tiles, 1),
                threadgroup=(THREADS, 1, 1),
                output_shapes=[output_shape],
                output_dtypes=[q.dtype],
            )
            return out
        parts = self._attend_split(
            inputs=inputs,
            template=template,
            grid=(THREADS * head_tiles, tiles, num_splits),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(*part_shape, shape.num_columns), (*part_shape, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        (out,) = self._merge_splits(
            inputs=[*parts, tables, starts, lengths, logits],
            template=[*types, *sizes, has_sinks],
            grid=(shape.num_columns, shape.heads, num_tokens),
            threadgroup=(min(shape.num_columns, MAX_THREADS), 1, 1),
            output_shapes=[output_shape],
            output_dtypes=[q.dtype],
        )
        return out


def takes_attention(q: mx.array, k_pool: mx.array, v_pool: mx.array, kv_bits: int | None) -> bool:
    """Whether the kernels have queries and pages of these sizes and dtypes."""
    try:
        _checked(q, k_pool, v_pool, kv_bits)
    except ValueError:
        return False
    return q.size > 0


def _checked(q: mx.array, k_pool: mx.array, v_pool: mx.array, kv_bits: int | None) -> _Shape:
    if q.ndim != 3 or q.dtype not in FLOAT_TYPES or q.shape[2] < MIN_DEVICE_SIZE:
        raise ValueError(
            f"paged_attention: q must be floats [T, H, D] with D of at least {MIN_DEVICE_SIZE}, "
            f"got {q.dtype} {list(q.shape)}"
        )
    _, heads, dim = q.shape
    if kv_bits is None:
        value_dim, page = _float_sizes(k_pool, v_pool, dim)
    else:
        page = quantized_pages.page_size_of(k_pool, dim, kv_bits)
        unit = quantized_pages.head_bytes(quantized_pages.GROUP_SIZE, page, kv_bits)
        value_dim = v_pool.shape[-1] // unit * quantized_pages.GROUP_SIZE
        if value_dim < 1 or quantized_pages.page_size_of(v_pool, value_dim, kv_bits) != page:
            raise ValueError(f"paged_attention: v_pool {list(v_pool.shape)} has no pages of {page} rows")
    kv_heads = k_pool.shape[1]
    if k_pool.shape[:2] != v_pool.shape[:2] or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"paged_attention: {heads} heads do not fit pools {list(k_pool.shape)} and {list(v_pool.shape)}"
        )
    return _Shape(heads, kv_heads, dim, value_dim, page, kv_bits or 0)


def _float_sizes(k_pool: mx.array, v_pool: mx.array, dim: int) -> tuple[int, int]:
    """Dv and the page size."""
    are_floats = k_pool.dtype in FLOAT_TYPES and v_pool.dtype == k_pool.dtype
    if not are_floats or k_pool.ndim != 4 or v_pool.ndim != 4 or k_pool.shape[2] != dim:
        raise ValueError(
            f"paged_attention: pools must be floats [P, H, {dim}, page] and [P, H, page, Dv] of one dtype, "
            f"got {k_pool.dtype} {list(k_pool.shape)} and {v_pool.dtype} {list(v_pool.shape)}"
        )
    page, value_dim = v_pool.shape[2:]
    if k_pool.shape[3] != page or page < 1 or page % KEY_UNIT or value_dim < MIN_DEVICE_SIZE:
        raise ValueError(
            f"paged_attention: pages must have a multiple of {KEY_UNIT} slots and Dv be at least "
            f"{MIN_DEVICE_SIZE}, got {list(k_pool.shape)} and {list(v_pool.shape)}"
        )
    return value_dim, page


def _check_indices(block_tables: mx.array, q_starts: mx.array, kv_lens: mx.array) -> None:
    dims = (block_tables.ndim, q_starts.ndim, kv_lens.ndim)
    if dims != (2, 1, 1) or any(a.dtype != mx.int32 for a in (block_tables, q_starts, kv_lens)):
        raise ValueError("paged_attention: block_tables [S, pages], q_starts [S + 1], kv_lens [S] are int32")
    num_sequences = kv_lens.shape[0]
    if q_starts.shape[0] != num_sequences + 1 or block_tables.shape[0] != num_sequences:
        raise ValueError(
            f"paged_attention: block_tables {list(block_tables.shape)}, q_starts {list(q_starts.shape)} and "
            f"kv_lens {list(kv_lens.shape)} are of different numbers of sequences"
        )
    if num_sequences and not block_tables.shape[1]:
        raise ValueError("paged_attention: block_tables must have at least one column")


def _check_tails(
    k_pool: mx.array, v_pool: mx.array, k_tail: mx.array | None, v_tail: mx.array | None
) -> bool:
    """Whether there are tails. ValueError where they are not laid out as the pools."""
    if k_tail is None and v_tail is None:
        return False
    for tail, pool in ((k_tail, k_pool), (v_tail, v_pool)):
        if tail is None or tail.shape[1:] != pool.shape[1:] or tail.dtype != pool.dtype:
            raise ValueError("paged_attention: k_tail and v_tail must be laid out as k_pool and v_pool are")
    return True


def _padded_columns(a: mx.array) -> mx.array:
    """At least MIN_DEVICE_SIZE elements: more columns."""
    missing = -(-MIN_DEVICE_SIZE // a.shape[0]) - a.shape[1]
    return mx.pad(a, [(0, 0), (0, missing)]) if missing > 0 else a
