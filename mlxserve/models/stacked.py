"""A model whose blocks are all one stack, called without mlx-lm's own code: embedding, stack, norm, head.

mlx-lm's loop over blocks, caches and masks costs as much time a token as a small model's kernels leave for
all of Python. Only files whose ends we know are called so; all others run their own code around the stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.models.fused import run_stack, whole_stack
from mlxserve.models.paged import ModelPages, PagedMetadata
from mlxserve_kernels.stacks import Stack


@dataclass(frozen=True, slots=True)
class _Ends:
    """What an mlx-lm file does between its embedding and its blocks, and behind its head; functions of the
    model and the rows."""

    scale_embedded: Callable[[Any, mx.array], mx.array] | None = None
    scale_logits: Callable[[Any, mx.array], mx.array] | None = None


def _softcap(model: Any, logits: mx.array) -> mx.array:
    return mx.tanh(logits / model.final_logit_softcapping) * model.final_logit_softcapping


def _round_scale(model: Any, rows: mx.array) -> mx.array:
    """Gemma 3 was trained with a scale that is rounded."""
    return rows * mx.array(model.args.hidden_size**0.5, mx.bfloat16).astype(rows.dtype)


_PLAIN = _Ends()
_GRANITE = _Ends(
    scale_embedded=lambda model, rows: rows * model.model.embedding_multiplier,
    scale_logits=lambda model, logits: logits / model.logits_scaling,
)
_ENDS = {
    "gemma2": _Ends(lambda model, rows: rows * model.args.hidden_size**0.5, _softcap),
    "gemma3_text": _Ends(_round_scale),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "llama": _PLAIN,
    "mixtral": _PLAIN,
    "olmo2": _PLAIN,
    "olmoe": _PLAIN,
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "smollm3": _PLAIN,
}
"""By mlx-lm's file."""


class StackedModel:
    """What ``stacked_model`` found. Holds the parts of the module, not copies of them."""

    def __init__(self, module: nn.Module, stack: Stack, ends: _Ends) -> None:
        self._module = module
        self._ends = ends
        self._stack = stack
        self._embed = module.model.embed_tokens
        self._norm = module.model.norm
        self._head = module.lm_head if "lm_head" in module else self._embed.as_linear

    def __call__(
        self,
        token_ids: mx.array,
        pages: ModelPages,
        metadata: PagedMetadata,
        sampled_rows: mx.array | None,
    ) -> mx.array:
        """Logits [R, V] of the sampled rows (None: all) of a flat batch of T tokens."""
        rows = self._embed(token_ids)
        if self._ends.scale_embedded is not None:
            rows = self._ends.scale_embedded(self._module, rows)
        rows = run_stack(self._stack, rows, pages, 0, metadata)
        if sampled_rows is not None:
            rows = rows[sampled_rows]
        logits: mx.array = self._head(self._norm(rows))
        if self._ends.scale_logits is not None:
            logits = self._ends.scale_logits(self._module, logits)
        return logits


def stacked_model(module: nn.Module) -> StackedModel | None:
    """A fused model as one; None where its blocks are no single stack, or its file is not known."""
    package, _, file = type(module).__module__.rpartition(".")
    ends = _ENDS.get(file) if package == "mlx_lm.models" else None
    stack = None if ends is None else whole_stack(module)
    return None if ends is None or stack is None else StackedModel(module, stack, ends)
