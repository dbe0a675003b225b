"""Rows of floats in the layout that they are written in."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_convert.weights import Layout, Packed
from mlxserve_kernels import ops


def quantized_rows(values: mx.array, layout: Layout, importance: mx.array | None) -> Packed:
    """Of finite values [rows, columns] in the dtype of the scales; ``importance`` as for ``ops.quantize``."""
    # A search clips outliers; 8 bits have steps enough to spare that.
    is_searched = layout.mode == "affine" and layout.bits < 8
    words, scales, biases = ops.quantize(
        values,
        group_size=layout.group_size,
        bits=layout.bits,
        mode=layout.mode,
        effort=ops.SEARCH_EFFORT if is_searched else 0,
        importance=importance if is_searched else None,
    )
    return Packed(words, scales, biases)
