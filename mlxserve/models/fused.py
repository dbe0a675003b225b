"""Standard decoder blocks as whole operations (``mlxserve_kernels.decoder``).

A block is recognised by its mlx-lm class and the classes of its parts. Consecutive recognised blocks form
stacks: the first block of a stack runs all its layers, the others hand on what they get. So an
architecture's own loop over its layers stays as it is, and blocks that are not recognised stay mlx-lm's.
Caches of other kinds than ours always take mlx-lm's own path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxserve.models.experts import gated_experts, router
from mlxserve.models.joined import join_layers
from mlxserve.models.layers import KernelLinear, KernelQuantizedLinear, KernelRMSNorm, TiledLinear
from mlxserve.models.paged import LayerSpec, ModelPages, PagedLayerCache, PagedMetadata
from mlxserve.models.rope_table import rope_table
from mlxserve_kernels.decoder import DecoderLayer, Experts, Norm, Projection, Rope
from mlxserve_kernels.dispatch import decoder_kind
from mlxserve_kernels.op_stack import OpStack
from mlxserve_kernels.stacks import Stack, can_stack, make_stack


@dataclass(frozen=True, slots=True)
class _Family:
    """How the blocks of an mlx-lm file are put together: names of norms in the order of use, and where the
    experts are in blocks that have them."""

    attention_norm: str | None = "input_layernorm"
    post_attention_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    post_mlp_norm: str | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: str = "mlp"


_PRE_NORM = _Family()
_GEMMA = _Family(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
    activation="gelu_tanh",
)
_POST_NORM = _Family(
    attention_norm=None,
    post_attention_norm="post_attention_layernorm",
    mlp_norm=None,
    post_mlp_norm="post_feedforward_layernorm",
)
_FAMILIES = {
    "gemma2.TransformerBlock": _GEMMA,
    "gemma3_text.TransformerBlock": _GEMMA,
    "granite.TransformerBlock": _PRE_NORM,
    "granitemoe.GraniteMoeDecoderLayer": _Family(experts="block_sparse_moe"),
    "llama.TransformerBlock": _PRE_NORM,
    "mixtral.MixtralDecoderLayer": _Family(experts="block_sparse_moe"),
    "olmo2.TransformerBlock": _POST_NORM,
    "olmoe.TransformerBlock": _PRE_NORM,
    "phi3.TransformerBlock": _PRE_NORM,
    "qwen2.TransformerBlock": _PRE_NORM,
    "qwen2_moe.Qwen2MoeDecoderLayer": _PRE_NORM,
    "qwen3.TransformerBlock": _PRE_NORM,
    "qwen3_moe.Qwen3MoeDecoderLayer": _PRE_NORM,
}
"""By file and class. SmolLM3 and Mistral are made of Llama's blocks."""

_OFFSET_NORMS = ("gemma2.RMSNorm", "gemma3_text.RMSNorm")
"""Norms whose weight is an offset from 1."""


class _NotStandardError(Exception):
    """A part is none that we know."""


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One block's share of a stack. Only the first block of a stack has it; ``experts`` and their norm are
    run by mlx-lm behind the attention. ``projections``: names and numbers of outputs of those that the stack
    runs, by the paths of the block's layers; one layer may be several."""

    index: int
    stack: Stack | None
    experts: str | None
    norm: str | None
    projections: Mapping[str, tuple[tuple[str, int], ...]]


_ATTENTION_PATHS = {
    "self_attn.q_proj": ("q",),
    "self_attn.k_proj": ("k",),
    "self_attn.v_proj": ("v",),
    "self_attn.qkv_proj": ("q", "k", "v"),
    "self_attn.o_proj": ("o",),
}
_MLP_PATHS = {
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "gate_up_proj": ("gate", "up"),
    "down_proj": ("down",),
}


def fuse_blocks(model: nn.Module, specs: Sequence[LayerSpec]) -> int:
    """Fuse the recognised blocks of an evaluated model; returns how many. Layer i has ``specs[i]``."""
    blocks = list(model.layers)
    if len(blocks) != len(specs):
        return 0
    layers = [_describe(block, spec) for block, spec in zip(blocks, specs, strict=True)]
    index = 0
    while index < len(blocks):
        end = _end_of_stack(layers, index)
        if end > index:
            _fuse(blocks[index:end], layers[index:end], index)
        index = max(end, index + 1)
    return sum(layer is not None for layer in layers)


def whole_stack(model: nn.Module) -> Stack | None:
    """The stack that runs all blocks, if there is one that leaves nothing for mlx-lm to do."""
    parts: list[FusedPart | None] = [getattr(block, "fused_part", None) for block in model.layers]
    stack = parts[0].stack if parts and parts[0] is not None else None
    if stack is None or stack.num_layers != len(parts):
        return None
    return None if any(part is None or part.experts is not None for part in parts) else stack


def unfuse_blocks(model: nn.Module) -> None:
    """Give every block its own class again."""
    for block in model.layers:
        if hasattr(type(block), "unfused_class"):
            block.__class__ = type(block).unfused_class


def fused_parts(model: nn.Module) -> dict[str, FusedPart]:
    """The part of each fused block, by its path in the model."""
    return {
        path: module.fused_part
        for path, module in model.named_modules()
        if hasattr(type(module), "unfused_class")
    }


def _end_of_stack(layers: Sequence[DecoderLayer | None], index: int) -> int:
    end = index
    while end < len(layers):
        layer = layers[end]
        if layer is None:
            break
        end += 1
        if layer.gate is None and layer.experts is None:
            break
    return end


def _fuse(blocks: Sequence[nn.Module], layers: Sequence[DecoderLayer | None], first: int) -> None:
    stack = make_stack([layer for layer in layers if layer is not None])
    for offset, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
        family = _FAMILIES[_name(block)]
        has_experts = layer is not None and layer.gate is None and layer.experts is None
        part = FusedPart(
            index=first + offset,
            stack=stack if offset == 0 else None,
            experts=family.experts if has_experts else None,
            norm=family.mlp_norm,
            projections={} if layer is None else _projections(block, layer, family),
        )
        object.__setattr__(block, "fused_part", part)
        block.__class__ = _fused_class(type(block))


def _projections(
    block: nn.Module, layer: DecoderLayer, family: _Family
) -> dict[str, tuple[tuple[str, int], ...]]:
    mlp = family.experts if layer.experts is None else f"{family.experts}.shared_expert"
    paths = _ATTENTION_PATHS | {f"{mlp}.{path}": names for path, names in _MLP_PATHS.items()}
    widths = {name: part.num_outputs for name, part in layer.projections.items()}
    return {
        path: tuple((name, widths[name]) for name in names)
        for path, names in paths.items()
        if _has_layer(block, path) and widths.keys() >= set(names)
    }


def _has_layer(block: nn.Module, path: str) -> bool:
    holder: Any = block
    for name in path.split("."):
        if name not in holder:
            return False
        holder = holder[name]
    return True


def _fused_class(original: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PagedLayerCache):
            plain: mx.array = original.__call__(self, x, mask, cache)
            return plain
        part: FusedPart = self.fused_part
        if part.stack is not None:
            x = run_stack(part.stack, x, cache.layers, part.index, cache.metadata)
        if part.experts is not None:
            normed = x if part.norm is None else self[part.norm](x)
            x = x + self[part.experts](normed) * getattr(self, "residual_multiplier", 1.0)
        return x

    return type(original.__name__, (original,), {"__call__": call, "unfused_class": original})


def run_stack(stack: Stack, x: mx.array, pages: ModelPages, first: int, metadata: PagedMetadata) -> mx.array:
    """The hidden state behind a stack that begins with layer ``first``."""
    layer, rows = pages[first], metadata.adapters
    adapters = None if rows is None else rows.adapters.get(first)
    slots = None if rows is None or adapters is None else rows.slots
    if isinstance(stack, OpStack):
        keys = [PagedLayerCache(pages, first + index, metadata) for index in range(stack.num_layers)]
        native = None if adapters is None else adapters.native
        return stack(x, keys, adapters=native, adapter_slots=slots)
    hidden, layer.keys = stack(
        pages.held(first, stack),
        x,
        metadata.positions,
        metadata.slot_mapping,
        metadata.block_tables,
        metadata.q_starts,
        metadata.kv_lens,
        layer.keys,
        adapters=adapters,
        adapter_slots=slots,
    )
    return hidden


def _name(module: nn.Module) -> str:
    """File and class of an mlx-lm module: ``llama.TransformerBlock``."""
    path, name = type(module).__module__, type(module).__name__
    return f"{path.removeprefix('mlx_lm.models.')}.{name}" if path.startswith("mlx_lm.models.") else name


def _describe(block: nn.Module, spec: LayerSpec) -> DecoderLayer | None:
    """The block as a layer; None where it is not standard or its weights are in other formats."""
    family = _FAMILIES.get(_name(block))
    if family is None:
        return None
    try:
        layer = DecoderLayer(
            **_attention(block.self_attn, spec),
            **_mlp(block, family),
            attention_norm=_norm(block, family.attention_norm),
            post_attention_norm=_norm(block, family.post_attention_norm),
            mlp_norm=_norm(block, family.mlp_norm),
            post_mlp_norm=_norm(block, family.post_mlp_norm),
            activation=family.activation,
            residual_multiplier=float(getattr(block, "residual_multiplier", 1.0)),
        )
    except _NotStandardError:
        return None
    return layer if can_stack(layer) else None


def _attention(attention: nn.Module, spec: LayerSpec) -> dict[str, Any]:
    heads = attention.n_heads if hasattr(attention, "n_heads") else attention.num_heads
    dim, value_dim, kv_heads = spec.key_dim, spec.value_dim, spec.num_kv_heads
    if "qkv_proj" in attention:
        ends = [heads * dim, (heads + kv_heads) * dim, (heads + kv_heads) * dim + kv_heads * value_dim]
        q, k, v = _split(attention.qkv_proj, ends)
    else:
        q, k, v = _separate([attention[name] for name in ("q_proj", "k_proj", "v_proj")])
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "value_dim": value_dim,
        "scale": float(attention.scale),
        "window": spec.window,
        "softcap": getattr(attention, "attn_logit_softcapping", None),
        "q": q,
        "k": k,
        "v": v,
        "o": _projection(attention.o_proj),
        "q_norm": _norm(attention, "q_norm" if "q_norm" in attention else None),
        "k_norm": _norm(attention, "k_norm" if "k_norm" in attention else None),
        "rope": _rope(attention.rope),
    }


def _mlp(block: nn.Module, family: _Family) -> dict[str, Any]:
    """Nothing for a block with experts that are not standard."""
    mlp = block[family.experts]
    if "switch_mlp" in mlp:
        return _experts(mlp, family)
    if "gate_up_proj" in mlp:
        width = _projection(mlp.gate_up_proj).num_rows // 2
        gate, up = _split(mlp.gate_up_proj, [width, 2 * width])
    else:
        gate, up = _projection(mlp.gate_proj), _projection(mlp.up_proj)
    return {"gate": gate, "up": up, "down": _projection(mlp.down_proj)}


def _experts(block: nn.Module, family: _Family) -> dict[str, Any]:
    parts, how = gated_experts(block.switch_mlp), router(block)
    if parts is None or how is None or parts.activation != family.activation:
        return {}
    shared: dict[str, Any] = {}
    try:
        if "shared_expert" in block:
            names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
            shared = {part: _projection(block.shared_expert[name]) for part, name in names.items()}
        experts = Experts(
            router=_projection(how.layer),
            gate=parts.gate,
            up=parts.up,
            down=parts.down,
            top_k=how.top_k,
            is_normalized=how.is_normalized,
            shared_gate=_projection(block.shared_expert_gate) if shared else None,
        )
    except _NotStandardError:
        return {}
    return {"experts": experts, **shared} if experts.is_supported else {}


def _projection(layer: nn.Module, begin: int = 0, end: int | None = None) -> Projection:
    bias = layer.get("bias")
    if type(layer) is KernelLinear:
        return Projection(layer["weight"], bias=bias, begin=begin, end=end)
    if type(layer) is TiledLinear:
        return Projection(
            layer["tiles"],
            group_size=layer.group_size,
            bits=layer.bits,
            bias=bias,
            begin=begin,
            end=end,
            scale_dtype=layer.scale_dtype,
        )
    if type(layer) is not KernelQuantizedLinear:
        raise _NotStandardError
    return Projection(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        bias,
        begin,
        end,
        mode=layer.mode,
    )


def _split(layer: nn.Module, ends: Sequence[int]) -> list[Projection]:
    """Consecutive outputs of one layer."""
    return [_projection(layer, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _separate(layers: Sequence[nn.Module]) -> list[Projection]:
    """Layers that read the same rows: op by op, as ranges of one weight where their formats allow it."""
    parts = [_projection(layer) for layer in layers]
    joined = join_layers(layers) if decoder_kind() == "ops" else None
    if joined is None:
        return parts
    whole = replace(
        parts[0],
        w=joined["weight"],
        scales=joined.get("scales"),
        biases=joined.get("biases"),
        bias=joined.get("bias"),
    )
    ends = list(accumulate(part.num_outputs for part in parts))
    return [replace(whole, begin=a, end=b) for a, b in zip([0, *ends], ends, strict=False)]


def _norm(module: nn.Module, name: str | None) -> Norm | None:
    if name is None:
        return None
    norm = module[name]
    if type(norm) is KernelRMSNorm:
        return Norm(norm["weight"], norm.eps)
    if _name(norm) in _OFFSET_NORMS:
        return Norm(1.0 + norm["weight"], norm.eps)
    raise _NotStandardError


def _rope(rope: nn.Module) -> Rope | None:
    if _name(rope) == "smollm3.NoPE":
        return None
    table = rope_table(rope)
    if table is None:
        raise _NotStandardError
    return table
