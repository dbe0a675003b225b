"""Standard mlx layers on our kernels. A loaded model's layers change their class in place: the weights,
names and attributes stay as mlx-lm has them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxserve.models.experts import is_quantized_switch_linear, put_in_tiles, use_expert_kernels
from mlxserve_kernels import ops


class KernelLinear(nn.Linear):
    """``nn.Linear``; the weight may be narrower than the activations."""

    def __call__(self, x: mx.array) -> mx.array:
        y = ops.linear(x, self["weight"])
        return y + self["bias"] if "bias" in self else y


class KernelQuantizedLinear(nn.QuantizedLinear):
    """``nn.QuantizedLinear``."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _quantized_matmul(self, x)
        return y + self["bias"] if "bias" in self else y


class KernelEmbedding(nn.Embedding):
    """``nn.Embedding``; rows are widened to float32 where activations are."""

    activation_dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        if self.activation_dtype == mx.float32:
            return ops.embed_rows(x, self["weight"])
        return self["weight"][x].astype(self.activation_dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return ops.linear(x, self["weight"])


class KernelQuantizedEmbedding(nn.QuantizedEmbedding):
    """``nn.QuantizedEmbedding``; rows are dequantized in the dtype of the activations."""

    activation_dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        biases = self.get("biases")
        if self.activation_dtype == mx.float32:
            return ops.embed_rows(
                x,
                self["weight"],
                self["scales"],
                biases,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
        is_affine = biases is not None
        scales = self["scales"][x]
        return mx.dequantize(
            self["weight"][x],
            scales=scales.astype(self.activation_dtype) if is_affine else scales,
            biases=biases[x].astype(self.activation_dtype) if is_affine else None,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        ).astype(self.activation_dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return _quantized_matmul(self, x)


class _Tiled(nn.Module):
    """Affine weights kept as ``tiles`` (``ops.pack_tiles``) in place of weight, scales and biases, which are
    unpacked for who asks."""

    scale_dtype: mx.Dtype
    group_size: int
    bits: int

    @property
    def weight(self) -> mx.array:
        return self._unpacked()[0]

    @property
    def scales(self) -> mx.array:
        return self._unpacked()[1]

    @property
    def biases(self) -> mx.array:
        return self._unpacked()[2]

    def _unpacked(self) -> tuple[mx.array, mx.array, mx.array]:
        return ops.unpack_tiles(
            self["tiles"], group_size=self.group_size, bits=self.bits, scale_dtype=self.scale_dtype
        )

    def _matmul(self, x: mx.array) -> mx.array:
        return ops.tiled_matmul(
            x, self["tiles"], group_size=self.group_size, bits=self.bits, scale_dtype=self.scale_dtype
        )


class TiledLinear(_Tiled, nn.QuantizedLinear):
    """``nn.QuantizedLinear`` on the integer kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self._matmul(x)
        return y + self["bias"] if "bias" in self else y


class TiledEmbedding(_Tiled, nn.QuantizedEmbedding):
    """``nn.QuantizedEmbedding`` on the integer kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        return ops.tiled_rows(
            x, self["tiles"], group_size=self.group_size, bits=self.bits, scale_dtype=self.scale_dtype
        )

    def as_linear(self, x: mx.array) -> mx.array:
        return self._matmul(x)


_TILED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    KernelQuantizedLinear: TiledLinear,
    KernelQuantizedEmbedding: TiledEmbedding,
}


def tile_weights(layer: nn.Module) -> None:
    """``put_in_tiles`` for layers of ours; every other module stays as it is."""
    tiled = _TILED_CLASSES.get(type(layer))
    if tiled is None:
        if is_quantized_switch_linear(layer):
            put_in_tiles(layer)
    elif put_in_tiles(layer):
        layer.__class__ = tiled


class KernelRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm``."""

    def __call__(self, x: mx.array) -> mx.array:
        return ops.rms_norm(x, self["weight"], self.eps)


KERNEL_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: KernelLinear,
    nn.QuantizedLinear: KernelQuantizedLinear,
    nn.Embedding: KernelEmbedding,
    nn.QuantizedEmbedding: KernelQuantizedEmbedding,
    nn.RMSNorm: KernelRMSNorm,
}


def use_kernels(model: nn.Module, activation_dtype: mx.Dtype) -> None:
    """Put every standard layer of ``model``, and those with experts, on our kernels. Subclasses with a
    ``__call__`` of their own are left alone: their arithmetic is their own."""
    for _, module in model.named_modules():
        use_expert_kernels(module)
        replacement = KERNEL_CLASSES.get(type(module))
        if replacement is not None:
            module.__class__ = replacement
            if replacement in _EMBEDDINGS:
                object.__setattr__(module, "activation_dtype", activation_dtype)


_EMBEDDINGS = (KernelEmbedding, KernelQuantizedEmbedding)


def _quantized_matmul(layer: nn.Module, x: mx.array) -> mx.array:
    return ops.quantized_matmul(
        x,
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
