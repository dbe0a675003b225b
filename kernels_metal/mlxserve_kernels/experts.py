"""The weights of the experts of a layer, as the operations on experts take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from mlxserve_kernels.dispatch import FLOAT_TYPES, reads_quantized

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix an expert: ``x @ dequantize(w[e]).T + bias[e]``.

    Quantized: w uint32 [E, N, K * bits / 32], scales and, of affine weights, biases [E, N, K / group_size],
    as ``mx.quantize`` gives them. Dense, without scales: w [E, N, K]. With a ``scale_dtype`` w is tiles:
    uint8 [E, N / 16, K / group_size, bytes], the rows of all experts in ``ops.pack_tiles``. bias [E, N].
    """

    w: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"
    bias: mx.array | None = None
    scale_dtype: mx.Dtype | None = None

    @property
    def is_supported(self) -> bool:
        """Whether the extension reads this format."""
        if self.scale_dtype is not None:
            return True
        if self.w.ndim != 3 or not self.w.size:
            return False
        if self.scales is None:
            return self.biases is None and self.w.dtype in FLOAT_TYPES
        return reads_quantized(
            self.scales, self.biases, group_size=self.group_size, bits=self.bits, mode=self.mode
        )

    def native(self, cpu: Any) -> Any:
        """The form that the extension ``cpu`` takes."""
        bias = None if self.bias is None else self.bias.astype(mx.float32)
        return cpu.ExpertArrays(
            self.w, self.scales, self.biases, self.group_size, self.bits, self.mode, bias, self.scale_dtype
        )
