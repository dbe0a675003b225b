"""add_rms_norm, run as Metal: equal to mlx, each byte once, a row's bits its own; faults are caught."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_on_host import Host, MetalFault, MetalHostError, Settings
from mlxserve_kernels.metal_kernels import MetalKernels
from tests.metal.conftest import Plant, kind_of

TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def operands(rows: int, size: int, dtype: mx.Dtype, weight: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    x, residual = (mx.random.normal((rows, size)).astype(dtype) for _ in range(2))
    return x, residual, mx.random.normal((size,)).astype(weight)


@pytest.mark.parametrize("size", [8, 9, 64, 127, 576, 2048, 4100])
@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        (mx.float32, mx.float32),
        (mx.float16, mx.float16),
        (mx.bfloat16, mx.bfloat16),
        (mx.bfloat16, mx.float32),
    ],
)
def test_equals_mlx(host: Host, size: int, dtype: mx.Dtype, weight: mx.Dtype) -> None:
    x, residual, w = operands(3, size, dtype, weight)
    y, total = MetalKernels(host.metal_kernel).norms.add_rms_norm(x, residual, w, 1e-5)
    assert mx.array_equal(total, x + residual).item()
    expected = mx.fast.rms_norm((x + residual).astype(mx.float32), w.astype(mx.float32), 1e-5)
    assert y.dtype == dtype
    error = mx.abs(y.astype(mx.float32) - expected).max().item()
    assert error <= TOLERANCE[dtype] * mx.abs(expected).max().item()


def test_row_does_not_depend_on_its_batch(host: Host) -> None:
    x, residual, w = operands(5, 576, mx.float16, mx.float16)
    kernels = MetalKernels(host.metal_kernel)
    y, _ = kernels.norms.add_rms_norm(x, residual, w, 1e-6)
    for row in range(5):
        alone, _ = kernels.norms.add_rms_norm(x[row : row + 1], residual[row : row + 1], w, 1e-6)
        assert mx.array_equal(alone[0], y[row]).item()


def test_non_contiguous_rows(host: Host) -> None:
    x, residual, w = operands(64, 32, mx.float32, mx.float32)
    y, _ = MetalKernels(host.metal_kernel).norms.add_rms_norm(x[::2, ::4].T, residual[::2, ::4].T, w, 1e-5)
    expected = mx.fast.rms_norm((x + residual)[::2, ::4].T, w, 1e-5)
    assert np.allclose(np.array(y), np.array(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("size", "offset"), [(64, 4), (63, 1)])
def test_slices_that_start_where_they_may(cache_dir: Path, size: int, offset: int) -> None:
    host = Host(Settings(cache_dir=cache_dir, slice_offset=offset))
    x, residual, w = operands(2, size, mx.float16, mx.float16)
    MetalKernels(host.metal_kernel).norms.add_rms_norm(x, residual, w, 1e-5)


def test_slice_that_starts_where_it_may_not(cache_dir: Path) -> None:
    host = Host(Settings(cache_dir=cache_dir, slice_offset=2))
    x, residual, w = operands(2, 64, mx.float16, mx.float16)
    with pytest.raises(MetalFault) as caught:
        MetalKernels(host.metal_kernel).norms.add_rms_norm(x, residual, w, 1e-5)
    assert caught.value.kind == "misaligned access"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_each_byte_once_and_coalesced(host: Host, dtype: mx.Dtype) -> None:
    x, residual, w = operands(4, 2048, dtype, dtype)
    MetalKernels(host.metal_kernel).norms.add_rms_norm(x, residual, w, 1e-5)
    report = host.reports[-1]
    assert report.barriers == report.groups == 4
    assert report.threadgroup_bytes == 128
    for name in ("x", "residual", "y", "sum"):
        cost = report.buffer(name)
        assert cost.simd_read + cost.simd_written == x.nbytes
        assert cost.coalescing >= 0.9
    assert report.buffer("weight").simd_read == 4 * w.nbytes


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "uninitialised read"),
        (
            "threadgroup_barrier(mem_flags::mem_threadgroup);",
            "threadgroup_barrier(mem_flags::mem_none);",
            "race",
        ),
        ("if (lane == 0) partial[", "partial[", "race"),
        ("if (i >= Size) continue;", "", "out of bounds"),
        ("lane < Threads / 32", "lane <= Threads / 32", "uninitialised read"),
        ("lane < Threads / 32 ? partial[lane]", "true ? partial[lane + 1]", "out of bounds"),
        (
            "  values.scale(",
            "  if (thread_index < 160) threadgroup_barrier(mem_flags::mem_none);\n  values.scale(",
            "divergent barrier",
        ),
        ("(row + i)", "(row + i + 1)", "misaligned access"),
        ("simd_sum(values", "simd_shuffle(values", "source"),
        ("simd_sum(values.sum_of_squares())", "simd_broadcast(values.sum_of_squares(), 40)", "wrong lane"),
        (
            "values.store(y + start, thread_index);",
            "if (row > 0) values.store(y + start, thread_index);",
            "unwritten output",
        ),
        ("threadgroup float* partial", "device float* partial", "source"),
    ],
)
def test_planted_fault_is_caught(host: Host, plant: Plant, old: str, new: str, kind: str) -> None:
    plant(("rms_norm.h",), old, new)
    x, residual, w = operands(2, 700, mx.float32, mx.float32)
    with pytest.raises(MetalHostError) as caught:
        MetalKernels(host.metal_kernel).norms.add_rms_norm(x, residual, w, 1e-5)
    assert kind_of(caught.value) == kind


def test_wrong_arguments(host: Host) -> None:
    kernels = MetalKernels(host.metal_kernel)
    x, residual, w = operands(2, 64, mx.float16, mx.float16)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.norms.add_rms_norm(x, residual[:1], w, 1e-5)
    with pytest.raises(ValueError, match="rows of 4"):
        kernels.norms.add_rms_norm(x[:, :4], residual[:, :4], w[:4], 1e-5)
