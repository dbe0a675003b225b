"""What ``self_test`` tries with each Metal kernel: calls of ``ops`` that run it.

Sizes are those of Llama 3.1 8B on a device, and tiny on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve_kernels import ops

Run = Callable[[], Sequence[mx.array]]
"""Builds the same results, lazily, from the same inputs each time."""

_TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Case:
    """``tolerance``: the largest difference, relative to the largest value."""

    label: str
    run: Run
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


def _case(label: str, dtype: mx.Dtype, call: Callable[..., Any], *inputs: Any, **options: Any) -> Case:
    def run() -> Sequence[mx.array]:
        result = call(*inputs, **options)
        return result if isinstance(result, tuple) else (result,)

    return Case(f"{label} {_name(dtype)}", run, _TOLERANCE[dtype])


def _normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    array = mx.random.normal(shape).astype(dtype)
    mx.eval(array)
    return array


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


_CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "add_rms_norm": _add_rms_norm_cases,
}

KERNELS = tuple(_CASES)
"""Names as ``dispatch.metal`` has them."""
