"""mlx-lm's rotary positions as our kernels take them."""

from __future__ import annotations

from math import log

import mlx.core as mx
import mlx.nn as nn

from mlxserve_kernels.decoder import Rope

_WITH_TABLE = ("Llama3RoPE", "YarnRoPE", "SuScaledRoPE", "ProportionalRoPE")


def rope_table(rope: nn.Module) -> Rope | None:
    """The rotation that a module of mlx or of mlx-lm's ``rope_utils`` makes; None for one of another kind."""
    if type(rope) is nn.RoPE:
        half = rope.dims // 2
        # As mx.fast.rope computes them from the base.
        frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * mx.array(log(rope.base) / half))
        return Rope(frequencies, position_scale=rope.scale, is_interleaved=rope.traditional)
    kind = type(rope)
    if kind.__module__ != "mlx_lm.models.rope_utils" or kind.__name__ not in _WITH_TABLE:
        return None
    return Rope(
        1.0 / rope._freqs,
        input_scale=float(getattr(rope, "mscale", getattr(rope, "_scale", 1.0))),
        is_interleaved=getattr(rope, "traditional", False),
    )
