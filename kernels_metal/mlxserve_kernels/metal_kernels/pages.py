"""Rows of keys and values into pages, with their rotation; copies of pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import FLOAT_TYPES, MIN_DEVICE_SIZE, SIMD_SIZE, KernelMaker
from mlxserve_kernels.page_rows import PIECE_SIZE, TOKEN_SIZE, KvPages, KvRows
from mlxserve_kernels.quantized_pages import head_bytes, page_size_of

_THREADS = 256
_SIMDGROUPS = _THREADS // SIMD_SIZE
_TILE_BYTES = 18 << 10
"""Of threadgroup memory for encoded rows: 32 rows of 128 floats, and a pad."""
_THREADGROUP_BYTES = 32 << 10
_FEW_ROWS = 16
"""Up to these, tiles are small: more threadgroups, and rows that decode share no line anyway."""
_FEW_ROWS_TILE = 4
# Quantization must have the same bits everywhere, and NaN must be seen.
_OPTIONS = {"math_mode": "safe"}

_TILES = """
threadgroup float rows[SIMDGROUPS * ROW_SIZE];
threadgroup UNIT unit_tile[UNIT_TILE];
threadgroup uint float_tile[FLOAT_TILE];
using KeyRows = PageRows<P, UNIT, WORD, KV_BITS, K_DIM, PAGE, SLOTS, THREADS, true>;
using ValueRows = PageRows<P, UNIT, WORD, KV_BITS, V_DIM, PAGE, SLOTS, THREADS, false>;
const uint thread_index = thread_index_in_threadgroup;
threadgroup float* row = rows + thread_index / 32 * ROW_SIZE;
const int num_rows = k_shape[0];
const uint heads = k_shape[1];
uint group = threadgroup_position_in_grid.x;
"""

_ROTATE_Q = """
const uint q_count = num_rows * q_shape[1];
const uint q_groups = (q_count + SIMDGROUPS - 1) / SIMDGROUPS;
if (group < q_groups) {
  rotate_rows<T, K_DIM, ROTATED, IS_INTERLEAVED>(
      q, q_out, positions, position_scale, inverse_frequencies, input_scale, q_shape[1], q_count, row,
      group * SIMDGROUPS + thread_index / 32, thread_index % 32);
  return;
}
group -= q_groups;
"""

_ROPE_ARGUMENTS = "positions, position_scale, inverse_frequencies, input_scale"
_NO_ROPE_ARGUMENTS = "(const device int*)0, 0.0f, (const device float*)0, 0.0f"

_WRITE = """
threadgroup int slots[SLOTS];
const uint head = group % heads, tiles = (num_rows + SLOTS - 1) / SLOTS, tile = group / heads % tiles;
if (group == 0 && thread_index < TOKEN_SIZE) token[thread_index] = 0;
if (group < heads * tiles) {
  const KeyRows codec = {unit_tile, float_tile};
  write_rows<KeyRows, T, ROTATED, IS_INTERLEAVED, SLOTS, THREADS>(
      codec, k, ROPE, slot_mapping, (device UNIT*)k_pool, num_rows, heads, head, tile, slots, row,
      thread_index);
} else {
  const ValueRows codec = {unit_tile, float_tile};
  write_rows<ValueRows, T, 0, false, SLOTS, THREADS>(
      codec, v, ROPE, slot_mapping, (device UNIT*)v_pool, num_rows, heads, head, tile, slots, row,
      thread_index);
}
"""

_WRITE_TAILS = """
const uint head = group % heads, parts = PAGE / SLOTS, part = group / heads % parts;
const uint tail = group / (heads * parts) % pieces_shape[0];
const device int* piece = pieces + tail * PIECE_SIZE;
if (group < heads * parts * pieces_shape[0]) {
  const KeyRows codec = {unit_tile, float_tile};
  write_tail<KeyRows, T, ROTATED, IS_INTERLEAVED, SLOTS, THREADS>(
      codec, k, ROPE, piece, (const device UNIT*)k_pool, (const device UNIT*)k_old, (device UNIT*)k_tails,
      heads, head, tail, part * SLOTS, row, thread_index);
} else {
  const ValueRows codec = {unit_tile, float_tile};
  write_tail<ValueRows, T, 0, false, SLOTS, THREADS>(
      codec, v, ROPE, piece, (const device UNIT*)v_pool, (const device UNIT*)v_old, (device UNIT*)v_tails,
      heads, head, tail, part * SLOTS, row, thread_index);
}
"""

_COPY_PAGES = """
const uint head = threadgroup_position_in_grid.y, copy = threadgroup_position_in_grid.z;
const uint heads = threadgroups_per_grid.y, thread_index = thread_index_in_threadgroup;
if (head == 0 && copy == 0 && thread_index < TOKEN_SIZE) token[thread_index] = 0;
const size_t source = size_t(source_ids[copy]) * heads + head;
const size_t target = size_t(target_ids[copy]) * heads + head;
device WORD* keys = (device WORD*)k_pool;
device WORD* values = (device WORD*)v_pool;
copy_head<WORD, K_WORDS, THREADS>(keys + source * K_WORDS, keys + target * K_WORDS, thread_index);
copy_head<WORD, V_WORDS, THREADS>(values + source * V_WORDS, values + target * V_WORDS, thread_index);
"""

_ROPE = """
threadgroup float rows[SIMDGROUPS * ROW_SIZE];
const uint simdgroup = thread_index_in_threadgroup / 32;
rotate_rows<T, K_DIM, ROTATED, IS_INTERLEAVED>(
    q, q_out, positions, position_scale, inverse_frequencies, input_scale, q_shape[1],
    q_shape[0] * q_shape[1], rows + simdgroup * ROW_SIZE,
    threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup, thread_index_in_threadgroup % 32);
"""


class PageKernels:
    """Kernels made by `make`. Rows are of FLOAT_TYPES; pools and tails have at least 8 values.

    What writes through the pools takes an ``order`` and returns a token, both int32 [8]. MLX sees pools only
    as inputs of such a kernel: whatever reads or writes pages later must take the token as an input of its
    own, and ``order`` must come after all that reads or writes them earlier, steps in flight included.
    """

    def __init__(self, make: KernelMaker) -> None:
        rope = ["q", "positions", "position_scale", "inverse_frequencies", "input_scale"]
        rows, pools = ["k", "v"], ["k_pool", "v_pool"]
        through = [*rows, "slot_mapping", *pools, "order"]
        tails = [*rows, "pieces", *pools, "k_old", "v_old"]
        header = maker.source("rope.h") + maker.source("pages.h")

        def kernel(name: str, inputs: list[str], outputs: list[str], *parts: str) -> maker.KernelCall:
            arguments = _ROPE_ARGUMENTS if "q" in inputs else _NO_ROPE_ARGUMENTS
            body = "".join(parts).replace("ROPE,", arguments + ",")
            return make(name, inputs, outputs, body, header, compile_options=_OPTIONS)

        self._rope = kernel("rope", rope, ["q_out"], _ROPE)
        self._write = kernel("write_pages", through, ["token"], _TILES, _WRITE)
        self._rope_and_write = kernel(
            "rope_and_write_pages", [*rope, *through], ["q_out", "token"], _TILES, _ROTATE_Q, _WRITE
        )
        self._write_tails = kernel("write_tails", tails, ["k_tails", "v_tails"], _TILES, _WRITE_TAILS)
        self._rope_and_write_tails = kernel(
            "rope_and_write_tails", [*rope, *tails], ["q_out", "k_tails", "v_tails"], _TILES, _ROTATE_Q,
            _WRITE_TAILS,
        )  # fmt: skip
        self._copy = kernel(
            "copy_pages", ["source_ids", "target_ids", *pools, "order"], ["token"], _COPY_PAGES
        )

    def takes(self, rows: KvRows, *pages: KvPages, kv_bits: int | None = None) -> bool:
        """Whether ``write_pages`` and ``write_tails`` have what rows and pages, the pools first, need."""
        others = [rows.v] if rows.q is None else [rows.v, rows.q]
        if rows.k.dtype not in FLOAT_TYPES or any(x.dtype != rows.k.dtype for x in others):
            return False
        if min(array.size for part in pages for array in (part.keys, part.values)) < MIN_DEVICE_SIZE:
            return False
        layout = _Layout.of("pages", rows, pages[0], kv_bits)
        return 4 * _SIMDGROUPS * max(layout.dims) + layout.tile_bytes <= _THREADGROUP_BYTES

    def rotate(self, x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
        """x [T, H, D] of FLOAT_TYPES, rotated by ``rope`` at positions int32 [T]."""
        dim = x.shape[2]
        groups = -(-x.shape[0] * x.shape[1] // _SIMDGROUPS)
        (y,) = self._rope(
            inputs=[x, *_rope_inputs(rope, positions)],
            template=[
                ("T", x.dtype), ("K_DIM", dim), *_rope_template(rope, dim),
                ("SIMDGROUPS", _SIMDGROUPS), ("ROW_SIZE", dim),
            ],
            grid=(groups * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        )  # fmt: skip
        return y

    def write_pages(
        self,
        rows: KvRows,
        pools: KvPages,
        slot_mapping: mx.array,
        order: mx.array,
        *,
        kv_bits: int | None = None,
    ) -> tuple[mx.array | None, mx.array]:
        """Write rows through the pools, as ``ops.write_pages`` does; returns q, rotated, and the token.

        slot_mapping int32 [T]; slots of one call differ. Raises ValueError for shapes and dtypes
        that do not fit.
        """
        layout = _Layout.of("write_pages", rows, pools, kv_bits)
        num_rows, heads = rows.k.shape[:2]
        slots = math.gcd(layout.slots, _FEW_ROWS_TILE) if num_rows <= _FEW_ROWS else layout.slots
        inputs = [rows.k, rows.v, slot_mapping, pools.keys, pools.values, order]
        groups = 2 * heads * -(-num_rows // slots)
        template = [*layout.template(rows.k.dtype, slots), ("TOKEN_SIZE", TOKEN_SIZE)]
        *q_out, token = self._run(
            self._write, self._rope_and_write, rows, inputs, template, groups, [((TOKEN_SIZE,), mx.int32)]
        )
        return q_out[0] if q_out else rows.q, token

    def write_tails(
        self,
        rows: KvRows,
        pools: KvPages,
        tails: KvPages,
        pieces: mx.array,
        *,
        kv_bits: int | None = None,
    ) -> tuple[mx.array | None, KvPages]:
        """Tails of a new step; returns q, rotated, and them: as many as there are pieces, in their order.

        pieces int32 [N, 8]: source, first slot, number of new rows, first of these, four that are not read.
        A tail is its source with rows ``first_row:first_row + num`` of k and v in slots ``first_slot:``. The
        source is a page of the pools, ``-1 - r`` for r of the old tails, or NO_SOURCE: slots without a row
        are 0 then. Nothing is written in place. Raises ValueError for shapes and dtypes that do not fit.
        """
        layout = _Layout.of("write_tails", rows, pools, kv_bits)
        if pieces.ndim != 2 or pieces.shape[1] != PIECE_SIZE or pieces.dtype != mx.int32:
            raise ValueError(f"write_tails: pieces must be int32 [N, {PIECE_SIZE}], got {pieces.shape}")
        for pool, old in ((pools.keys, tails.keys), (pools.values, tails.values)):
            if old.shape[1:] != pool.shape[1:] or old.dtype != pool.dtype:
                raise ValueError(
                    f"write_tails: tails {old.shape} {old.dtype} of a pool {pool.shape} {pool.dtype}"
                )
        inputs = [rows.k, rows.v, pieces, pools.keys, pools.values, tails.keys, tails.values]
        num_tails = pieces.shape[0]
        groups = 2 * rows.k.shape[1] * (layout.page_size // layout.slots) * num_tails
        template = [*layout.template(rows.k.dtype, layout.slots), ("PIECE_SIZE", PIECE_SIZE)]
        outputs = [((num_tails, *pool.shape[1:]), pool.dtype) for pool in (pools.keys, pools.values)]
        *q_out, keys, values = self._run(
            self._write_tails, self._rope_and_write_tails, rows, inputs, template, groups, outputs
        )
        return q_out[0] if q_out else rows.q, KvPages(keys, values)

    def copy_pages(
        self, pools: KvPages, source_ids: mx.array, target_ids: mx.array, order: mx.array
    ) -> mx.array:
        """Copy pages through the pools, as ``ops.copy_pages`` does; returns the token."""
        sizes = [math.prod(pool.shape[2:]) * pool.itemsize for pool in (pools.keys, pools.values)]
        word = next(t for t in (mx.uint32, mx.uint16, mx.uint8) if not any(n % t.size for n in sizes))
        (token,) = self._copy(
            inputs=[source_ids, target_ids, pools.keys, pools.values, order],
            template=[
                ("WORD", word), ("K_WORDS", sizes[0] // word.size), ("V_WORDS", sizes[1] // word.size),
                ("THREADS", _THREADS), ("TOKEN_SIZE", TOKEN_SIZE),
            ],
            grid=(_THREADS, pools.keys.shape[1], source_ids.size),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(TOKEN_SIZE,)],
            output_dtypes=[mx.int32],
        )  # fmt: skip
        return token

    def _run(
        self,
        plain: maker.KernelCall,
        rotating: maker.KernelCall,
        rows: KvRows,
        inputs: list[mx.array],
        template: list[tuple[str, int | mx.Dtype]],
        groups: int,
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        kernel, arguments = plain, list[mx.array](inputs)
        if rows.rope is None:
            template = [*template, ("ROTATED", 0), ("IS_INTERLEAVED", False)]
        else:
            assert rows.q is not None, "a rope without q"
            assert rows.positions is not None, "a rope without positions"
            kernel = rotating
            groups += -(-rows.q.shape[0] * rows.q.shape[1] // _SIMDGROUPS)
            arguments = [rows.q, *_rope_inputs(rows.rope, rows.positions), *inputs]
            template = [*template, *_rope_template(rows.rope, rows.k.shape[2])]
            outputs = [(rows.q.shape, rows.q.dtype), *outputs]
        return kernel(
            inputs=arguments,
            template=template,
            grid=(groups * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


def _rope_inputs(rope: Rope, positions: mx.array) -> list[mx.array]:
    position_scale, input_scale = (
        mx.array(scale, dtype=mx.float32) for scale in (rope.position_scale, rope.input_scale)
    )
    return [positions, position_scale, rope.inverse_frequencies.astype(mx.float32), input_scale]


def _rope_template(rope: Rope, dim: int) -> list[tuple[str, int | mx.Dtype]]:
    rotated = 2 * rope.inverse_frequencies.size
    if not 0 < rotated <= dim:
        raise ValueError(f"a rope of {rotated} values does not fit heads of {dim}")
    return [("ROTATED", rotated), ("IS_INTERLEAVED", rope.is_interleaved)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the pages of a call are like, and how rows go through threadgroup memory."""

    dims: tuple[int, int]
    page_size: int
    dtype: mx.Dtype
    kv_bits: int

    @classmethod
    def of(cls, name: str, rows: KvRows, pools: KvPages, kv_bits: int | None) -> _Layout:
        """Raises ValueError where rows and pools do not fit together."""
        k, v = rows.k, rows.v
        others = [v] if rows.q is None else [v, rows.q]
        if k.dtype not in FLOAT_TYPES or any(x.dtype != k.dtype or x.shape[0] != k.shape[0] for x in others):
            shapes = ", ".join(f"{x.dtype} {x.shape}" for x in (k, *others))
            raise ValueError(f"{name}: rows must have one dtype of floats and one number, got {shapes}")
        dims = k.shape[2], v.shape[2]
        expected: list[tuple[int, ...]]
        if kv_bits is None:
            page_size = pools.keys.shape[3]
            expected = [(k.shape[1], dims[0], page_size), (k.shape[1], page_size, dims[1])]
        else:
            page_size = page_size_of(pools.keys, dims[0], kv_bits)
            expected = [(k.shape[1], head_bytes(dim, page_size, kv_bits)) for dim in dims]
        got = [pool.shape[1:] for pool in (pools.keys, pools.values)]
        dtype = pools.keys.dtype
        is_float = kv_bits is not None or dtype in FLOAT_TYPES
        if got != expected or pools.values.dtype != dtype or v.shape[1] != k.shape[1] or not is_float:
            raise ValueError(
                f"{name}: rows {k.shape} and {v.shape} do not fit pools {pools.keys.shape} and "
                f"{pools.values.shape} of {dtype}"
            )
        return cls(dims, page_size, dtype, kv_bits or 0)

    @property
    def units(self) -> list[int]:
        """Items of a row beside its scales."""
        return [dim * self.kv_bits // 8 if self.kv_bits else dim for dim in self.dims]

    @property
    def floats(self) -> int:
        groups = max(self.dims) // 32
        return {0: 0, 8: groups, 4: 2 * groups}[self.kv_bits]

    @property
    def row_bytes(self) -> int:
        """Of the tile, pads included."""
        return max(self.units) * self.dtype.size + 4 + 4 * (self.floats + 1)

    @property
    def slots(self) -> int:
        """Rows of a tile: as many as fit, a divisor of the page."""
        return max(n for n in range(1, self.page_size + 1) if self.page_size % n == 0 and self._fits(n))

    @property
    def tile_bytes(self) -> int:
        return self.slots * (self.row_bytes + 4)

    def _fits(self, slots: int) -> bool:
        return slots == 1 or slots * self.row_bytes <= _TILE_BYTES

    def template(self, dtype: mx.Dtype, slots: int) -> list[tuple[str, int | mx.Dtype]]:
        size = self.dtype.size
        unit = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}[size]
        sizes = (slots, *self.units)
        word = next(t for t in (mx.uint32, mx.uint16, mx.uint8) if not any(n * size % t.size for n in sizes))
        return [
            ("T", dtype), ("P", self.dtype), ("UNIT", unit), ("WORD", word), ("KV_BITS", self.kv_bits),
            ("K_DIM", self.dims[0]), ("V_DIM", self.dims[1]), ("PAGE", self.page_size), ("SLOTS", slots),
            ("THREADS", _THREADS), ("SIMDGROUPS", _SIMDGROUPS), ("ROW_SIZE", max(self.dims)),
            ("UNIT_TILE", slots * (max(self.units) + 4 // size)), ("FLOAT_TILE", slots * (self.floats + 1)),
        ]  # fmt: skip
