"""Integers with a scale and a zero point for each group: ``w = scale * (q - zero)``.

MLX has this as ``scale * q + bias`` with ``bias = -scale * zero``. Scales of 16 bits leave room for the
product with q or zero in float32, so that nothing is rounded there; MLX computes in the type of the scales,
which are therefore stored as float32.
"""

from __future__ import annotations

from abc import abstractmethod

import mlx.core as mx
import numpy as np

from mlxserve_convert.methods.method import columns_at, fields
from mlxserve_convert.mlx_checkpoint import dequantized
from mlxserve_convert.options import BITS, GROUP_SIZES
from mlxserve_convert.weights import Layout, Packed, Weight


def affine_layout(bits: int, group_size: int, columns: int) -> Layout | None:
    """MLX's layout for groups of a source: of the same size, or of parts that share their numbers."""
    if bits not in BITS or columns % group_size:
        return None
    size = max((size for size in GROUP_SIZES if group_size % size == 0), default=None)
    return None if size is None else Layout("affine", bits, size, mx.float32)


class AffineWeight(Weight):
    """``groups`` [columns] names the group of each column where they do not follow each other
    (act-order); such a matrix has no layout."""

    def __init__(
        self,
        shape: tuple[int, ...],
        bits: int,
        group_size: int,
        source_type: str,
        groups: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
    ) -> None:
        super().__init__(shape, mx.float32, frozenset({source_type}), is_quantized=True)
        self.bits = bits
        self.group_size = group_size
        self._groups = groups
        self.layout = affine_layout(bits, group_size, shape[-1]) if groups is None else None

    @abstractmethod
    def words(self, start: int, stop: int) -> mx.array:
        """The integers of some rows in MLX's words: [stop - start, ceil(columns * bits / 32)] uint32."""

    @abstractmethod
    def scales(self, start: int, stop: int) -> mx.array:
        """Float32 [stop - start, groups]."""

    @abstractmethod
    def zeros(self, start: int, stop: int) -> mx.array:
        """Float32, of the same shape or of one that goes with it."""

    def integers(self, start: int, stop: int) -> mx.array:
        return fields(self.words(start, stop), self.bits, self.num_columns).astype(mx.float32)

    def read_packed(self, start: int, stop: int) -> Packed:
        assert self.layout is not None
        scales = self.scales(start, stop)
        biases = -(scales * self.zeros(start, stop))
        repeats = self.group_size // self.layout.group_size
        if repeats > 1:
            scales, biases = (mx.repeat(part, repeats, axis=1) for part in (scales, biases))
        return Packed(self.words(start, stop), scales, biases)

    def read(self, start: int, stop: int) -> mx.array:
        if self.layout is not None:
            return dequantized(self.read_packed(start, stop), self.layout, mx.float32)
        groups = self._groups
        if groups is None:
            groups = np.arange(self.num_columns, dtype=np.int64) // self.group_size
        scales = self.scales(start, stop)
        zeros = self.zeros(start, stop)
        if zeros.ndim:
            zeros = columns_at(mx.broadcast_to(zeros, scales.shape), groups)
        return (self.integers(start, stop) - zeros) * columns_at(scales, groups)
