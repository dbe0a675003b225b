"""A model as it is trained: loaded in plain layers, changed, and then put on kernels with gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.models import training
from mlxserve.models.loader import load_module
from mlxserve.tuning.batches import Batch


class TrainingModel:
    """``module`` is mlx-lm's model. Change it (adapters, frozen parts) before ``start``; then ``loss`` may be
    differentiated for its trainable parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._model: training.TrainingModel | None = None

    def start(self) -> None:
        """Puts layers, adapters and all, on kernels with gradients. Raises UnsupportedModelError where these
        do not compute what mlx-lm does."""
        self._model = training.train_on_kernels(self.module)

    @property
    def can_pack(self) -> bool:
        """Whether a row may hold several examples."""
        return self._started.can_pack

    @property
    def _started(self) -> training.TrainingModel:
        assert self._model is not None, "start() comes first"
        return self._model

    def recompute_activations(self) -> None:
        """Holds one residual a layer instead of all activations, and computes the rest again."""
        training.checkpoint_blocks(self.module)

    def loss(self, module: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """The summed loss of a batch and the sum of its weights."""
        assert module is self.module
        weights = mx.array(batch.weights)
        # One segment a row needs no mask of segments: padding comes after it, and has no weight.
        segments = mx.array(batch.segment_ids) if batch.segment_ids.max() > 1 else None
        summed = self._started.loss(
            mx.array(batch.token_ids),
            mx.array(batch.targets),
            weights,
            segments,
            with_gradient=module.training,
        )
        return summed, mx.sum(weights)

    def logits(self, tokens: mx.array) -> mx.array:
        """[B, L, V] of whole rows [B, L]."""
        logits: Any = self.module(tokens)
        return logits

    def make_caches(self) -> list[Any]:
        """mlx-lm's own caches of one row."""
        caches: list[Any] = make_prompt_cache(self.module)
        return caches

    def next_logits(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """[V] of the last of some tokens [1, L] that follow what the caches hold."""
        logits: mx.array = self.module(tokens, caches)
        return logits[0, -1]


def load_training_model(folder: Path) -> TrainingModel:
    """Raises ModelLoadError or UnsupportedModelError for a folder that cannot be loaded."""
    return TrainingModel(load_module(folder))
