"""MLX arrays on their way into safetensors files, and the choice of their groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxserve_convert.options import GROUP_SIZES
from mlxserve_convert.output_folder import ShardedWriter

_SAFETENSORS_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "uint8": "U8",
    "int8": "I8",
    "int64": "I64",
    "uint16": "U16",
}


def fit_group_size(columns: int, limit: int) -> int | None:
    """The largest possible group of at most ``limit`` that divides the columns, None if none does."""
    fitting = [size for size in GROUP_SIZES if size <= limit and columns % size == 0]
    return max(fitting, default=None)


def write_array(shards: ShardedWriter, name: str, array: Any) -> None:
    """Evaluates an mlx array and writes it."""
    import mlx.core as mx

    mx.eval(array)
    dtype = _SAFETENSORS_NAMES[str(array.dtype).removeprefix("mlx.core.")]
    # numpy has no bfloat16: its bits travel as uint16.
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    shards.add(name, dtype, tuple(array.shape), np.array(plain, copy=False))


def write_quantized(shards: ShardedWriter, weight_name: str, array: Any, group_size: int, bits: int) -> None:
    """Quantizes a float matrix and writes its ``weight``, ``scales`` and ``biases``."""
    import mlx.core as mx

    parts = mx.quantize(array, group_size=group_size, bits=bits)
    module = weight_name.removesuffix(".weight")
    for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
        write_array(shards, f"{module}.{kind}", part)
