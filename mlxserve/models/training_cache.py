"""What stands in the place of an mlx-lm cache while a model trains: nothing is cached, and masks become
windows and segments that our attention reads, in place of arrays of L times L."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve_kernels import ops


@dataclass(frozen=True, slots=True)
class TrainingMask:
    """What each token of a row sees: itself and those before it, of that the last ``window``, of its own
    segment (see ``ops.causal_attention``). Stands for the mask that a model hands to its attention."""

    window: int | None
    segments: mx.array | None


class TrainingCache:
    """Looks like an mlx-lm cache to one layer in one forward over whole rows [B, L] of tokens."""

    offset = 0

    def __init__(self, segments: mx.array | None = None) -> None:
        self._segments = segments

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The keys and values of the row, as they came."""
        return keys, values

    def make_mask(
        self, length: int, *, return_array: bool = False, window_size: int | None = None
    ) -> TrainingMask:
        """A window as long as the row is none. A model that computes with its mask fails at its first use."""
        return TrainingMask(window_size if window_size and window_size < length else None, self._segments)


def bind_training_attention(model: nn.Module) -> bool:
    """Rebind ``scaled_dot_product_attention`` in the mlx-lm modules that define the layers of ``model``, so
    that a ``TrainingMask`` leads to our attention; every other mask goes where it went before. Attention that
    is written out (Gemma 2) changes its class instead. Returns whether there was any of it."""
    has_any = False
    for _, module in model.named_modules():
        kind = type(module)
        if (kind.__module__, kind.__name__) == ("mlx_lm.models.gemma2", "Attention"):
            module.__class__ = _softcapped_attention(kind)
        has_any |= hasattr(type(module), "is_training_attention")
    names = {type(module).__module__ for _, module in model.named_modules()}
    for name in names:
        module = sys.modules[name]
        original = vars(module).get("scaled_dot_product_attention")
        if original is None or not name.startswith("mlx_lm.models."):
            continue
        has_any = True
        if not hasattr(original, "is_training_dispatcher"):
            module.scaled_dot_product_attention = _dispatcher(original)  # type: ignore[attr-defined]
    return has_any


def _dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if not isinstance(mask, TrainingMask):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if sinks is not None:
            raise NotImplementedError("attention with sinks has no gradient of ours")
        return ops.causal_attention(
            queries, keys, values, scale=scale, window=mask.window, segments=mask.segments
        )

    # What was marked stays marked: it may be what serving binds (mlxserve.models.paged).
    vars(scaled_dot_product_attention).update(vars(original), is_training_dispatcher=True)
    return scaled_dot_product_attention


def _softcapped_attention(original: type[nn.Module]) -> type[nn.Module]:
    """Gemma 2's attention: ``original`` but for our masks."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(mask, TrainingMask):
            plain: mx.array = original.__call__(self, x, mask, cache)
            return plain
        rows, length, _ = x.shape
        q, k, v = (
            layer(x).reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
            for layer, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        y = ops.causal_attention(
            self.rope(q),
            self.rope(k),
            v,
            scale=self.scale,
            window=mask.window,
            softcap=self.attn_logit_softcapping,
            segments=mask.segments,
        )
        joined: mx.array = self.o_proj(y.transpose(0, 2, 1, 3).reshape(rows, length, -1))
        return joined

    return type(original.__name__, (original,), {"__call__": call, "is_training_attention": True})
