"""Scales of quantized layers at load: narrowed where exact, and always in a form that the kernels read."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxserve.models.layers import use_kernels
from mlxserve.models.loader import _convert_parameters
from mlxserve_kernels.dispatch import reads_quantized

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="Metal keeps its dtypes")

HALF, WIDE = 0.5, 1.0 + 2**-20  # the second is no float16


def converted(kind: type[nn.Module], scale: float, bias: float) -> nn.Module:
    layer = kind(64, 64, group_size=32, bits=4)
    layer.scales, layer.biases = mx.full((64, 2), scale), mx.full((64, 2), bias)
    holder = nn.Sequential(layer)
    use_kernels(holder, mx.float32)
    for _, layer in holder.named_modules():
        _convert_parameters(layer, mx.float32)
    result: nn.Module = holder.layers[0]
    return result


@pytest.mark.parametrize("kind", [nn.QuantizedLinear, nn.QuantizedEmbedding])
@pytest.mark.parametrize(
    ("scale", "bias", "dtype"),
    [
        (HALF, HALF, mx.float16),
        (HALF, WIDE, mx.float32),
        (WIDE, HALF, mx.float32),
        (WIDE, WIDE, mx.float32),
        (HALF, 1e6, mx.float32),
    ],
)
def test_scales_and_biases_are_narrowed_together_and_exactly(
    kind: type[nn.Module], scale: float, bias: float, dtype: mx.Dtype
) -> None:
    layer = converted(kind, scale, bias)
    assert (layer.scales.dtype, layer.biases.dtype) == (dtype, dtype)
    assert reads_quantized(layer.scales, layer.biases, group_size=32, bits=4)
    for array, value in ((layer.scales, scale), (layer.biases, bias)):
        assert mx.array_equal(array.astype(mx.float32), mx.full((64, 2), value)).item()
