"""Kernels that write and copy KV pages, run as Metal: reference.py's bits, each byte once, faults caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_on_host import Host, MetalFault, MetalHostError, Settings
from mlxserve_kernels import reference
from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.metal_kernels import MetalKernels
from mlxserve_kernels.metal_kernels.pages import PageKernels
from mlxserve_kernels.page_rows import NO_SOURCE, KvPages, KvRows
from mlxserve_kernels.quantized_pages import head_bytes, read_pages
from tests.metal.conftest import REPORTS, Plant, kind_of

THROUGH = frozenset({"k_pool", "v_pool"})
FORMATS = [
    (mx.float16, mx.float16, None),
    (mx.bfloat16, mx.float32, None),
    (mx.bfloat16, mx.bfloat16, 8),
    (mx.float32, mx.float32, 4),
]
"""Dtypes of rows and pool, and kv_bits."""
HEADS, Q_HEADS, NUM_PAGES = 2, 4, 5


@pytest.fixture
def host(cache_dir: Path) -> Iterator[Host]:
    """One that lets kernels write nothing but their outputs."""
    host = Host(Settings(cache_dir=cache_dir, seeds=(0, 1, 2)))
    yield host
    REPORTS.extend(host.reports)


@pytest.fixture
def through(cache_dir: Path) -> Iterator[Host]:
    """A host that lets kernels write through the pools."""
    host = Host(Settings(cache_dir=cache_dir, seeds=(0, 1, 2), writable_inputs=THROUGH))
    yield host
    REPORTS.extend(host.reports)


def kernels(host: Host) -> PageKernels:
    return MetalKernels(host.metal_kernel).pages


def order() -> mx.array:
    return mx.zeros((8,), dtype=mx.int32)


def ints(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def some_pages(
    num_pages: int,
    page_size: int,
    dims: tuple[int, int],
    dtype: mx.Dtype = mx.float16,
    kv_bits: int | None = None,
) -> KvPages:
    """Pages with something in them."""
    if kv_bits is not None:
        shapes = [(num_pages, HEADS, head_bytes(dim, page_size, kv_bits)) for dim in dims]
        pools = [mx.random.randint(0, 256, shape).astype(mx.uint8) for shape in shapes]
    else:
        shape = (num_pages, HEADS, dims[0], page_size), (num_pages, HEADS, page_size, dims[1])
        pools = [mx.random.normal(s).astype(dtype) for s in shape]
    mx.eval(pools)
    return KvPages(*pools)


def some_rows(
    num_rows: int, dims: tuple[int, int], dtype: mx.Dtype = mx.float16, rope: Rope | None = None
) -> KvRows:
    k, v = (mx.random.normal((num_rows, HEADS, dim)).astype(dtype) for dim in dims)
    if rope is None:
        return KvRows(k, v)
    q = mx.random.normal((num_rows, Q_HEADS, dims[0])).astype(dtype)
    positions = mx.random.randint(0, 9000, (num_rows,)).astype(mx.int32)
    return KvRows(k, v, q, positions, rope)


def a_rope(rotated: int, *, is_interleaved: bool = False, input_scale: float = 1.0) -> Rope:
    frequencies = 10000.0 ** (-mx.arange(0, rotated, 2) / rotated)
    return Rope(frequencies, 0.5, input_scale, is_interleaved)


def copied(pages: KvPages) -> KvPages:
    """Other memory, the same bits."""
    return KvPages(*(mx.array(pool) + mx.zeros_like(pool) for pool in (pages.keys, pages.values)))


def rotated(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    """x [T, H, D] as numpy turns it, by angles that are float32 products."""
    half = rope.inverse_frequencies.size
    where = np.array(positions).astype(np.float32) * np.float32(rope.position_scale)
    angles = (where[:, None] * np.array(rope.inverse_frequencies))[:, None].astype(np.float64)
    y = np.array(x.astype(mx.float32))
    pairs = np.arange(2 * half).reshape((-1, 2) if rope.is_interleaved else (2, -1))
    first, second = pairs.T if rope.is_interleaved else pairs
    a, b = y[..., first] * rope.input_scale, y[..., second] * rope.input_scale
    y[..., first] = a * np.cos(angles) - b * np.sin(angles)
    y[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return mx.array(y).astype(x.dtype)


def is_near(a: mx.array, b: mx.array) -> bool:
    """Equal but for the library's own cosine and the rounding behind it."""
    tolerance = {mx.float32: 4e-6, mx.float16: 8e-3, mx.bfloat16: 6.4e-2}[a.dtype]
    return bool(mx.allclose(a.astype(mx.float32), b.astype(mx.float32), rtol=0, atol=tolerance).item())


def are_equal(a: KvPages, b: KvPages) -> bool:
    """Bit by bit, NaN included."""
    bits = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.keys.itemsize]
    return all(
        bool(mx.array_equal(x.view(bits), y.view(bits)).item())
        for x, y in ((a.keys, b.keys), (a.values, b.values))
    )


def written(pages: KvPages, rows: KvRows, slots: mx.array, kv_bits: int | None) -> KvPages:
    """What reference.py makes of the pages."""
    copy = copied(pages)
    return KvPages(*reference.write_pages(copy.keys, copy.values, rows.k, rows.v, slots, kv_bits=kv_bits))


def merged(
    pools: KvPages, tails: KvPages, rows: KvRows, pieces: list[tuple[int, int, int, int]], kv_bits: int | None
) -> KvPages:
    """The tails that write_tails should give, by reference.py."""
    page_size = kv_page_size(pools, rows, kv_bits)
    keys, values = [], []
    for source, *_ in pieces:
        from_, index = (tails, -1 - source) if source < 0 else (pools, source)
        empty = source == NO_SOURCE
        keys.append(mx.zeros_like(pools.keys[0]) if empty else from_.keys[index])
        values.append(mx.zeros_like(pools.values[0]) if empty else from_.values[index])
    new = KvPages(mx.stack(keys), mx.stack(values))
    slots, taken = [], []
    for index, (_, first_slot, num_rows, first_row) in enumerate(pieces):
        slots += [index * page_size + first_slot + i for i in range(num_rows)]
        taken += [first_row + i for i in range(num_rows)]
    chosen = KvRows(rows.k[ints(*taken)], rows.v[ints(*taken)])
    return written(new, chosen, ints(*slots), kv_bits)


def kv_page_size(pools: KvPages, rows: KvRows, kv_bits: int | None) -> int:
    if kv_bits is None:
        return int(pools.keys.shape[3])
    return int(pools.keys.shape[2]) // (head_bytes(rows.k.shape[2], 16, kv_bits) // 16)


def padded_pieces(pieces: list[tuple[int, int, int, int]]) -> mx.array:
    return mx.array([(*piece, 0, 0, 0, 0) for piece in pieces], dtype=mx.int32)


SHAPES = [((64, 64), 32), ((96, 32), 16)]


# Through the pool


@pytest.mark.parametrize(("dims", "page_size"), SHAPES)
@pytest.mark.parametrize(("dtype", "pool_dtype", "kv_bits"), FORMATS)
def test_rows_go_to_their_slots(
    through: Host, dims: tuple[int, int], page_size: int, dtype: mx.Dtype, pool_dtype: mx.Dtype, kv_bits: int
) -> None:
    for num_rows in (1, 21):
        pools = some_pages(NUM_PAGES, page_size, dims, pool_dtype, kv_bits)
        rows = some_rows(num_rows, dims, dtype)
        slots = mx.array(np.random.permutation(NUM_PAGES * page_size)[:num_rows], dtype=mx.int32)
        expected = written(pools, rows, slots, kv_bits)
        q, token = kernels(through).write_pages(rows, pools, slots, order(), kv_bits=kv_bits)
        assert q is None and token.shape == (8,)
        assert are_equal(pools, expected)


@pytest.mark.parametrize(("dims", "page_size"), [((5, 3), 7), ((33, 8), 6)])
def test_odd_sizes(through: Host, dims: tuple[int, int], page_size: int) -> None:
    pools = some_pages(NUM_PAGES, page_size, dims)
    rows = some_rows(NUM_PAGES * page_size - 2, dims)
    slots = mx.arange(1, NUM_PAGES * page_size - 1).astype(mx.int32)
    expected = written(pools, rows, slots, None)
    kernels(through).write_pages(rows, pools, slots, order())
    assert are_equal(pools, expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "kv_bits"), [(mx.float16, None), (mx.float32, 8)])
def test_rotates_and_writes(
    through: Host, is_interleaved: bool, dtype: mx.Dtype, kv_bits: int | None
) -> None:
    rope = a_rope(48, is_interleaved=is_interleaved, input_scale=1.25)
    pools, rows = some_pages(2, 32, (64, 32), dtype, kv_bits), some_rows(9, (64, 32), dtype, rope)
    assert rows.q is not None and rows.positions is not None
    slots = ints(*range(20, 29))
    q, _ = kernels(through).write_pages(rows, pools, slots, order(), kv_bits=kv_bits)
    assert q is not None and is_near(q, rotated(rows.q, rows.positions, rope))
    k = kernels(through).rotate(rows.k, rows.positions, rope)
    assert is_near(k, rotated(rows.k, rows.positions, rope))
    # What is in the page are the bits of the rotation alone, whatever it was written with.
    expected = written(pools, KvRows(k, rows.v), slots, kv_bits)
    assert are_equal(pools, expected)


def test_a_row_does_not_depend_on_its_batch(through: Host) -> None:
    rope = a_rope(64)
    rows = some_rows(20, (64, 64), mx.float16, rope)
    assert rows.q is not None and rows.positions is not None
    together, alone = some_pages(1, 32, (64, 64), kv_bits=4), some_pages(1, 32, (64, 64), kv_bits=4)
    q, _ = kernels(through).write_pages(rows, together, ints(*range(20)), order(), kv_bits=4)
    one = KvRows(rows.k[7:8], rows.v[7:8], rows.q[7:8], rows.positions[7:8], rope)
    q_alone, _ = kernels(through).write_pages(one, alone, ints(7), order(), kv_bits=4)
    assert q is not None and q_alone is not None
    assert mx.array_equal(q[7], q_alone[0]).item()
    for is_keys in (True, False):
        of_seven = [
            read_pages(pages.keys if is_keys else pages.values, 64, 4, is_keys=is_keys)[0, :, 7]
            for pages in (together, alone)
        ]
        assert mx.array_equal(*of_seven).item()


def test_rotates_as_mlx_does(host: Host) -> None:
    x = mx.random.normal((40, HEADS, 64))
    y = kernels(host).rotate(x, mx.arange(40).astype(mx.int32), a_rope(32))
    expected = mx.fast.rope(x.swapaxes(0, 1), 32, traditional=False, base=10000.0, scale=0.5, offset=0)
    assert mx.allclose(y, expected.swapaxes(0, 1), rtol=0, atol=1e-5).item()


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_groups_that_are_not_numbers(through: Host, kv_bits: int) -> None:
    rows = some_rows(6, (64, 32), mx.float32)
    k = np.array(rows.k)
    k[0, 0, 3], k[1, 1, 40], k[2, 0, :32] = np.nan, np.inf, 0
    k[3, 0, :2], k[4, 0, :32], k[5, 1] = (3e38, -3e38), 1e-42, 1.5
    rows = KvRows(mx.array(k), rows.v)
    pools = some_pages(1, 16, (64, 32), kv_bits=kv_bits)
    expected = written(pools, rows, ints(*range(6)), kv_bits)
    kernels(through).write_pages(rows, pools, ints(*range(6)), order(), kv_bits=kv_bits)
    assert are_equal(pools, expected)


def test_strided_rows(through: Host) -> None:
    wide = mx.random.normal((6, HEADS, 128)).astype(mx.float16)
    rows = KvRows(wide[::2, :, ::2], wide[1::2, :, 64:])
    pools = some_pages(1, 32, (64, 64))
    expected = written(pools, rows, ints(3, 1, 2), None)
    kernels(through).write_pages(rows, pools, ints(3, 1, 2), order())
    assert are_equal(pools, expected)


@pytest.mark.parametrize(("dtype", "kv_bits"), [(mx.float16, None), (mx.float32, None), (mx.float16, 8)])
def test_whole_pages_are_written_once_and_coalesced(
    through: Host, dtype: mx.Dtype, kv_bits: int | None
) -> None:
    dims = (128, 128)
    rows, pools = some_rows(64, dims, dtype, a_rope(128)), some_pages(3, 32, dims, dtype, kv_bits)
    assert rows.q is not None
    kernels(through).write_pages(rows, pools, mx.arange(32, 96).astype(mx.int32), order(), kv_bits=kv_bits)
    report = through.reports[-1]
    for name, size in (
        ("k", rows.k.nbytes), ("v", rows.v.nbytes), ("q", rows.q.nbytes), ("q_out", rows.q.nbytes),
        ("k_pool", pools.keys.nbytes * 2 // 3), ("v_pool", pools.values.nbytes * 2 // 3),
    ):  # fmt: skip
        cost = report.buffer(name)
        assert cost.simd_read + cost.simd_written == size
        assert cost.coalescing >= 0.9


def test_single_rows_are_written_once(through: Host) -> None:
    """A key's values are a page apart from each other: a line each, the format's price for one row."""
    rows, pools = some_rows(3, (128, 128)), some_pages(3, 32, (128, 128))
    kernels(through).write_pages(rows, pools, ints(5, 40, 70), order())
    report = through.reports[-1]
    for name in ("k_pool", "v_pool"):
        assert report.buffer(name).simd_written == rows.k.nbytes
        assert report.buffer(name).simd_read == 0
    assert report.buffer("v_pool").coalescing == 1
    assert report.buffer("k_pool").coalescing == 2 / 64


@pytest.mark.full
@pytest.mark.parametrize(
    ("dims", "page_size"), [((128, 128), 64), ((256, 128), 32), ((80, 80), 32), ((192, 128), 48)]
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_all_sizes(
    host: Host, through: Host, dims: tuple[int, int], page_size: int, dtype: mx.Dtype, kv_bits: int | None
) -> None:
    if kv_bits is not None and dims == (80, 80):
        pytest.skip("quantized heads are multiples of 32")
    pools = some_pages(3, page_size, dims, dtype, kv_bits)
    rope = a_rope(dims[0] // 2)
    rows = some_rows(page_size + 9, dims, dtype, rope)
    assert rows.positions is not None
    k = kernels(host).rotate(rows.k, rows.positions, rope)
    first = page_size - 5
    slots = ints(*range(first, first + page_size + 9))
    plain = KvRows(k, rows.v)
    pieces = [(0, first, 5, 0), (1, 0, page_size, 5), (2, 0, 4, page_size + 5)]
    q, tails = kernels(host).write_tails(rows, pools, pools, padded_pieces(pieces), kv_bits=kv_bits)
    expected = written(pools, plain, slots, kv_bits)
    assert are_equal(tails, expected)
    other_q, _ = kernels(through).write_pages(rows, pools, slots, order(), kv_bits=kv_bits)
    assert are_equal(pools, expected)
    assert q is not None and other_q is not None and mx.array_equal(q, other_q).item()


# Tails


PIECES = [(NO_SOURCE, 0, 3, 0), (2, 5, 4, 3), (-2, 15, 1, 7), (-1, 0, 0, 0), (0, 0, 16, 8)]


@pytest.mark.parametrize(("dims", "page_size"), SHAPES)
@pytest.mark.parametrize(("dtype", "pool_dtype", "kv_bits"), FORMATS)
def test_tails_take_old_slots_and_new_rows(
    host: Host, dims: tuple[int, int], page_size: int, dtype: mx.Dtype, pool_dtype: mx.Dtype, kv_bits: int
) -> None:
    pools, old = (some_pages(n, page_size, dims, pool_dtype, kv_bits) for n in (3, 2))
    rows = some_rows(24, dims, dtype)
    expected = merged(pools, old, rows, PIECES, kv_bits)
    _, tails = kernels(host).write_tails(rows, pools, old, padded_pieces(PIECES), kv_bits=kv_bits)
    assert are_equal(tails, expected)


@pytest.mark.parametrize(("dims", "page_size"), [((5, 3), 7), ((300, 256), 32)])
def test_tails_of_odd_and_large_sizes(host: Host, dims: tuple[int, int], page_size: int) -> None:
    pools, old = some_pages(2, page_size, dims), some_pages(1, page_size, dims)
    rows = some_rows(8, dims)
    pieces = [(-1, 1, 5, 3), (1, 2, 3, 0)]
    _, tails = kernels(host).write_tails(rows, pools, old, padded_pieces(pieces))
    assert are_equal(tails, merged(pools, old, rows, pieces, None))


def test_tails_have_the_bits_of_pages(host: Host, through: Host) -> None:
    rows = some_rows(5, (64, 32), mx.float16, a_rope(32, is_interleaved=True))
    pools = some_pages(1, 32, (64, 32), kv_bits=8)
    q, tails = kernels(host).write_tails(rows, pools, pools, padded_pieces([(0, 9, 5, 0)]), kv_bits=8)
    other_q, _ = kernels(through).write_pages(rows, pools, ints(9, 10, 11, 12, 13), order(), kv_bits=8)
    assert q is not None and other_q is not None and mx.array_equal(q, other_q).item()
    assert are_equal(tails, pools)


@pytest.mark.parametrize(("dtype", "kv_bits"), [(mx.float16, None), (mx.float32, None), (mx.float16, 4)])
def test_tail_bytes_once_and_coalesced(host: Host, dtype: mx.Dtype, kv_bits: int | None) -> None:
    dims = (128, 128)
    rows, pools = some_rows(2, dims, dtype), some_pages(1, 32, dims, dtype, kv_bits)
    old = some_pages(2, 32, dims, dtype, kv_bits)
    kernels(host).write_tails(
        rows, pools, old, padded_pieces([(-1, 9, 1, 0), (-2, 31, 1, 1)]), kv_bits=kv_bits
    )
    report = host.reports[-1]
    row_bytes = old.keys.nbytes // 32
    for new, kept in (("k_tails", "k_old"), ("v_tails", "v_old")):
        assert report.buffer(new).simd_written == old.keys.nbytes
        assert report.buffer(new).coalescing >= 0.9
        # Words that hold a new byte beside old ones are read whole.
        minimum = old.keys.nbytes - row_bytes
        assert minimum <= report.buffer(kept).simd_read <= 1.05 * minimum
        assert report.buffer(kept).coalescing >= 0.9
    for name in ("k", "v"):
        assert report.buffer(name).simd_read == rows.k.nbytes
        assert report.buffer(name).coalescing == 1


# Copies


@pytest.mark.parametrize(
    ("dims", "page_size", "kv_bits"), [((64, 32), 32, None), ((5, 3), 7, None), ((32, 64), 16, 4)]
)
def test_copies_pages(through: Host, dims: tuple[int, int], page_size: int, kv_bits: int | None) -> None:
    pools = some_pages(NUM_PAGES, page_size, dims, kv_bits=kv_bits)
    copy = copied(pools)
    expected = KvPages(*reference.copy_pages(copy.keys, copy.values, ints(0, 3), ints(4, 1)))
    token = kernels(through).copy_pages(pools, ints(0, 3), ints(4, 1), order())
    assert token.shape == (8,)
    assert are_equal(pools, expected)
    for name, pool in (("k_pool", pools.keys), ("v_pool", pools.values)):
        cost = through.reports[-1].buffer(name)
        assert cost.simd_read == cost.simd_written == pool.nbytes * 2 // NUM_PAGES
        assert cost.coalescing >= 0.9 or page_size == 7


# Faults


def run_write(host: Host) -> bool:
    """Whether what is written is right; so are the others."""
    rope = a_rope(48)
    pools, rows = some_pages(2, 16, (64, 64)), some_rows(17, (64, 64), mx.float16, rope)
    assert rows.q is not None and rows.positions is not None
    slots = ints(*range(13, 30))
    q, _ = kernels(host).write_pages(rows, pools, slots, order())
    assert q is not None
    k = rotated(rows.k, rows.positions, rope)
    expected = written(pools, KvRows(k, rows.v), slots, None)
    return is_near(q, rotated(rows.q, rows.positions, rope)) and is_near(pools.keys, expected.keys)


def run_tails(host: Host) -> bool:
    pools, rows, pieces = some_pages(2, 16, (64, 64), kv_bits=4), some_rows(9, (64, 64)), [(1, 6, 9, 0)]
    _, tails = kernels(host).write_tails(rows, pools, pools, padded_pieces(pieces), kv_bits=4)
    return are_equal(tails, merged(pools, pools, rows, pieces, 4))


def run_copy(host: Host) -> bool:
    pools = some_pages(2, 16, (64, 64))
    kernels(host).copy_pages(pools, ints(0), ints(1), order())
    return bool(mx.array_equal(pools.keys[0], pools.keys[1]).item())


TILE_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n  codec.scatter"
MERGE_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n  const bool has_old"
ROW_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);\n  for"


FAULTS: list[tuple[Callable[[Host], bool], str, str, str]] = [
    (run_write, TILE_BARRIER, "codec.scatter", "uninitialised read"),
    (run_write, TILE_BARRIER, TILE_BARRIER.replace("mem_threadgroup", "mem_none"), "race"),
    (run_write, ROW_BARRIER, "for", "uninitialised read|race"),
    (run_write, "first + Rotated / 2", "first + Rotated / 2 + 1", "wrong result"),
    (run_write, "a * c - b * s", "a * c + b * s", "wrong result"),
    (run_write, "if (index >= count) return;", "", "out of bounds"),
    (run_write, "slots[row] % w == 0 && ", "slots[row] % w == 1 && ", "misaligned access"),
    (run_write, "metal::min(Slots, rows - first)", "Slots", "out of bounds"),
    (run_write, "device T* y, uint lane", "constant T* y, uint lane", "source"),
    (run_write, "i < count; i += Threads / 32", "i < count - 1; i += Threads / 32", "uninitialised read"),
    (
        run_write,
        "  codec.scatter(",
        "  if (thread_index < 160) threadgroup_barrier(mem_flags::mem_none);\n  codec.scatter(",
        "divergent barrier",
    ),
    (run_tails, MERGE_BARRIER, "const bool has_old", "uninitialised read"),
    (run_tails, "simd_shuffle_xor(q, ushort(16))", "simd_shuffle(q, ushort(lane + 16))", "wrong lane"),
    (run_tails, "if (lane < 16) integers", "integers", "race"),
    (run_tails, "i < Slots * Items / w;", "i < Slots * Items / w - 1;", "unwritten output"),
    (run_tails, "i < Slots * Items / w;", "i <= Slots * Items / w;", "race|out of bounds"),
    (run_tails, "if (lane != 0) return;", "", "race"),
    (run_tails, "s >= end", "s > end", "uninitialised read|wrong result"),
    (run_copy, "i < Words;", "i <= Words;", "race|out of bounds"),
    (run_copy, "target[i] = source[i]", "target[i + 1] = source[i]", "out of bounds|race"),
]


@pytest.mark.parametrize(("run", "old", "new", "kind"), FAULTS)
def test_planted_fault_is_caught(
    through: Host,
    plant: Plant,
    run: Callable[[Host], bool],
    old: str,
    new: str,
    kind: str,
) -> None:
    plant(("rope.h", "pages.h"), old, new)
    found = "nothing"
    try:
        if not run(through):
            found = "wrong result"
    except MetalHostError as error:
        found = kind_of(error)
    assert found in kind.split("|")


@pytest.mark.parametrize("run", [run_write, run_tails, run_copy])
def test_sound_kernels_pass(through: Host, run: Callable[[Host], bool]) -> None:
    assert run(through)


def test_only_named_pools_may_be_written(cache_dir: Path) -> None:
    with pytest.raises(MetalFault) as caught:
        run_write(Host(Settings(cache_dir=cache_dir)))
    assert caught.value.kind == "write to an input"


def test_wrong_arguments(host: Host) -> None:
    pages, rows = some_pages(2, 32, (64, 64)), some_rows(2, (64, 64))
    pieces = padded_pieces([(0, 0, 2, 0)])
    call: Any = kernels(host)
    with pytest.raises(ValueError, match="one dtype of floats"):
        call.write_pages(KvRows(rows.k, rows.v[:1]), pages, ints(0, 1), order())
    with pytest.raises(ValueError, match="do not fit pools"):
        call.write_pages(some_rows(2, (64, 32)), pages, ints(0, 1), order())
    with pytest.raises(ValueError, match="pieces must be"):
        call.write_tails(rows, pages, pages, pieces[:, :4])
    with pytest.raises(ValueError, match="of a pool"):
        call.write_tails(rows, pages, some_pages(1, 16, (64, 64)), pieces)
    with pytest.raises(ValueError, match="a rope of 80 values"):
        call.rotate(rows.k, ints(0, 1), a_rope(80))
