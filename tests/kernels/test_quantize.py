"""Quantization: bits equal to MLX's own, and a search that never does worse."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference

pytestmark = pytest.mark.usefixtures("isa")

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
OTHERS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def _values(rows: int, columns: int, scale: float = 1.0, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * scale


def _assert_same(x: mx.array, mode: str, bits: int, group: int) -> None:
    ours = ops.quantize(x, group_size=group, bits=bits, mode=mode)
    theirs = mx.quantize(x, group_size=group, bits=bits, mode=mode)
    for mine, other in zip([part for part in ours if part is not None], theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        kind = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[mine.itemsize]
        is_nan = np.array(mx.isnan(other.astype(mx.float32))) if mine.dtype in DTYPES else False
        equal = np.array(mine.view(kind)) == np.array(other.view(kind))
        if mine.dtype in DTYPES:
            assert np.array_equal(is_nan, np.array(mx.isnan(mine.astype(mx.float32))))
        assert (equal | is_nan).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "bits", "group"), AFFINE + OTHERS)
def test_bits_are_those_of_mlx(mode: str, bits: int, group: int, dtype: mx.Dtype) -> None:
    # One group, a tile that is not full, several tiles; small, usual and large values.
    for rows, scale in itertools.product((1, 3, 67), (1e-4, 0.02, 30.0)):
        # mx.quantize takes whole words of 32 values only.
        columns = max(group, 32) * 5
        _assert_same(mx.array(_values(rows, columns, scale, rows)).astype(dtype), mode, bits, group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "bits", "group"), AFFINE + OTHERS)
def test_odd_groups_are_as_mlx_has_them(mode: str, bits: int, group: int, dtype: mx.Dtype) -> None:
    x = _values(24, group)
    x[0] = 0.0
    x[1] = -0.0
    x[2] = 0.37
    x[3] = -0.37
    x[4, 1:] = 0.0
    x[5] = np.abs(x[5])
    x[6] = -np.abs(x[6])
    x[7] = x[7] * 0.01 + 2.0
    x[8] = x[8] * 0.01 - 2.0
    x[9] *= 1e-7
    x[10] = np.arange(group)
    x[11] = np.where(np.arange(group) % 2 == 0, 1.0, -1.0)
    x[12, 5] = 1000.0
    x[13, 5] = -1000.0
    _assert_same(mx.array(x).astype(dtype), mode, bits, group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "bits", "group"), AFFINE)
def test_affine_nan_and_infinity_are_as_mlx_has_them(
    mode: str, bits: int, group: int, dtype: mx.Dtype
) -> None:
    x = _values(8, group)
    x[0, 3] = np.nan
    x[1, 3] = np.inf
    x[2, 3] = -np.inf
    x[3] = np.nan
    x[4] = np.inf
    x[5, :2] = [np.inf, -np.inf]
    _assert_same(mx.array(x).astype(dtype), mode, bits, group)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("mode", "bits", "group"), OTHERS)
def test_each_16_bit_value_is_rounded_as_mlx_does(mode: str, bits: int, group: int, dtype: mx.Dtype) -> None:
    every = mx.arange(1 << 16, dtype=mx.uint32).astype(mx.uint16).view(dtype)
    values = np.array(every.astype(mx.float32))
    values = values[np.isfinite(values) & (np.abs(values) <= 448) & (np.abs(values) >= 2**-20)]
    values = np.resize(values, (len(values) // (group - 1) + 1, group - 1))
    # The largest of a group settles its scale: the others meet each way to round.
    x = np.concatenate([np.full((len(values), 1), 448.0, np.float32), values], axis=1)
    x = x[: len(x) // 2 * 2]
    for scale in (1.0, 0.75, 2**-6):
        _assert_same(mx.array(x * scale).astype(dtype), mode, bits, group)


def test_rows_that_are_not_contiguous_and_more_axes() -> None:
    x = mx.array(_values(64, 96)).T[:, 32:]
    _assert_same(x, "affine", 4, 32)
    _assert_same(mx.array(_values(24, 64)).reshape(2, 3, 4, 64), "affine", 3, 64)


def _error(x: mx.array, parts: Any, bits: int, group: int, weights: Any = 1.0) -> np.ndarray[Any, Any]:
    """Sums of squares of each group, in float64 with the stored numbers."""
    words, scales, biases = parts
    values = mx.dequantize(
        words, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    away = np.array(values).astype(np.float64) - np.array(x.astype(mx.float32)).astype(np.float64)
    return (away**2 * weights).reshape(-1, group).sum(axis=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "bits", "group"), AFFINE)
@pytest.mark.parametrize("implementation", [ops, reference], ids=["ops", "reference"])
def test_search_is_never_worse_and_on_the_whole_better(
    implementation: Any, mode: str, bits: int, group: int, dtype: mx.Dtype
) -> None:
    x = _values(67, group * 3, 0.05)
    x[:4] = [[0.0], [0.4], [-3.0], [1e-6]]
    x[5] = x[5] * 0.01 + 1
    x[6, 7] = 4.0
    values = mx.array(x).astype(dtype)
    plain = _error(values, mx.quantize(values, group_size=group, bits=bits), bits, group)
    parts = implementation.quantize(values, group_size=group, bits=bits, effort=ops.SEARCH_EFFORT)
    found = _error(values, parts, bits, group)
    assert (found <= plain * (1 + 1e-4) + 1e-12).all()
    assert found.sum() < plain.sum() * (0.97 if bits <= 4 else 1.0)


def test_search_weighs_columns_by_their_importance() -> None:
    x = mx.array(_values(32, 128, 0.05))
    importance = np.random.default_rng(1).lognormal(sigma=2.0, size=128).astype(np.float32)
    settings = {"group_size": 64, "bits": 3, "effort": ops.SEARCH_EFFORT}
    for implementation in (ops, reference):
        plain = implementation.quantize(x, **settings)
        weighed = implementation.quantize(x, importance=mx.array(importance), **settings)
        errors = [_error(x, parts, 3, 64, importance).sum() for parts in (plain, weighed)]
        assert errors[1] < 0.9 * errors[0]


def test_wrong_arguments_are_refused() -> None:
    x = mx.zeros((2, 96))
    with pytest.raises(ValueError, match="multiple of 64"):
        ops.quantize(x, group_size=64, bits=4)
    with pytest.raises(ValueError, match="2, 3, 4, 5, 6 or 8"):
        ops.quantize(x, group_size=32, bits=7)
    with pytest.raises(ValueError, match="only affine"):
        ops.quantize(x, group_size=32, bits=4, mode="mxfp4", effort=3)
    with pytest.raises(ValueError, match="importance"):
        ops.quantize(x, group_size=32, bits=4, importance=mx.ones(96))
