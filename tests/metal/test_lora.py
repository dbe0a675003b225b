"""lora_delta, run as Metal: near the reference, each adapter that rows have read once, a row's bits its own;
faults are caught."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_on_host import Host, MetalHostError, Settings
from mlxserve_kernels import reference
from mlxserve_kernels.metal_kernels.adapters import AdapterKernels
from tests.metal.conftest import Plant, kind_of
from tests.metal.products import assert_close

Operands = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


def operands(
    slots: list[int], size: int, rank: int, outputs: int, dtype: mx.Dtype = mx.float32, count: int = 3
) -> Operands:
    x = mx.random.normal((len(slots), size)).astype(dtype)
    a = (mx.random.normal((count, size, rank)) / size**0.5).astype(dtype)
    b = mx.random.normal((count, rank, outputs)).astype(dtype)
    return x, a, b, mx.array(slots, dtype=mx.int32), mx.random.uniform(0.5, 2, (count,))


def expected(x: mx.array, a: mx.array, b: mx.array, slots: mx.array, scales: mx.array) -> mx.array:
    wide = (array.astype(mx.float32) for array in (x, a, b))
    return reference.lora_delta(*wide, slots, scales)


@pytest.mark.parametrize("slots", [[1], [0, -1, 2, 0], [1] * 7 + [-1] * 3 + [2] * 8])
@pytest.mark.parametrize(
    ("size", "rank", "outputs"), [(8, 1, 3), (300, 6, 45), (576, 16, 260), (100, 72, 64), (40, 136, 8)]
)
def test_equals_the_reference(host: Host, slots: list[int], size: int, rank: int, outputs: int) -> None:
    """Ranks that lanes share evenly, unevenly, and in two parts; several pieces of x, and a rest."""
    given = operands(slots, size, rank, outputs)
    y = AdapterKernels(host.metal_kernel).lora_delta(*given)
    assert_close(y, expected(*given), mx.float32)
    assert not np.array(y)[np.array(slots) < 0].any()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_dtypes(host: Host, dtype: mx.Dtype) -> None:
    given = operands([0, 1, -1], 320, 8, 72, dtype)
    assert_close(AdapterKernels(host.metal_kernel).lora_delta(*given), expected(*given), dtype)


def test_rows_without_adapters(host: Host) -> None:
    kernels = AdapterKernels(host.metal_kernel)
    x, a, b, slots, scales = operands([-1, -1], 64, 8, 20)
    assert not np.array(kernels.lora_delta(x, a, b, slots, scales)).any()
    assert kernels.lora_delta(x[:0], a, b, slots[:0], scales).shape == (0, 20)
    assert not np.array(kernels.lora_delta(x, a[:0], b[:0], slots, scales[:0])).any()


def test_row_does_not_depend_on_its_batch(host: Host) -> None:
    x, a, b, slots, scales = operands([1] * 6 + [0, -1, 1, 2] * 3, 700, 16, 40, mx.float16)
    kernels = AdapterKernels(host.metal_kernel)
    y = kernels.lora_delta(x, a, b, slots, scales)
    for begin, end in ((0, 1), (5, 7), (8, 12), (6, 14), (17, 18)):
        part = kernels.lora_delta(x[begin:end], a, b, slots[begin:end], scales)
        assert mx.array_equal(part, y[begin:end]).item()


def test_a_nan_stays_in_its_row(host: Host) -> None:
    x, *others = operands([1, 1, -1], 64, 8, 20)
    spoilt = np.array(x)
    spoilt[1:] = np.nan
    y = np.array(AdapterKernels(host.metal_kernel).lora_delta(mx.array(spoilt), *others))
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all() and not y[2].any()


@pytest.mark.parametrize("slots", [[1], [0, 0, 2], [2, -1] * 8])
@pytest.mark.parametrize(("rank", "dtype"), [(8, mx.float16), (16, mx.bfloat16), (64, mx.float32)])
def test_each_adapter_once_and_coalesced(
    cache_dir: Path, slots: list[int], rank: int, dtype: mx.Dtype
) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    x, a, b, *others = operands(slots, 1024, rank, 1024, dtype, count=4)
    AdapterKernels(host.metal_kernel).lora_delta(x, a, b, *others)
    num_used = len(set(slots) - {-1})
    inner, outer = host.reports
    for cost in (inner.buffer("a"), outer.buffer("b")):
        assert cost.simd_read == cost.unique_read == cost.bytes // 4 * num_used, cost
        assert cost.coalescing >= 0.9, cost
    # Each value of x that an adapter meets is read by one simdgroup.
    assert inner.buffer("x").simd_read == x.nbytes // len(slots) * sum(slot >= 0 for slot in slots)
    assert outer.threadgroup_bytes <= 8192


BARRIER = "      threadgroup_barrier(mem_flags::mem_threadgroup);\n"
FILL, USE = "      for (int i = thread", "      for (int r = 0"
INNER_FAULTS = [
    ("k < end && column < Rank", "k < end + 1 && column < Rank", "out of bounds"),
    ("k < end && column < Rank", "k < begin + kPiece && column < Rank", "out of bounds"),
    ("k < end && column < Rank", "k < end", "out of bounds"),
    ("  if (begin >= size) return;", "", "out of bounds"),
    ("int(lane) < Lanes::lanes && column < Rank", "column < Rank", "race"),
    ("int(lane) < Lanes::lanes && column < Rank", "int(lane) < Lanes::lanes", "race"),
    ("int(lane) < Lanes::lanes && column < Rank", "lane == 0", "unwritten output"),
    ("ushort(apart)", "ushort(apart * 2)", "wrong lane"),
    ("apart < 32; apart *= 2", "apart < 16; apart *= 2", "value"),
    ("apart < 32; apart *= 2", "apart < 32 && lane < 16; apart *= 2", "wrong lane"),
    ("(matrix + size_t(k) * Rank + column", "(matrix + size_t(k) * Rank + column + 1", "misaligned access"),
    ("to[size_t(p) * Rank + i] = 0;", "continue;", "unwritten output"),
    ("slots[p]) * size * Rank", "slots[p] + 1) * size * Rank", "out of bounds"),
    ("if (slots[p] < 0) {\n    for (int i = 0; i < width", "if (false) {\n    for (int i = 0; i < width",
     "out of bounds"),
    ("threadgroup int* list,", "device int* list,", "source"),
]  # fmt: skip
OUTER_FAULTS = [
    (BARRIER + FILL, FILL, "race"),
    (BARRIER + USE, USE, "uninitialised read"),
    (BARRIER + FILL, "if (simdgroup > 0)" + BARRIER + FILL, "divergent barrier"),
    ("r < ranks && n < outputs", "r < ranks", "out of bounds"),
    ("m < count && n < outputs", "m < count", "out of bounds"),
    ("i < count * ranks", "i + 1 < count * ranks", "uninitialised read"),
    ("i < count * ranks", "i <= count * ranks", "uninitialised read"),
    ("inner[i / ranks * kRanks", "inner[i / ranks * ranks", "uninitialised read"),
    ("piece < pieces", "piece < pieces - 1", "value"),
    ("scale * sums[m][i]", "sums[m][i]", "value"),
    ("y[size_t(p) * outputs + n + i] = T(0);", "continue;", "unwritten output"),
    ("(first + r) * outputs + n", "(first + r) * outputs + n + 1", "misaligned access"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "kind"), [*INNER_FAULTS, *OUTER_FAULTS])
def test_planted_fault_is_caught(host: Host, plant: Plant, old: str, new: str, kind: str) -> None:
    plant(("low_rank.h",), old, new)
    given = operands([2, -1, 2, 0], 300, 100 if old == BARRIER + FILL else 36, 72)
    kernels = AdapterKernels(host.metal_kernel)
    if kind == "value":
        y = kernels.lora_delta(*given)
        with pytest.raises(AssertionError):
            assert_close(y, expected(*given), mx.float32)
        return
    with pytest.raises(MetalHostError) as caught:
        kernels.lora_delta(*given)
    assert kind_of(caught.value) == kind


def test_wrong_arguments(host: Host) -> None:
    kernels = AdapterKernels(host.metal_kernel)
    x, a, b, slots, scales = operands([0, 1], 64, 8, 20)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.lora_delta(x[:, :60], a, b, slots, scales)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.lora_delta(x, a, b[:, :4], slots, scales)
    with pytest.raises(ValueError, match="no kernel for x"):
        kernels.lora_delta(x, a, b.astype(mx.float16), slots, scales)
