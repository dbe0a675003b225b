from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.mark.parametrize("k", [32, 96, 192, 640])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_embedded_rows_are_the_dequantized_ones(k: int, dtype: mx.Dtype, bits: int | None) -> None:
    table = mx.random.normal((50, k)).astype(dtype)
    ids = mx.array([[0, 49, 7], [7, -3, -50]], dtype=mx.int32)
    if bits is None:
        given, reference_given = ops.embed_rows(ids, table), reference.embed_rows(ids, table)
    else:
        w, scales, biases = mx.quantize(table, group_size=32, bits=bits)
        given = ops.embed_rows(ids, w, scales, biases, group_size=32, bits=bits)
        reference_given = reference.embed_rows(ids, w, scales, biases, group_size=32, bits=bits)
    assert given.dtype == mx.float32
    np.testing.assert_array_equal(np.array(given), np.array(reference_given))


@pytest.mark.parametrize("k", [1, 5, 37])
def test_narrow_dense_tables(k: int) -> None:
    table = mx.random.normal((9, k)).astype(mx.bfloat16)
    ids = mx.array([8, 0], dtype=mx.int32)
    np.testing.assert_array_equal(
        np.array(ops.embed_rows(ids, table)), np.array(reference.embed_rows(ids, table))
    )


@pytest.mark.parametrize("wrong", [-51, 50])
def test_an_id_outside_the_table_is_refused(wrong: int) -> None:
    rows = ops.embed_rows(mx.array([3, wrong], dtype=mx.int32), mx.zeros((50, 32)))
    with pytest.raises(RuntimeError, match=f"embed_rows: id {wrong} at 1, the table has 50 rows"):
        mx.eval(rows)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 1000, 49152])
def test_greedy_takes_the_first_of_the_best(size: int) -> None:
    values = np.round(np.random.default_rng(size).standard_normal((40, size)) * 2).astype(np.float32)
    given = np.array(ops.greedy_tokens(mx.array(values)))
    np.testing.assert_array_equal(given, values.argmax(-1))


@pytest.mark.parametrize("place", [0, 15, 16, 34, 36])
def test_greedy_marks_rows_with_a_nan(place: int) -> None:
    values = np.random.default_rng(2).standard_normal((3, 37)).astype(np.float32)
    values[1, place] = np.nan
    values[2] = -np.inf
    expected = [values[0].argmax(), -1, 0]
    np.testing.assert_array_equal(np.array(ops.greedy_tokens(mx.array(values))), expected)


def test_greedy_of_rows_that_are_not_contiguous() -> None:
    values = mx.random.normal((37, 5))
    np.testing.assert_array_equal(np.array(ops.greedy_tokens(values.T)), np.array(values).T.argmax(-1))
