"""Affine weights in tiles: nothing is lost, and products are as near to the true ones as float32 sums are."""

from __future__ import annotations

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import extension

from .conftest import RunPython

Weights = tuple[mx.array, mx.array, mx.array]


@pytest.fixture(autouse=True)
def needs_tiles() -> None:
    cpu = extension()
    if cpu is None or not cpu.has_tiles():
        pytest.skip("this CPU has no AVX-512 VNNI")


def quantized(n: int, k: int, group: int, bits: int, dtype: mx.Dtype = mx.float32) -> Weights:
    w, scales, biases = mx.quantize(mx.random.normal((n, k)) + 0.1, group_size=group, bits=bits)
    return w, scales.astype(dtype), biases.astype(dtype)


def matmul(x: mx.array, weights: Weights, group: int, bits: int) -> mx.array:
    tiles = ops.pack_tiles(*weights, group_size=group, bits=bits)
    return ops.tiled_matmul(x, tiles, group_size=group, bits=bits, scale_dtype=weights[1].dtype)


def exact(x: mx.array, weights: Weights, group: int, bits: int) -> np.ndarray:
    """The product in float64 of the weights that mx.dequantize gives."""
    w, scales, biases = weights
    wide = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
    return np.array(x).astype(np.float64) @ np.array(wide).astype(np.float64).T


GRID = list(itertools.product((4, 8), (32, 64, 128), (mx.float32, mx.float16, mx.bfloat16)))


@pytest.mark.parametrize(("bits", "group", "dtype"), GRID)
def test_packing_loses_nothing(bits: int, group: int, dtype: mx.Dtype) -> None:
    weights = quantized(48, 3 * group, group, bits, dtype)
    tiles = ops.pack_tiles(*weights, group_size=group, bits=bits)
    assert tiles.nbytes == sum(part.nbytes for part in weights)
    for got, want in zip(
        ops.unpack_tiles(tiles, group_size=group, bits=bits, scale_dtype=dtype), weights, strict=True
    ):
        assert got.dtype == want.dtype
        assert mx.array_equal(got, want)
    ids = mx.array([0, 47, -1, 17, 16], dtype=mx.int32)
    rows = ops.tiled_rows(ids, tiles, group_size=group, bits=bits, scale_dtype=dtype)
    assert mx.array_equal(rows, ops.embed_rows(ids, *weights, group_size=group, bits=bits))


@pytest.mark.parametrize(("bits", "group", "dtype"), GRID)
def test_errors_have_their_bound(bits: int, group: int, dtype: mx.Dtype) -> None:
    """Half a unit (2**-22 of a block's largest value) for each weight, and the rounding of float32 sums."""
    for n, groups, rows in (
        (16, 1, 1),
        (48, 3, 2),
        (112, 5, 3),
        (80, 2, 4),
        (16, 4, 5),
        (96, 3, 23),
        (32, 1, 130),
    ):
        weights = quantized(n, groups * group, group, bits, dtype)
        spread = mx.exp(mx.random.normal((rows, groups * group)))
        x = mx.random.normal(spread.shape) * spread
        ours = np.abs(np.array(matmul(x, weights, group, bits)) - exact(x, weights, group, bits))
        largest = np.abs(np.array(x)).reshape(rows, -1, 32).max(axis=2).repeat(32, axis=1)
        sizes = exact(mx.array(largest), tuple(abs_weights(weights, group, bits)), group, bits)  # type: ignore[arg-type]
        assert (ours <= 2.0**-22 * sizes).all()


def abs_weights(weights: Weights, group: int, bits: int) -> list[mx.array]:
    """Weights not smaller than the absolute ones of each group."""
    w, scales, biases = weights
    ends = [mx.abs(biases.astype(mx.float32)), mx.abs(scales * (2**bits - 1) + biases).astype(mx.float32)]
    return [mx.zeros_like(w), mx.zeros(scales.shape), mx.maximum(*ends)]


@pytest.mark.parametrize("bits", [4, 8])
def test_errors_of_long_sums_are_like_float32s(bits: int) -> None:
    weights = quantized(256, 1536, 32, bits, mx.float16)
    x = mx.random.normal((20, 1536))
    want = exact(x, weights, 32, bits)
    ours = np.array(matmul(x, weights, 32, bits)) - want
    floats = np.array(ops.quantized_matmul(x, *weights, group_size=32, bits=bits)) - want
    assert np.sqrt((ours**2).mean()) < 1.5 * np.sqrt((floats**2).mean())


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_integers_do_not_overflow(bits: int) -> None:
    """All weights at an end of their range, all values of x equal and largest in their block."""
    for q in (0, 2**bits - 1):
        word = sum(q << shift for shift in range(0, 32, bits))
        weights = (
            mx.full((16, 128 * bits // 32), word, dtype=mx.uint32),
            mx.full((16, 1), 2.0),
            mx.full((16, 1), -3.0),
        )
        for value in (1.0, -1.0, 1.9999999, -1.9999999, 1e33, 1e-25, 2.0**-90):
            x = mx.full((2, 128), value)
            want = exact(x, weights, 128, bits)
            limit = 2.0**-22 * value * 128 * 2 * 2**bits
            assert np.abs(np.array(matmul(x, weights, 128, bits)) - want).max() <= abs(limit)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    weights = quantized(112, 576, 32, 4, mx.float16)
    x = mx.random.normal((300, 576))
    whole = np.array(matmul(x, weights, 32, 4))
    for begin, end in ((0, 1), (7, 9), (130, 133), (0, 4), (10, 15), (17, 150)):
        np.testing.assert_array_equal(np.array(matmul(x[begin:end], weights, 32, 4)), whole[begin:end])
    for columns in (slice(0, 16), slice(32, 80)):
        part = tuple(each[columns] for each in weights)
        np.testing.assert_array_equal(np.array(matmul(x, part, 32, 4)), whole[:, columns])  # type: ignore[arg-type]


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_strange_values_reach_their_row_alone(strange: float) -> None:
    weights = quantized(32, 64, 32, 8)
    x = np.array(mx.random.normal((6, 64)))
    clean = np.array(matmul(mx.array(x), weights, 32, 8))
    x[2, 40] = strange
    got = np.array(matmul(mx.array(x), weights, 32, 8))
    assert np.isnan(got[2]).all()
    keep = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(got[keep], clean[keep])


def test_zeros_no_rows_and_strides() -> None:
    weights = quantized(32, 64, 32, 4)
    assert not mx.any(matmul(mx.zeros((3, 64)), weights, 32, 4) != 0)
    assert matmul(mx.zeros((0, 64)), weights, 32, 4).shape == (0, 32)
    x = mx.random.normal((64, 2, 3)).transpose(1, 2, 0)
    assert mx.array_equal(matmul(x, weights, 32, 4), matmul(mx.contiguous(x), weights, 32, 4))


def test_wrong_arguments_are_named() -> None:
    w, scales, biases = quantized(24, 64, 32, 4)
    with pytest.raises(ValueError, match="N a multiple of 16"):
        ops.pack_tiles(w, scales, biases, group_size=32, bits=4)
    assert not ops.can_tile(scales, biases, 24, group_size=32, bits=4)
    assert not ops.can_tile(scales, biases, 32, group_size=32, bits=6)
    assert not ops.can_tile(scales.astype(mx.uint8), None, 32, group_size=32, bits=4, mode="mxfp4")
    assert not ops.can_tile(scales, None, 32, group_size=32, bits=4)
    tiles = ops.pack_tiles(*quantized(32, 64, 32, 4), group_size=32, bits=4)
    with pytest.raises(ValueError, match="x has 65 columns, w has 64"):
        ops.tiled_matmul(mx.zeros((1, 65)), tiles, group_size=32, bits=4, scale_dtype=mx.float32)
    with pytest.raises(ValueError, match="a group of a tile must have 320 bytes, got 384"):
        ops.tiled_matmul(mx.zeros((1, 64)), tiles, group_size=32, bits=4, scale_dtype=mx.float16)
    with pytest.raises(RuntimeError, match="id 32 at 0, the table has 32 rows"):
        mx.eval(
            ops.tiled_rows(
                mx.array([32], dtype=mx.int32), tiles, group_size=32, bits=4, scale_dtype=mx.float32
            )
        )


ROUNDED = """
import json, mlx.core as mx, numpy as np
from mlxserve_kernels import ops
mx.random.seed(3)
w, s, b = mx.quantize(mx.random.normal((64, 512)), group_size=32, bits=4)
tiles = ops.pack_tiles(w, s, b, group_size=32, bits=4)
errors = []
for rows in (1, 9):
    x = mx.random.normal((rows, 512))
    y = ops.tiled_matmul(x, tiles, group_size=32, bits=4, scale_dtype=s.dtype)
    want = np.array(x).astype(np.float64) @ np.array(mx.dequantize(w, s, b, group_size=32, bits=4)).T
    errors.append(float(np.abs(np.array(y) - want).mean() / np.abs(want).mean()))
print(json.dumps(errors))
"""


def test_the_setting_rounds_activations(run_python: RunPython) -> None:
    bounds = {"exact": (1e-9, 1e-6), "int16": (1e-6, 1e-4), "int8": (1e-4, 2e-2)}
    for value, (low, high) in bounds.items():
        result = run_python(ROUNDED, MLXSERVE_CPU_MATMUL=value)
        assert result.returncode == 0, result.stderr
        assert all(low < error < high for error in json.loads(result.stdout)), (value, result.stdout)
    result = run_python(ROUNDED, MLXSERVE_CPU_MATMUL="fp8")
    assert "MLXSERVE_CPU_MATMUL must be one of exact, int16, int8, got 'fp8'" in result.stderr
