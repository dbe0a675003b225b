from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def ids(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def pools(pages: int, heads: int, page: int, dims: tuple[int, int], dtype: mx.Dtype) -> list[mx.array]:
    shapes = ((pages, heads, dims[0], page), (pages, heads, page, dims[1]))
    made = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    mx.eval(made)
    return made


def address(pool: mx.array) -> int:
    return int(np.asarray(pool).__array_interface__["data"][0])


@pytest.mark.parametrize("pool_dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("row_dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("page", [1, 5, 32])
def test_rows_land_in_their_slots(pool_dtype: mx.Dtype, row_dtype: mx.Dtype, page: int) -> None:
    rows, heads, dims = 40, 3, (7, 4)
    before = pools(50, heads, page, dims, pool_dtype)
    expected = [mx.array(pool) for pool in before]
    slots = np.random.default_rng(3).permutation(50 * page)[:rows].astype(np.int32)
    new = [mx.random.normal((heads, rows, dim)).astype(row_dtype).swapaxes(0, 1) for dim in dims]
    at, offset = mx.array(slots // page), mx.array(slots % page)
    expected[0][at, :, :, offset] = new[0].astype(pool_dtype)
    expected[1][at, :, offset] = new[1].astype(pool_dtype)
    written = ops.write_pages(*before, *new, mx.array(slots))
    for got, want in zip(written, expected, strict=True):
        assert mx.array_equal(got, want)


def test_steps_in_flight_write_in_place_and_read_right() -> None:
    pages, page, steps = 256, 32, 200
    keys, values = mx.zeros((pages, 4, 64, page)), mx.zeros((pages, 4, page, 64))
    mx.eval(keys, values)
    pool_bytes, start = keys.nbytes, address(keys)
    factor = mx.random.normal((1500, 1500)) * 0.01
    mx.eval(factor)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    readers = []
    for step in range(steps):
        row = mx.full((1, 4, 64), float(step + 1))
        keys, values = ops.write_pages(keys, values, row, -row, ids(step % 7))
        slow = (factor[:16] @ factor)[0, 0] * 0.0
        readers.append(keys[0, :, :, : min(step + 1, 7)].sum(axis=2)[0, 0] + slow)
        mx.async_eval(keys, values, readers[-1])
    mx.eval(readers)
    for step, got in enumerate(readers):
        assert got.item() == sum(range(max(step - 6, 0) + 1, step + 2))
    assert address(keys) == start
    assert mx.get_peak_memory() - base < pool_bytes // 2


def test_an_unread_page_keeps_its_bits_and_copies_are_whole() -> None:
    keys, values = pools(6, 2, 4, (3, 5), mx.float16)
    before = [np.array(pool) for pool in (keys, values)]
    got = ops.copy_pages(keys, values, ids(0, 5, 3), ids(1, 2, 3))
    for after, old in zip(got, before, strict=True):
        want = old.copy()
        want[[1, 2]] = old[[0, 5]]
        np.testing.assert_array_equal(np.array(after), want)


def test_a_copy_then_a_write_leaves_the_source_alone() -> None:
    keys, values = pools(4, 1, 2, (3, 3), mx.float32)
    source = np.array(keys)[0]
    keys, values = ops.copy_pages(keys, values, ids(0), ids(2))
    row = mx.full((1, 1, 3), 9.0)
    keys, values = ops.write_pages(keys, values, row, row, ids(5))
    np.testing.assert_array_equal(np.array(keys)[0], source)
    np.testing.assert_array_equal(np.array(keys)[2, 0, :, 0], source[0, :, 0])
    np.testing.assert_array_equal(np.array(keys)[2, 0, :, 1], [9.0] * 3)


@pytest.mark.parametrize("slot", [-1, 8, 2**31 - 1])
def test_a_slot_outside_the_pool_is_an_error_and_writes_nothing(slot: int) -> None:
    keys, values = pools(2, 1, 4, (3, 3), mx.float32)
    before = np.array(keys)
    row = mx.ones((2, 1, 3))
    with pytest.raises(RuntimeError, match=rf"slot_mapping\[1\] is {slot}, the pool has slots 0 to 7"):
        mx.eval(ops.write_pages(keys, values, row, row, ids(0, slot)))
    np.testing.assert_array_equal(np.array(keys), before)
    with pytest.raises(RuntimeError, match=r"target_ids\[0\] is 2, the pool has 2 pages"):
        mx.eval(ops.copy_pages(keys, values, ids(0), ids(2)))
    keys, values = ops.write_pages(keys, values, row, row, ids(7, 0))
    assert keys[1, 0, :, 3].tolist() == [1.0, 1.0, 1.0]


def test_wrong_arguments_are_named() -> None:
    keys, values = pools(2, 1, 4, (3, 3), mx.float32)
    row = mx.ones((1, 1, 3))
    with pytest.raises(ValueError, match="slot_mapping must be int32"):
        ops.write_pages(keys, values, row, row, mx.array([0]).astype(mx.int64))
    with pytest.raises(ValueError, match="must have D of 3 and 3"):
        ops.write_pages(keys, values, mx.ones((1, 1, 2)), row, ids(0))
    with pytest.raises(ValueError, match="pools differ in page_size: 3 and 4"):
        ops.write_pages(values, values, row, row, ids(0))
    (square, _) = pools(2, 1, 3, (3, 3), mx.float32)
    with pytest.raises(ValueError, match="two buffers"):
        mx.eval(ops.write_pages(square, square, row, row, ids(0)))
    with pytest.raises(ValueError, match="must be contiguous"):
        mx.eval(ops.write_pages(keys[..., ::2], values[:, :, :2], row, row, ids(0)))


def test_nothing_to_write() -> None:
    keys, values = pools(2, 1, 4, (3, 3), mx.float32)
    none = mx.zeros((0, 1, 3))
    got = ops.write_pages(keys, values, none, none, mx.zeros((0,), dtype=mx.int32))
    assert mx.array_equal(got[0], keys)
    empty = mx.zeros((0, 1, 3, 4))
    other = mx.zeros((0, 1, 4, 3))
    assert ops.write_pages(empty, other, none, none, mx.zeros((0,), dtype=mx.int32))[0].shape == (0, 1, 3, 4)


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 3, 4), (4,), (2, 0), (9, 300_000)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32, mx.uint8])
def test_resized_rows_keep_what_they_can(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    before = (mx.random.normal(shape) * 100).astype(dtype)
    for count in (0, 1, shape[0], shape[0] + 3):
        got = ops.resize_rows(before, count)
        assert got.shape == (count, *shape[1:])
        assert got.dtype == dtype
        kept = min(count, shape[0])
        assert mx.array_equal(got[:kept], before[:kept])
        assert not mx.any(got[kept:] != 0)


def test_resized_memory_lives_as_long_as_its_arrays_and_is_aligned() -> None:
    parts = [ops.resize_rows(mx.full((64,), float(index)), 64) for index in range(200)]
    kept = [part[1:] for part in parts[::3]]
    assert all(address(part) % 64 == 0 for part in parts)
    del parts
    others = [ops.resize_rows(mx.full((64,), -1.0), 64) for _ in range(200)]
    assert [part[0].item() for part in kept] == [float(index) for index in range(0, 200, 3)]
    assert all(part[0].item() == -1.0 for part in others)


def test_resized_rows_are_usable_in_place_of_any_array() -> None:
    array = ops.resize_rows(mx.arange(12).reshape(4, 3).astype(mx.float32), 4)
    total = (array + 1.0) * array.T.T
    del array
    assert total.sum().item() == sum(i * (i + 1) for i in range(12))
    strided = mx.arange(12).reshape(3, 4).T
    assert mx.array_equal(ops.resize_rows(strided, 2), strided[:2])
