"""Products with the matrices of experts, run as Metal: near the reference, each chosen expert read once and
no other, a row's bits those of a plain product; faults are caught."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from metal_on_host import Host, MetalHostError, Settings
from mlxserve_kernels import reference
from mlxserve_kernels.experts import Activation, ExpertWeights
from mlxserve_kernels.metal_kernels.experts import ExpertKernels
from mlxserve_kernels.metal_kernels.matmul import MatmulKernels
from tests.metal.conftest import Plant, kind_of
from tests.metal.products import assert_close, quantized


def experts(*shape: int, bias: bool = False, dtype: mx.Dtype = mx.float32, bits: int = 4) -> ExpertWeights:
    w, scales, biases, group_size, bits, mode = quantized(*shape, group_size=32, bits=bits, dtype=dtype)
    vector = mx.random.normal(shape[:-1]) if bias else None
    return ExpertWeights(w, scales, biases, group_size, bits, mode, vector)


def choices(rows: int, top_k: int, count: int) -> mx.array:
    """`top_k` different experts a row, from the lower half of `count`."""
    scores = mx.random.uniform(shape=(rows, count // 2))
    return mx.argsort(scores, axis=-1)[:, :top_k].astype(mx.int32)


@pytest.mark.parametrize(("rows", "top_k"), [(1, 2), (2, 3), (3, 4), (16, 2), (18, 1)])
def test_gather_matmul(host: Host, rows: int, top_k: int) -> None:
    """Two ids are fewer than 8; 18 rows need two tiles where one expert has them all."""
    x, ids = mx.random.normal((rows, 288)), choices(rows, top_k, 8)
    ids = ids if top_k > 1 else mx.full((rows, 1), 3, dtype=mx.uint32)
    weights = experts(8, 21, 288, bias=rows > 2)
    y = ExpertKernels(host.metal_kernel).gather_matmul(x, ids, weights)
    assert_close(y, reference.gather_matmul(x, ids, weights), mx.float32)


def test_one_row_a_choice(host: Host) -> None:
    x, ids = mx.random.normal((2, 3, 2, 64)), choices(6, 2, 6).reshape(2, 3, 2)
    weights = experts(6, 8, 64)
    y = ExpertKernels(host.metal_kernel).gather_matmul(x, ids, weights)
    assert_close(y, reference.gather_matmul(x, ids, weights), mx.float32)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_small_float_formats(host: Host, mode: str) -> None:
    x, ids = mx.random.normal((2, 96)), mx.array([[1, 0], [1, 2]], dtype=mx.int32)
    w, scales, _, group_size, bits, _ = quantized(
        4, 9, 96, group_size=32 if mode == "mxfp4" else 16, mode=mode
    )
    weights = ExpertWeights(w, scales, None, group_size, bits, mode)
    y = ExpertKernels(host.metal_kernel).gather_matmul(x, ids, weights)
    assert_close(y, reference.gather_matmul(x, ids, weights), mx.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "bias"), [(1, False), (5, True)])
def test_gated_experts(host: Host, rows: int, bias: bool, activation: Activation) -> None:
    x, ids, shares = mx.random.normal((rows, 64)), choices(rows, 2, 6), mx.random.uniform(shape=(rows, 2))
    gate, up, down = (
        experts(6, 32, 64, bias=bias),
        experts(6, 32, 64, bias=bias),
        experts(6, 11, 32, bias=bias),
    )
    kernels = ExpertKernels(host.metal_kernel)
    for given in (None, shares):
        y = kernels.gated_experts(x, ids, gate, up, down, activation=activation, shares=given)
        expected = reference.gated_experts(x, ids, gate, up, down, activation=activation, shares=given)
        assert y.shape == expected.shape
        assert mx.abs(y - expected).max().item() <= 5e-6 * mx.abs(expected).max().item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_bits_are_those_of_a_plain_product(host: Host, dtype: mx.Dtype) -> None:
    """Whatever rows share an expert, and however many."""
    x, ids = mx.random.normal((7, 320)).astype(dtype), choices(7, 2, 6)
    weights = experts(6, 12, 320, dtype=dtype)
    kernels = ExpertKernels(host.metal_kernel)
    y = kernels.gather_matmul(x, ids, weights)
    plain = MatmulKernels(host.metal_kernel)
    for row in range(7):
        alone = kernels.gather_matmul(x[row : row + 1], ids[row : row + 1], weights)
        assert mx.array_equal(alone[0], y[row]).item()
    assert weights.scales is not None and weights.biases is not None
    for choice, expert in enumerate(ids[3].tolist()):  # type: ignore[arg-type]
        product = plain.quantized_matmul(
            x, weights.w[expert], weights.scales[expert], weights.biases[expert], group_size=32, bits=4
        )
        assert mx.array_equal(product[3], y[3, choice]).item()


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_chosen_experts_once_and_others_never(cache_dir: Path, rows: int, bits: int) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    x, ids = mx.random.normal((rows, 1024)).astype(mx.float16), choices(rows, 2, 12)
    gate, up = (experts(12, 32, 1024, bits=bits, dtype=mx.float16) for _ in range(2))
    kernels = ExpertKernels(host.metal_kernel)
    kernels.gather_matmul(x, ids, gate)
    kernels.gate_up(x, ids, gate, up, activation="silu")
    num_chosen = len(set(ids.flatten().tolist()))  # type: ignore[arg-type]
    plain, gated = host.reports
    costs = [plain.buffer(name) for name in ("w", "scales", "biases")]
    costs += [gated.buffer(f"{part}_{name}") for part in ("gate", "up") for name in ("w", "scales", "biases")]
    for cost in costs:
        assert cost.unique_read == cost.simd_read == cost.bytes // 12 * num_chosen, cost
        assert cost.coalescing >= 0.9, cost


CHECKED = "rank >= 0 && rank < Most"
SYNCED = "simdgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("q < total && keys", "keys", "out of bounds"),
        (CHECKED, "rank >= 0", "race"),
        (CHECKED, "rank >= 0 && rank + 1 < Most", "uninitialised read"),
        ("list + simdgroup * 16", "list", "race"),
        ("  return found;", "  return found + 1;", "uninitialised read"),
        (SYNCED + "\n  return", "return", "race"),
        ("threadgroup int* list, uint lane", "device int* list, uint lane", "source"),
        ("if (!is_first(ids, p, lane)) return;", "", "race"),
        ("if (!is_first(ids, p, lane)) return;", "if (lane < 8 && p > 0) return;", "divergent barrier"),
        (
            "simd_prefix_exclusive_sum(is_member)",
            "simd_prefix_inclusive_sum(is_member)",
            "uninitialised read",
        ),
        ("id * outputs, size", "(id + 4) * outputs, size", "out of bounds"),
        ("list[m] / Choices", "list[m]", "out of bounds"),
        ("served < total; served += Rows", "served < 1; served += Rows", "unwritten output"),
        (
            "y_row(int m) const thread { return list[m]; }",
            "y_row(int m) const thread { return list[0]; }",
            "race",
        ),
        ("id * outputs, size", "0 * outputs, size", "value"),
        ("const size_t id = size_t(ids[p]);", "const size_t id = size_t(ids[p] / 2);", "value"),
    ],
)
def test_planted_fault_is_caught(host: Host, plant: Plant, old: str, new: str, kind: str) -> None:
    plant(("members.h", "experts.h"), old, new)
    # Two rows read x without a barrier of the threadgroup in front.
    ids = mx.array([[3, 1], [2, 3]] * (1 if old.startswith(SYNCED) else 10), dtype=mx.int32)
    # Nor may scales be shared through threadgroup memory then: rows of 512 have theirs in lines of their own.
    size = 512 if old.startswith(SYNCED) else 64
    x, weights = mx.random.normal((ids.shape[0], size)), experts(4, 40, size)
    if kind == "value":
        y = ExpertKernels(host.metal_kernel).gather_matmul(x, ids, weights)
        with pytest.raises(AssertionError):
            assert_close(y, reference.gather_matmul(x, ids, weights), mx.float32)
        return
    with pytest.raises(MetalHostError) as caught:
        ExpertKernels(host.metal_kernel).gather_matmul(x, ids, weights)
    assert kind_of(caught.value) == kind


def test_wrong_arguments(host: Host) -> None:
    kernels = ExpertKernels(host.metal_kernel)
    x, ids, weights = mx.random.normal((2, 64)), choices(2, 2, 4), experts(4, 8, 64)
    with pytest.raises(ValueError, match="no kernel for dense"):
        kernels.gather_matmul(x, ids, ExpertWeights(mx.ones((4, 8, 64))))
    with pytest.raises(ValueError, match="ids must be"):
        kernels.gather_matmul(x, ids.astype(mx.int64), weights)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.gather_matmul(x, ids[:1], weights)
    with pytest.raises(ValueError, match="do not fit weights"):
        kernels.gather_matmul(x[:, :32], ids, weights)
    with pytest.raises(ValueError, match="gate and up must be alike"):
        kernels.gate_up(x, ids, weights, experts(4, 12, 64), activation="silu")
    with pytest.raises(ValueError, match="activation must be one of"):
        kernels.gate_up(x, ids, weights, weights, activation="relu")  # type: ignore[arg-type]
