"""Gradients through layers with experts, and of tables of embeddings, equal those through the reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference
from mlxserve_kernels.experts import ExpertWeights

from .test_training_ops import FORMATS, assert_same

pytestmark = pytest.mark.usefixtures("cpu_kernels")

EXPERTS = 5


def experts_of(
    mode: str | None, group: int, bits: int, n: int, k: int
) -> tuple[ExpertWeights, ExpertWeights]:
    """Weights in a format, and the same dense."""
    w = mx.random.normal((EXPERTS, n, k)) * 0.3
    if mode is None:
        return ExpertWeights(w), ExpertWeights(w)
    parts = (*mx.quantize(w, group_size=group, bits=bits, mode=mode), None)[:3]
    dense = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    return ExpertWeights(*parts, group_size=group, bits=bits, mode=mode), ExpertWeights(dense)


def random_ids(*shape: int) -> mx.array:
    """Of all experts but one."""
    return mx.random.randint(0, EXPERTS - 1, shape).astype(mx.int32)


@pytest.mark.parametrize(("mode", "group", "bits"), FORMATS)
@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("rows", [(1,), (2, 7), (300,)])
def test_gather_matmul(
    mode: str | None, group: int, bits: int, is_paired: bool, rows: tuple[int, ...], isa: str
) -> None:
    ours, dense = experts_of(mode, group, bits, 33, 64)
    ids = random_ids(*rows, 2)
    x = mx.random.normal((*rows, 2, 64) if is_paired else (*rows, 64))
    assert_same(
        lambda x: ops.gather_matmul(x, ids, ours), lambda x: reference.gather_matmul(x, ids, dense), x
    )
    if mode is None:
        assert_same(
            lambda x, w: ops.gather_matmul(x, ids, ExpertWeights(w)),
            lambda x, w: reference.gather_matmul(x, ids, ExpertWeights(w)),
            x,
            dense.w,
        )


@pytest.mark.parametrize("rank", [1, 8])
def test_adapters_of_experts(rank: int, isa: str) -> None:
    """As narrow as the matrices of an adapter are."""
    ids, x = random_ids(40, 2), mx.random.normal((40, 24))
    a, b = mx.random.normal((EXPERTS, rank, 24)), mx.random.normal((EXPERTS, 31, rank))

    def with_ops(module: object) -> object:
        def adapted(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
            inner = module.gather_matmul(x, ids, ExpertWeights(a))  # type: ignore[attr-defined]
            y: mx.array = module.gather_matmul(inner, ids, ExpertWeights(b))  # type: ignore[attr-defined]
            return y

        return adapted

    assert_same(with_ops(ops), with_ops(reference), x, a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "group", "bits"), [FORMATS[0], FORMATS[5], FORMATS[-1]])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("has_shares", [False, True])
def test_gated_experts(
    mode: str | None, group: int, bits: int, activation: str, has_shares: bool, isa: str
) -> None:
    (gate, gate_d), (up, up_d) = (experts_of(mode, group, bits, 64, 32) for _ in range(2))
    down, down_d = experts_of(mode, group, bits, 48, 64)
    ids, x = random_ids(3, 21, 2), mx.random.normal((3, 21, 32))
    args = [x, mx.random.uniform(shape=ids.shape)] if has_shares else [x]

    def ours(x: mx.array, shares: mx.array | None = None) -> mx.array:
        return ops.gated_experts(x, ids, gate, up, down, activation=activation, shares=shares)  # type: ignore[arg-type]

    def theirs(x: mx.array, shares: mx.array | None = None) -> mx.array:
        return reference.gated_experts(x, ids, gate_d, up_d, down_d, activation=activation, shares=shares)  # type: ignore[arg-type]

    assert_same(ours, theirs, *args)


def test_frozen_parts_are_named() -> None:
    weights, _ = experts_of("affine", 32, 4, 8, 32)
    x, ids = mx.ones((2, 32)), random_ids(2, 1)
    with pytest.raises(ValueError, match="no gradient of ids, biases and quantized weights"):
        mx.grad(
            lambda s: ops.gather_matmul(x, ids, ExpertWeights(weights.w, s, weights.biases, 32, 4)).sum()
        )(weights.scales)


@pytest.mark.parametrize("shape", [(1,), (2, 9)])
def test_embedding_table(shape: tuple[int, ...]) -> None:
    ids, w = mx.random.randint(-6, 6, shape).astype(mx.int32), mx.random.normal((6, 10))
    assert_same(lambda w: ops.embed_rows(ids, w), lambda w: reference.embed_rows(ids, w), w)
    quantized = mx.quantize(mx.random.normal((6, 32)), group_size=32, bits=4)
    with pytest.raises(ValueError, match="no gradient of ids and quantized tables"):
        mx.grad(lambda s: ops.embed_rows(ids, quantized[0], s, quantized[2], group_size=32, bits=4).sum())(
            quantized[1]
        )
    assert np.isfinite(np.array(ops.embed_rows(ids, *quantized, group_size=32, bits=4))).all()
