"""Products with quantized weights, run as Metal: near the reference, each byte of the weights once, a row's
bits its own; faults are caught."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_on_host import Host, MetalFault, MetalHostError, Settings
from mlxserve_kernels import reference
from mlxserve_kernels.decoder import Projection
from mlxserve_kernels.experts import Activation
from mlxserve_kernels.metal_kernels.matmul import MatmulKernels
from mlxserve_kernels.metal_kernels.weights import QuantizedWeight, ScaleSource
from tests.metal.conftest import Plant, kind_of
from tests.metal.products import assert_close, assert_weights_once, quantized, true_product

FORMATS = [
    (64, 4, "affine"),
    (32, 8, "affine"),
    (32, 2, "affine"),
    (128, 3, "affine"),
    (64, 5, "affine"),
    (32, 6, "affine"),
    (32, 4, "mxfp4"),
    (32, 8, "mxfp8"),
    (16, 4, "nvfp4"),
]


def matmul(host: Host, x: mx.array, weight: QuantizedWeight, bias: mx.array | None = None) -> mx.array:
    return MatmulKernels(host.metal_kernel).quantized_matmul(
        x,
        weight.w,
        weight.scales,
        weight.biases,
        group_size=weight.group_size,
        bits=weight.bits,
        mode=weight.mode,
        bias=bias,
    )


@pytest.mark.parametrize(("group_size", "bits", "mode"), FORMATS)
@pytest.mark.parametrize("rows", [1, 5])
def test_formats(host: Host, rows: int, group_size: int, bits: int, mode: str) -> None:
    """13 outputs leave a simdgroup with one and others with none; 640 values end within a step of 256."""
    x = mx.random.normal((rows, 640))
    weight = quantized(13, 640, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
    assert_close(matmul(host, x, weight), true_product(x, weight), mx.float32)


@pytest.mark.full
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_all_affine_formats(host: Host, dtype: mx.Dtype, rows: int, group_size: int, bits: int) -> None:
    x = mx.random.normal((rows, 384)).astype(dtype)
    weight = quantized(37, 384, group_size=group_size, bits=bits, dtype=dtype)
    assert_close(matmul(host, x, weight), true_product(x, weight), dtype)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [(mx.float16, mx.float16), (mx.bfloat16, mx.bfloat16), (mx.bfloat16, mx.float32)],
)
@pytest.mark.parametrize("rows", [2, 16])
def test_dtypes(host: Host, rows: int, dtype: mx.Dtype, scale_dtype: mx.Dtype) -> None:
    x = mx.random.normal((rows, 576)).astype(dtype)
    weight = quantized(40, 576, dtype=scale_dtype)
    assert_close(matmul(host, x, weight), true_product(x, weight), dtype)


@pytest.mark.parametrize(("outputs", "size"), [(1, 32), (3, 64), (8, 32), (33, 2080)])
@pytest.mark.parametrize("rows", [1, 3])
def test_odd_shapes(host: Host, rows: int, outputs: int, size: int) -> None:
    """The first ones are arrays of fewer than 8 elements; the last one has more than 32 groups."""
    x = mx.random.normal((rows, size))
    weight = quantized(outputs, size, group_size=32, dtype=mx.float32)
    assert_close(matmul(host, x, weight), true_product(x, weight), mx.float32)


@pytest.mark.parametrize(("outputs", "dtype"), [(9, mx.float32), (5, mx.float16)])
def test_bias(host: Host, outputs: int, dtype: mx.Dtype) -> None:
    x, bias = mx.random.normal((3, 64)), mx.random.normal((outputs,)).astype(dtype)
    weight = quantized(outputs, 64, dtype=mx.float32)
    assert_close(matmul(host, x, weight, bias), true_product(x, weight) + bias, mx.float32)


def test_row_does_not_depend_on_its_batch(host: Host) -> None:
    """Tiles of 1, 2, 4, 8, 16 rows, and three of them; rows in the first, the middle and the last place."""
    x = mx.random.normal((35, 704)).astype(mx.float16)
    weight = quantized(24, 704)
    y = matmul(host, x, weight)
    assert_close(y, true_product(x, weight), mx.float16)
    for begin, end in ((0, 1), (34, 35), (6, 8), (3, 6), (15, 17), (20, 28), (17, 33)):
        assert mx.array_equal(matmul(host, x[begin:end], weight), y[begin:end]).item()


def test_leading_axes_and_non_contiguous_rows(host: Host) -> None:
    x = mx.random.normal((128, 3, 2)).T
    weight = quantized(16, 128, dtype=mx.float32)
    assert_close(matmul(host, x, weight), true_product(x, weight), mx.float32)
    assert matmul(host, x[:0], weight).shape == (0, 3, 16)
    row = mx.random.normal((128,))
    assert_close(matmul(host, row, weight), true_product(row, weight), mx.float32)


def test_rows_of_a_stacked_matrix(host: Host) -> None:
    x = mx.random.normal((2, 96))
    weight = quantized(20, 96, group_size=32, dtype=mx.float32)
    part = QuantizedWeight.of("", Projection(*weight[:5], begin=7, end=19))
    assert mx.array_equal(matmul(host, x, part), matmul(host, x, weight)[:, 7:19]).item()
    with pytest.raises(ValueError, match="no kernel for dense"):
        QuantizedWeight.of("", Projection(mx.ones((4, 96))))


@pytest.mark.parametrize("rows", [1, 3])
def test_arrays_that_start_where_they_may(cache_dir: Path, rows: int) -> None:
    host = Host(Settings(cache_dir=cache_dir, slice_offset=8))
    x = mx.random.normal((rows, 96)).astype(mx.float16)
    matmul(host, x, quantized(9, 96, group_size=32, bits=8))


def test_not_numbers_stay_in_their_rows(host: Host) -> None:
    """Neither a row's neighbours nor lanes beyond its end mix with a NaN or an infinity."""
    x = np.ones((4, 288), np.float32)
    x[1, 287], x[2, 0] = np.nan, np.inf
    weight = quantized(8, 288, group_size=32, dtype=mx.float32)
    y = np.array(matmul(host, mx.array(x), weight))
    assert np.isfinite(y[[0, 3]]).all()
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(
    ("outputs", "size", "group_size", "bits", "dtype"),
    [
        (40, 2048, 64, 4, mx.float16),
        (36, 3072, 64, 4, mx.bfloat16),
        (64, 1024, 32, 8, mx.float16),
        (32, 1536, 64, 4, mx.bfloat16),
        (64, 576, 64, 4, mx.float16),
        (64, 576, 32, 4, mx.float16),
        (64, 896, 64, 4, mx.bfloat16),
        (32, 2304, 64, 4, mx.float16),
        pytest.param(64, 576, 64, 8, mx.float16, marks=pytest.mark.full),
        pytest.param(64, 960, 64, 4, mx.float16, marks=pytest.mark.full),
        pytest.param(32, 4864, 64, 4, mx.float16, marks=pytest.mark.full),
    ],
)
def test_each_weight_once_and_coalesced(
    cache_dir: Path, rows: int, outputs: int, size: int, group_size: int, bits: int, dtype: mx.Dtype
) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    x = mx.random.normal((rows, size)).astype(dtype)
    matmul(host, x, quantized(outputs, size, group_size=group_size, bits=bits, dtype=dtype))
    report = host.reports[-1]
    assert_weights_once(report, ("w", "scales", "biases"))
    assert report.buffer("w").coalescing >= 0.99
    # x once for each threadgroup where it is shared, else once a simdgroup of 4 outputs.
    readers = outputs // 4 if rows < 3 else -(-outputs // 32)
    assert report.buffer("x").simd_read == readers * x.nbytes
    assert report.threadgroup_bytes <= 16384


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize(("size", "group_size"), [(2048, 64), (576, 64), (576, 32), (896, 64)])
def test_gate_and_up_once_and_coalesced(cache_dir: Path, rows: int, size: int, group_size: int) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    x = mx.random.normal((rows, size)).astype(mx.float16)
    gate, up = (quantized(64, size, group_size=group_size) for _ in range(2))
    MatmulKernels(host.metal_kernel).gate_up(x, gate, up, activation="silu")
    names = tuple(f"{part}_{name}" for part in ("gate", "up") for name in ("w", "scales", "biases"))
    assert_weights_once(host.reports[-1], names)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_gate_up(host: Host, dtype: mx.Dtype, rows: int, activation: Activation) -> None:
    """Large products, so that the activations saturate; the weights are halves of one."""
    x = (2 * mx.random.normal((rows, 96))).astype(dtype)
    stacked = quantized(38, 96, group_size=32, dtype=dtype)
    gate, up = stacked.rows(0, 19), stacked.rows(19, 38)
    kernels = MatmulKernels(host.metal_kernel)
    y = kernels.gate_up(x, gate, up, activation=activation)
    both = true_product(x, stacked)
    assert_close(y, reference.gated(both[:, :19], both[:, 19:], activation), dtype)
    assert mx.array_equal(kernels.gate_up(x[:1], gate, up, activation=activation), y[:1]).item()


def test_gate_up_with_biases(host: Host) -> None:
    x, biases = mx.random.normal((2, 64)), mx.random.normal((2, 5))
    gate, up = quantized(5, 64, dtype=mx.float32), quantized(5, 64, dtype=mx.float32)
    kernels = MatmulKernels(host.metal_kernel)
    y = kernels.gate_up(x, gate, up, activation="silu", gate_bias=biases[0], up_bias=biases[1])
    products = true_product(x, gate) + biases[0], true_product(x, up) + biases[1]
    assert_close(y, reference.gated(*products, "silu"), mx.float32)
    with pytest.raises(ValueError, match="gate and up must be alike"):
        kernels.gate_up(x, gate, up, activation="silu", gate_bias=biases[0])
    with pytest.raises(ValueError, match="gate and up must be alike"):
        kernels.gate_up(x, gate, up.rows(0, 4), activation="silu")
    narrow = biases[1].astype(mx.float16)
    with pytest.raises(ValueError, match="biases must have one dtype"):
        kernels.gate_up(x, gate, up, activation="silu", gate_bias=biases[0], up_bias=narrow)


def test_more_rows_read_the_weights_once_a_tile(host: Host) -> None:
    x = mx.random.normal((33, 256)).astype(mx.float16)
    weight = quantized(32, 256)
    matmul(host, x, weight)
    assert host.reports[-1].buffer("w").simd_read == 3 * weight.w.nbytes


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
STAGING = BARRIER + "\n    const int at"
STORED = "to[1] = *(const device vec<T, 4>*)(from + 4);\n    }\n    "
HANDED = "const typename ScaleItems<U>::Item own = scales[j].from_lane(holder);"
REDUCED = "sums[j][m] = simd_sum("
BIASED = "sums[Which * Outputs + i][m] += float(bias[n + i]);"


@pytest.mark.parametrize(
    ("rows", "old", "new", "kind"),
    [
        (3, STORED + BARRIER, STORED, "uninitialised read"),
        (3, STAGING, "const int at", "race"),
        (3, STAGING, "if (simdgroup < 4) " + STAGING, "divergent barrier"),
        (3, "mem_flags::mem_threadgroup", "mem_flags::mem_none", "race"),
        (3, "m < rows.count && at < size", "m + 1 < rows.count && at < size", "uninitialised read"),
        (3, "m < rows.count && at < size", "m < rows.count", "out of bounds"),
        (3, "m < rows.count && at < size", "m < Rows && at < size", "out of bounds"),
        (3, "to[1] = ", "to[kStep] = ", "out of bounds"),
        (3, "const threadgroup vec<T, 4>* from", "const device vec<T, 4>* from", "source"),
        (1, "if (k >= size) continue;", "", "out of bounds"),
        (1, "at >= begin && at < end", "at >= begin", "out of bounds"),
        (1, "window == border)", "window > border)", "value"),
        (1, "int(lane) < phase ? behind : held[j]", "held[j]", "value"),
        (1, "held[j] = behind;", "", "value"),
        (1, "(int(lane) + phase) % 32", "int(lane) + phase", "wrong lane"),
        (1, "(k - chunk) / U::group)", "(k - chunk) / U::group + 1)", "wrong lane"),
        (1, "m < rows.count && at < outputs", "at < outputs", "out of bounds"),
        (1, "m < rows.count && at < outputs", "m < rows.count", "out of bounds"),
        (1, "*(const device uint*)at", "*(const device uint*)(at + 2)", "misaligned access"),
        (1, HANDED, "if (k >= size) continue;\n" + HANDED, "divergent simdgroup function"),
        (1, REDUCED, "if (lane < 8) " + REDUCED, "value"),
        (1, "sums[j][m] = simd_sum(sums[j][m])", "sums[j][m] += 0", "value"),
        (1, HANDED, HANDED.replace(".from_lane(holder)", ""), "value"),
        (1, "sums[j][m] = 0;", "continue;", "value"),
        (3, "x[i], sums[j][m]);", "x[7 - i], sums[j][m]);", "value"),
        (1, BIASED, "continue;", "value"),
        (1, BIASED, BIASED.replace("n + i", "n + i + 4"), "out of bounds"),
    ],
)  # fmt: skip
def test_planted_fault_is_caught(host: Host, plant: Plant, rows: int, old: str, new: str, kind: str) -> None:
    plant(("unpack.h", "row_windows.h", "matmul.h"), old, new)
    x = mx.random.normal((rows, 1056))
    weight = quantized(35, 1056, group_size=32, dtype=mx.float32)
    bias = mx.random.normal((35,))
    if kind == "value":
        with pytest.raises(AssertionError):
            assert_close(matmul(host, x, weight, bias), true_product(x, weight) + bias, mx.float32)
        return
    with pytest.raises(MetalHostError) as caught:
        matmul(host, x, weight, bias)
    assert kind_of(caught.value) == kind


@pytest.mark.parametrize("condition", ["at < items", "j < rows"])
def test_planted_fault_in_whole_lines_is_caught(host: Host, plant: Plant, condition: str) -> None:
    plant(("row_windows.h",), "at < items && j < rows", condition)
    x, weight = mx.random.normal((1, 1536)), quantized(35, 1536, group_size=32, dtype=mx.float32)
    assert not weight.is_ragged and weight.scale_source == ScaleSource.OWN_LINES
    with pytest.raises(MetalFault) as caught:
        matmul(host, x, weight)
    assert caught.value.kind == "out of bounds"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (
            "share_scale(matrices[m], m, first, i, to);\n    }\n    " + BARRIER,
            "share_scale(matrices[m], m, first, i, to);\n    }",
            "uninitialised read",
        ),
        ("head < min(lines, count)", "head < min(lines, count) - 1", "uninitialised read"),
        ("i < count; i += 32 * Simdgroups", "i <= count; i += 32 * Simdgroups", "out of bounds"),
        ("sums[Outputs + i][m];", "sums[i][m];", "value"),
        ("gate;\n  in.matrices[1] = up;", "up;\n  in.matrices[1] = gate;", "value"),
        ("sums[Which * Outputs + i][m] +=", "sums[i][m] +=", "value"),
        ("if constexpr (A == silu) return z / (1", "if constexpr (A == silu) return z / (2", "value"),
        ("int(simdgroup)) * (4 / N);", "int(simdgroup)) * (4 / N) + 1;", "unwritten output"),
        ("int(simdgroup)) * (4 / N);", "int(simdgroup)) / 2 * (4 / N);", "out of bounds"),
        ("m < rows.count && at < outputs", "at < outputs", "out of bounds"),
        ("(m * kStep + lane * 8) / 4;", "(m * kStep + lane * 8) / 4 + 1;", "uninitialised read"),
        ("biases[1] = up_bias;", "biases[1] = up_bias + 4;", "out of bounds"),
    ],
)
def test_planted_fault_in_gate_up_is_caught(host: Host, plant: Plant, old: str, new: str, kind: str) -> None:
    plant(("activation.h", "row_windows.h", "matmul.h"), old, new)
    x, biases = mx.random.normal((6, 288)), mx.random.normal((2, 19))
    gate, up = (quantized(19, 288, group_size=32, dtype=mx.float32) for _ in range(2))
    kernels = MatmulKernels(host.metal_kernel)

    def result() -> mx.array:
        return kernels.gate_up(x, gate, up, activation="silu", gate_bias=biases[0], up_bias=biases[1])

    if kind == "value":
        y = result()
        products = true_product(x, gate) + biases[0], true_product(x, up) + biases[1]
        with pytest.raises(AssertionError):
            assert_close(y, reference.gated(*products, "silu"), mx.float32)
        return
    with pytest.raises(MetalFault) as caught:
        result()
    assert caught.value.kind == kind


def test_wrong_arguments(host: Host) -> None:
    x, weight = mx.random.normal((2, 64)), quantized(8, 64)
    with pytest.raises(ValueError, match="no kernel for affine weights of 7 bits"):
        matmul(host, x, weight._replace(bits=7))
    with pytest.raises(ValueError, match="do not fit"):
        matmul(host, x[:, :32], weight)
    with pytest.raises(ValueError, match="do not fit"):
        matmul(host, x, weight._replace(scales=weight.scales[:4]))
    with pytest.raises(ValueError, match="got mlx"):
        matmul(host, x.astype(mx.int32), weight)
    with pytest.raises(ValueError, match="bias"):
        matmul(host, x, weight, mx.zeros((7,)))
