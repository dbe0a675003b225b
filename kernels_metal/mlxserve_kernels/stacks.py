"""Which stack runs decoder layers here: the C++ extension's, or one op by op."""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve_kernels.decoder import DecoderLayer, DecoderStack
from mlxserve_kernels.dispatch import decoder_kind, extension
from mlxserve_kernels.op_stack import OpStack

Stack = DecoderStack | OpStack


def can_stack(layer: DecoderLayer) -> bool:
    """Whether a stack of ``make_stack`` runs this layer."""
    kind = decoder_kind()
    if kind == "blocks":
        return False
    are_experts_read = layer.experts is None or layer.experts.is_supported
    are_projections_read = all(part.is_supported for part in layer.projections.values())
    return are_experts_read and are_projections_read


def make_stack(layers: Sequence[DecoderLayer]) -> Stack:
    """Of consecutive layers, of which each ``can_stack``. ValueError where parts do not fit together."""
    if decoder_kind() == "fused":
        assert extension() is not None
        return DecoderStack(layers)
    return OpStack(layers)
