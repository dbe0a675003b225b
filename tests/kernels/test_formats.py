"""Weights of every quantization mode: read bit for bit as mx.dequantize has them, on each instruction set."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops
from mlxserve_kernels.decoder import Projection
from mlxserve_kernels.dispatch import extension, reads_quantized

from .conftest import RunPython

pytestmark = pytest.mark.usefixtures("cpu_kernels")

AFFINE = [("affine", group, bits) for bits, group in itertools.product((2, 3, 5, 6), (32, 64, 128))]
FLOATS = [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]

# Every pattern of bits, with results of both paths, on the instruction set of the process.
PROGRAM = """
import mlx.core as mx, numpy as np
from mlxserve_kernels import ops

mx.random.seed(3)
rng = np.random.default_rng(3)
formats = [("affine", g, b) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
for mode, group, bits in [*formats, ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]:
    options = {"group_size": group, "bits": bits, "mode": mode}
    for n, k in ((1, 128), (7, 640), (50, 1408)):
        w = mx.array(rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32))
        if mode == "affine":
            scales, biases = (mx.random.normal((n, k // group)) for _ in range(2))
        else:
            low, high = (0, 126) if mode == "nvfp4" else (117, 137)
            scales, biases = mx.array(rng.integers(low, high, (n, k // group), dtype=np.uint8)), None
            if mode == "mxfp8":
                codes = rng.integers(0, 127, (n, k)) + 128 * rng.integers(0, 2, (n, k))
                w = mx.array(codes.astype(np.uint8).view(np.uint32))
        dense = mx.dequantize(w, scales, biases, dtype=mx.float32, **options)
        ids = mx.arange(n).astype(mx.int32)
        assert mx.array_equal(ops.embed_rows(ids, w, scales, biases, **options), dense), (mode, bits, group)
        for rows in (1, 2, 3, 4, 5, 19):
            x = mx.random.normal((rows, k))
            y = ops.quantized_matmul(x, w, scales, biases, **options)
            assert mx.array_equal(y, ops.linear(x, dense)), (mode, bits, group, n, rows)
            assert mx.allclose(y, x @ dense.T, rtol=1e-4, atol=1e-4 * float(mx.abs(dense).max()))
print(ops.implementation())
"""


def test_every_instruction_set_reads_every_format(run_python: RunPython) -> None:
    module = extension()
    assert module is not None
    for isa in module.available_isas():
        result = run_python(PROGRAM, MLXSERVE_CPU_ISA=isa)
        assert (result.returncode, result.stdout.strip()) == (0, f"cpu-{isa}"), result.stderr


@pytest.mark.parametrize(("mode", "group", "bits"), FLOATS)
def test_every_scale_and_code(mode: str, group: int, bits: int) -> None:
    """NaN, infinity, zeros of both signs and numbers below the normal ones as well."""
    codes = np.arange(256, dtype=np.uint8).reshape(2, -1)
    w = mx.array(np.tile(codes.view(np.uint32), (128, 1)))
    k = w.shape[1] * 32 // bits
    scales = mx.broadcast_to(mx.arange(256).astype(mx.uint8)[:, None], (256, k // group))
    options = {"group_size": group, "bits": bits, "mode": mode}
    want = np.array(mx.dequantize(w, scales, dtype=mx.float32, **options))
    got = np.array(ops.embed_rows(mx.arange(256).astype(mx.int32), w, scales, **options))
    assert np.array_equal(got, want, equal_nan=True)
    is_number = ~np.isnan(want)
    assert np.array_equal(np.signbit(got)[is_number], np.signbit(want)[is_number])
    assert 0 < is_number.sum() < want.size


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("mode", "group", "bits"), AFFINE)
def test_narrow_scales_are_widened(mode: str, group: int, bits: int, dtype: mx.Dtype) -> None:
    w, scales, biases = mx.quantize(mx.random.normal((33, 384)), group_size=group, bits=bits)
    narrow = scales.astype(dtype), biases.astype(dtype)
    wide = [part.astype(mx.float32) for part in narrow]
    for rows in (1, 9):
        x = mx.random.normal((rows, 384))
        got = ops.quantized_matmul(x, w, *narrow, group_size=group, bits=bits)
        assert mx.array_equal(got, ops.quantized_matmul(x, w, *wide, group_size=group, bits=bits))


@pytest.mark.parametrize(("mode", "group", "bits"), [*AFFINE, *FLOATS])
def test_rows_do_not_depend_on_each_other(mode: str, group: int, bits: int) -> None:
    w, scales, *rest = mx.quantize(mx.random.normal((61, 256)), group_size=group, bits=bits, mode=mode)
    biases = rest[0] if rest else None
    options = {"group_size": group, "bits": bits, "mode": mode}
    x = mx.random.normal((40, 256))
    x[3] = mx.nan
    x[4] = 0
    y = ops.quantized_matmul(x, w, scales, biases, **options)
    assert bool(mx.isnan(y[3]).all()) and not bool(mx.isnan(y[4:]).any())
    assert mx.array_equal(y[4], mx.zeros((61,)))
    for row in (0, 17, 39):
        assert mx.array_equal(ops.quantized_matmul(x[row], w, scales, biases, **options), y[row])
    half = slice(None, None, 2)
    rest_of_rows = None if biases is None else biases[half]
    assert mx.array_equal(
        ops.quantized_matmul(x[5:], w[half], scales[half], rest_of_rows, **options), y[5:, half]
    )


@pytest.mark.parametrize(("mode", "group", "bits"), [*AFFINE, *FLOATS])
def test_projections_take_every_format(mode: str, group: int, bits: int) -> None:
    w, scales, *rest = mx.quantize(mx.random.normal((8, 256)), group_size=group, bits=bits, mode=mode)
    biases = rest[0] if rest else None
    assert Projection(w, scales, biases, group, bits, mode=mode).is_supported


def test_what_is_not_read() -> None:
    parts = mx.quantize(mx.random.normal((8, 48)), group_size=16, bits=4, mode="nvfp4")
    assert not reads_quantized(parts[0], parts[1], group_size=16, bits=4, mode="nvfp4")
    x = mx.random.normal((2, 48))
    y = ops.quantized_matmul(x, parts[0], parts[1], None, group_size=16, bits=4, mode="nvfp4")
    dense = mx.dequantize(*parts, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32)
    assert mx.allclose(y, x @ dense.T, rtol=1e-4, atol=1e-4)


def test_wrong_parts_are_named() -> None:
    w, scales = mx.quantize(mx.random.normal((8, 64)), group_size=32, bits=4, mode="mxfp4")
    x = mx.zeros((1, 64))
    with pytest.raises(ValueError, match=r"scales must be uint8 \[8, 2\]"):
        ops.quantized_matmul(x, w, scales[:, :1], None, group_size=32, bits=4, mode="mxfp4")
    with pytest.raises(ValueError, match=r"scales must be uint8 \[8, 2\]"):
        ops.quantized_matmul(x, w, scales.astype(mx.float32), None, group_size=32, bits=4, mode="mxfp4")
