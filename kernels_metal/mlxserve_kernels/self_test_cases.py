"""What ``self_test`` tries with each Metal kernel: calls of ``ops`` that run it.

Sizes are those of Llama 3.1 8B on a device, and tiny on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx

from mlxserve_kernels import ops
from mlxserve_kernels.decoder import Projection
from mlxserve_kernels.experts import ExpertWeights

Run = Callable[[], Sequence[mx.array]]
"""Builds the same results, lazily, from the same inputs each time."""

_GROUP_SIZE = 64
_TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""A few roundings to the dtype."""


@dataclass(frozen=True, slots=True)
class Case:
    """``tolerance``: the largest difference from ``expected``, which mlx's own ops compute in float32,
    relative to the largest value. ``run`` is also what mlx's own ops are timed with."""

    label: str
    run: Run
    expected: Run
    tolerance: float
    is_timed: bool = True


def cases_of(name: str, *, is_small: bool) -> Iterator[Case]:
    """The cases of one of KERNELS; made as they are asked for."""
    mx.random.seed(4)
    return _CASES[name](is_small)


def _add_rms_norm_cases(is_small: bool) -> Iterator[Case]:
    size = 64 if is_small else 4096
    for dtype in (mx.float16, mx.bfloat16):
        for rows in (1, 4, 16):
            x, residual = _normal(rows, size, dtype=dtype), _normal(rows, size, dtype=dtype)
            weight = _normal(size, dtype=dtype)
            yield _case(f"{rows} x {size}", dtype, ops.rms_norm, x, weight, 1e-5, residual)


def _quantized_cases(is_small: bool) -> Iterator[Case]:
    outputs, inputs = (24, 128) if is_small else (4096, 4096)
    for dtype, bits in ((mx.float16, 4), (mx.bfloat16, 4), (mx.bfloat16, 8)):
        weight = _quantized(outputs, inputs, bits=bits, dtype=dtype)
        for rows in (1, 4, 16):
            x = _normal(rows, inputs, dtype=dtype)
            label = f"{rows} x {inputs} to {outputs}, {bits} bit"
            yield _case(label, dtype, ops.quantized_matmul, x, *weight, group_size=_GROUP_SIZE, bits=bits)


def _gate_up_cases(is_small: bool) -> Iterator[Case]:
    outputs, inputs = (24, 128) if is_small else (14336, 4096)
    for dtype, bits in ((mx.float16, 4), (mx.bfloat16, 4)):
        gate, up = (
            Projection(*_quantized(outputs, inputs, bits=bits, dtype=dtype), _GROUP_SIZE, bits)
            for _ in range(2)
        )
        for rows in (1, 4, 16):
            x = _normal(rows, inputs, dtype=dtype)
            label = f"{rows} x {inputs} to twice {outputs}, {bits} bit"
            yield _case(label, dtype, ops.gate_up, x, gate, up, activation="silu")


def _expert_cases(is_small: bool, call: Callable[..., Any], num_matrices: int) -> Iterator[Case]:
    """Sizes of Qwen 3 30B-A3B on a device."""
    count, top_k, size, inner = (4, 2, 64, 32) if is_small else (128, 8, 2048, 768)
    shapes = ((inner, size), (inner, size), (size, inner))[:num_matrices]
    for dtype in (mx.float16, mx.bfloat16):
        matrices = [
            ExpertWeights(*_quantized(count, *shape, bits=4, dtype=dtype, group_size=32), 32, 4)
            for shape in shapes
        ]
        for rows in (1, 4, 16):
            x = _normal(rows, size, dtype=dtype)
            ids = mx.argsort(mx.random.uniform(shape=(rows, count)), axis=-1)[:, :top_k].astype(mx.int32)
            mx.eval(ids)
            yield _case(f"{rows} x {size}, {top_k} of {count}", dtype, call, x, ids, *matrices)


def _lora_cases(is_small: bool) -> Iterator[Case]:
    size, rank, outputs, count = (64, 8, 32, 3) if is_small else (4096, 16, 4096, 4)
    for dtype in (mx.float16, mx.bfloat16):
        a, b = _normal(count, size, rank, dtype=dtype), _normal(count, rank, outputs, dtype=dtype)
        for rows in (1, 4, 16):
            x = _normal(rows, size, dtype=dtype)
            slots = mx.arange(rows, dtype=mx.int32) % (count + 1) - (rows > 1)
            scales = mx.random.uniform(shape=(count,))
            mx.eval(slots, scales)
            label = f"{rows} x {size} to {outputs} by rank {rank}"
            yield _case(label, dtype, ops.lora_delta, x, a, b, slots, scales)


def _quantized(
    *shape: int, bits: int, dtype: mx.Dtype, group_size: int = 64
) -> tuple[mx.array, mx.array, mx.array]:
    """Random integers with small scales: quantizing floats would take longer."""
    words = mx.random.randint(0, 1 << 31, (*shape[:-1], shape[-1] * bits // 32)).astype(mx.uint32)
    scales = (0.01 * mx.random.uniform(shape=(*shape[:-1], shape[-1] // group_size))).astype(dtype)
    biases = (-0.5 * (1 << bits) * scales).astype(dtype)
    mx.eval(words, scales, biases)
    return words, scales, biases


def _case(label: str, dtype: mx.Dtype, call: Callable[..., Any], *inputs: Any, **options: Any) -> Case:
    def run() -> Sequence[mx.array]:
        return _results(call(*inputs, **options))

    def expected() -> Sequence[mx.array]:
        return _results(call(*map(_wide, inputs), **options))

    return Case(f"{label} {_name(dtype)}", run, expected, _TOLERANCE[dtype])


def _results(result: Any) -> Sequence[mx.array]:
    return result if isinstance(result, tuple) else (result,)


def _wide(value: Any) -> Any:
    """In float32: arrays, and the arrays of weights."""
    if isinstance(value, Projection | ExpertWeights):
        return replace(value, **{f.name: _wide(getattr(value, f.name)) for f in fields(value)})
    is_float = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
    return value.astype(mx.float32) if is_float else value


def _normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    array = mx.random.normal(shape).astype(dtype)
    mx.eval(array)
    return array


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


_CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "add_rms_norm": _add_rms_norm_cases,
    "quantized_matmul": _quantized_cases,
    "gate_up": _gate_up_cases,
    "gather_matmul": lambda is_small: _expert_cases(is_small, ops.gather_matmul, 1),
    "lora_delta": _lora_cases,
    "gated_experts": lambda is_small: _expert_cases(is_small, ops.gated_experts, 3),
}

KERNELS = tuple(_CASES)
"""Names as ``dispatch.metal`` has them."""
