"""A model of mlx-lm that trains on our kernels: ``train_on_kernels(module)`` and then, as often as parameters
change, ``loss``:

    model = train_on_kernels(module)
    loss_and_grad = nn.value_and_grad(module, lambda *batch: model.loss(*batch))

Layers change their class in place (``training_layers``), attention reads no mask of L times L
(``training_cache``), and head and loss are one operation that never holds the logits. What an architecture
has of its own stays mlx-lm's; the result is compared with mlx-lm's own before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.errors import UnsupportedModelError
from mlxserve.models.training_cache import TrainingCache, bind_training_attention
from mlxserve.models.training_layers import draw_dropout, use_training_layers
from mlxserve_kernels import ops

logger = logging.getLogger(__name__)

_PROBE_IDS = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5)
_TOLERANCE = 2e-3
"""Largest difference from mlx-lm's own logits and loss, relative to the largest logit."""
_HEAD_ROWS = 256
"""Rows that have logits at a time where head and loss are not one operation."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What makes logits of the rows behind the last norm: the layer, and what the file does to its result."""

    layer: nn.Module
    scale: float
    softcap: float | None

    def logits(self, hidden: mx.array) -> mx.array:
        is_table = isinstance(self.layer, nn.Embedding | nn.QuantizedEmbedding) or hasattr(
            self.layer, "as_linear"
        )
        logits = (self.layer.as_linear(hidden) if is_table else self.layer(hidden)) * self.scale
        return logits if self.softcap is None else mx.tanh(logits / self.softcap) * self.softcap

    @property
    def weights(self) -> dict[str, Any] | None:
        """The weights as ``ops.cross_entropy_head`` takes them; None where the layer is more than these."""
        if "bias" in self.layer or not hasattr(self.layer, "weight"):
            return None
        weights = {"w": self.layer["weight"]}
        if isinstance(self.layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            weights |= {name: self.layer.get(name) for name in ("scales", "biases")}
            weights |= {name: getattr(self.layer, name) for name in ("group_size", "bits", "mode")}
        elif not isinstance(self.layer, nn.Linear | nn.Embedding):
            return None
        return weights


_LOGITS: dict[str, Callable[[Any], tuple[float, float | None]]] = {
    "cohere": lambda model: (model.model.args.logit_scale, None),
    "cohere2": lambda model: (model.model.args.logit_scale, None),
    "gemma2": lambda model: (1.0, model.final_logit_softcapping),
    "granite": lambda model: (1.0 / model.logits_scaling, None),
    "granitemoe": lambda model: (1.0 / model.logits_scaling, None),
}
"""Scale and soft cap of logits, by mlx-lm's file; others have neither, or are found out by the comparison."""


class TrainingModel:
    """A module whose layers are on kernels with gradients. Holds the module, not copies of its parameters."""

    def __init__(
        self, module: nn.Module, backbone: nn.Module | None, head: _Head | None, *, has_masks: bool
    ) -> None:
        self.module = module
        self._backbone = backbone
        self._head = head
        self._has_masks = has_masks

    @property
    def has_fused_head(self) -> bool:
        """Whether head and loss are one operation, so that logits are never held."""
        return self._head is not None and self._head.weights is not None

    @property
    def can_pack(self) -> bool:
        """Whether rows may hold several segments."""
        return self._has_masks

    def loss(
        self,
        tokens: mx.array,
        targets: mx.array,
        weights: mx.array,
        segments: mx.array | None = None,
        *,
        with_gradient: bool = True,
    ) -> mx.array:
        """The sum of ``weights`` times the cross entropy of ``targets``: all [B, L], tokens and targets
        int32, weights float. A position of weight 0 may have any target. ``segments`` int32 [B, L]: tokens
        see their own run of equal ids alone. Without ``with_gradient`` less is computed: for evaluation.

        Raises UnsupportedModelError for segments where ``can_pack`` is False.
        """
        head, backbone = self._head, self._backbone
        draw_dropout(self.module)
        targets, weights = targets.reshape(-1).astype(mx.int32), weights.reshape(-1).astype(mx.float32)
        if head is None or backbone is None:
            logits = self._call(self.module, tokens, segments)
            return _plain_loss(logits.reshape(-1, logits.shape[-1]), targets, weights)
        hidden = self._call(backbone, tokens, segments)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        parts = head.weights
        if parts is None:
            return _loss_by_parts(head, hidden, targets, weights)
        return ops.cross_entropy_head(
            hidden,
            targets,
            weights,
            **parts,
            logit_scale=head.scale,
            softcap=head.softcap,
            with_gradient=with_gradient,
        )

    def _call(self, part: nn.Module, tokens: mx.array, segments: mx.array | None) -> mx.array:
        if not self._has_masks:
            if segments is not None:
                raise UnsupportedModelError("this architecture cannot train on packed rows")
            plain: mx.array = part(tokens)
            return plain
        y: mx.array = part(tokens, [TrainingCache(segments) for _ in self.module.layers])
        return y


def train_on_kernels(module: nn.Module) -> TrainingModel:
    """Switch an evaluated mlx-lm model, adapters and all, to our kernels, for float32 activations.

    What differs from mlx-lm's own result is left to mlx-lm: the attention, the head with its loss, or both;
    one line is logged for each. Raises UnsupportedModelError where even then the logits differ.
    """
    tokens = mx.array([_PROBE_IDS], dtype=mx.int32)
    is_training = module.training
    module.eval()
    expected = module(tokens)
    mx.eval(expected)
    has_masks = bind_training_attention(module)
    use_training_layers(module)
    head, backbone = _find_head(module), _find_backbone(module)
    try:
        for masks in (True, False) if has_masks else (False,):
            model = TrainingModel(module, backbone, head, has_masks=masks)
            if _has_logits(model, tokens, expected):
                return _with_checked_head(model, tokens, expected)
            if masks:
                logger.warning("attention is mlx-lm's own: this architecture does not take our masks")
    finally:
        module.train(is_training)
    raise UnsupportedModelError("its logits on our kernels differ from its own")


def checkpoint_blocks(module: nn.Module) -> None:
    """Let every block compute its forward again in the backward, which then holds the blocks' inputs alone.
    Like mlx-lm's ``grad_checkpoint``, but of this model alone."""
    for block in module.layers:
        if not hasattr(type(block), "is_checkpointed"):
            block.__class__ = _checkpointed_class(type(block))


def _checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        def inner(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            self.update(parameters)
            return original.__call__(self, *args, **kwargs)

        return mx.checkpoint(inner)(self.trainable_parameters(), *args, **kwargs)

    return type(original.__name__, (original,), {"__call__": call, "is_checkpointed": True})


def _find_backbone(module: nn.Module) -> nn.Module | None:
    for name in ("model", "transformer", "backbone"):
        part = module.get(name)
        if isinstance(part, nn.Module):
            return part
    return None


def _find_head(module: nn.Module) -> _Head | None:
    backbone = _find_backbone(module)
    layer = module.get("lm_head")
    if layer is None and backbone is not None:
        layer = backbone.get("embed_tokens")
    if not isinstance(layer, nn.Module):
        return None
    file = type(module).__module__.removeprefix("mlx_lm.models.")
    scale, softcap = _LOGITS.get(file, lambda _: (1.0, None))(module)
    return _Head(layer, scale, softcap)


def _has_logits(model: TrainingModel, tokens: mx.array, expected: mx.array) -> bool:
    """Whether the whole module still gives what it gave."""
    try:
        logits = model._call(model.module, tokens, None)
        mx.eval(logits)
    except Exception as error:
        if not model.can_pack:
            raise
        logger.info("%s", error)
        return False
    return _are_near(logits, expected, expected)


def _with_checked_head(model: TrainingModel, tokens: mx.array, expected: mx.array) -> TrainingModel:
    """The model, or one that makes logits, where its head does not give the loss of ``expected``."""
    targets, weights = tokens[:, ::-1], mx.ones(tokens.shape)
    rows = expected.reshape(-1, expected.shape[-1])
    want = _plain_loss(rows, targets.reshape(-1), weights.reshape(-1)) / tokens.size
    try:
        if _are_near(model.loss(tokens, targets, weights) / tokens.size, want, expected):
            return model
    except (ValueError, TypeError, AttributeError) as error:
        logger.info("%s", error)
    logger.warning("the logits of a batch are held at once: what this architecture does to them is not known")
    return TrainingModel(model.module, None, None, has_masks=model.can_pack)


def _are_near(got: mx.array, want: mx.array, logits: mx.array) -> bool:
    limit = _TOLERANCE * mx.maximum(mx.max(mx.abs(logits.astype(mx.float32))), 1.0)
    return bool((mx.max(mx.abs(got.astype(mx.float32) - want.astype(mx.float32))) <= limit).item())


def _plain_loss(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    known = mx.stop_gradient(mx.where(weights == 0, 0, targets))
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), known)
    return mx.sum(losses * weights)


def _loss_by_parts(head: _Head, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """For heads with an adapter or a bias: some rows at a time, whose logits are made again backward."""

    def part(parameters: Any, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        head.layer.update(parameters)
        return _plain_loss(head.logits(hidden), targets, weights)

    total = mx.array(0.0)
    parameters = head.layer.trainable_parameters()
    for begin in range(0, hidden.shape[0], _HEAD_ROWS):
        rows = slice(begin, begin + _HEAD_ROWS)
        total = total + mx.checkpoint(part)(parameters, hidden[rows], targets[rows], weights[rows])
    return total
