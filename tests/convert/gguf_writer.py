"""Tiny random models of every GGUF family, written in the conventions of llama.cpp's converter.

Shares nothing with the reader: names and keys come from the ``gguf`` package's own tables and writer methods,
and what its converter does to the weights is written down here once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map

from tests.convert.checkpoints import LLAMA, Arrays, add_byte_level_tokenizer, pair_rows, random_weights

BASE: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "model_type"}


def no_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """An architecture without keys of its own."""


@dataclass(frozen=True)
class Family:
    """``config`` goes to mlx-lm's model. ``names`` are GGUF's parts for those of mlx-lm that the package's
    table does not know. ``is_paired``: rows of q and k are in pairs. ``norm_offset`` is added to norms."""

    arch: MODEL_ARCH
    config: dict[str, Any]
    add_keys: Callable[[gguf.GGUFWriter, dict[str, Any]], None] = no_keys
    names: dict[str, str] = field(default_factory=dict)
    is_paired: bool = False
    norm_offset: float = 0.0

    @property
    def name(self) -> str:
        return gguf.MODEL_ARCH_NAMES[self.arch]


def _gemma2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(4096)


def _gemma3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])


def _phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    scaling = config["rope_scaling"]
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors((1 + np.log(256 / 64) / np.log(64)) ** 0.5)
    for kind in ("long", "short"):
        factors = np.array(scaling[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _cohere(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])


def _glm4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(8)


def _experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])


def _gpt_oss(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _experts(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_rope_scaling_orig_ctx_len(config["rope_scaling"]["original_max_position_embeddings"])


_GEMMA = BASE | {"tie_word_embeddings": True, "num_key_value_heads": 1}
_COHERE = BASE | {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "tie_word_embeddings": True}
_LONGROPE = {
    "type": "longrope",
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "short_factor": [1.0] * 6,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES = [
    Family(MODEL_ARCH.LLAMA, BASE | {"model_type": "llama"}, is_paired=True),
    Family(MODEL_ARCH.QWEN2, BASE | {"model_type": "qwen2"}),
    Family(MODEL_ARCH.QWEN3, BASE | {"model_type": "qwen3", "head_dim": 32}),
    Family(
        MODEL_ARCH.QWEN3MOE,
        BASE
        | {
            "model_type": "qwen3_moe",
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        _experts,
        {
            "mlp.gate": "ffn_gate_inp",
            "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
            "mlp.switch_mlp.up_proj": "ffn_up_exps",
            "mlp.switch_mlp.down_proj": "ffn_down_exps",
        },
    ),
    Family(MODEL_ARCH.GEMMA, _GEMMA | {"model_type": "gemma", "head_dim": 32}, norm_offset=1.0),
    Family(
        MODEL_ARCH.GEMMA2,
        _GEMMA
        | {
            "model_type": "gemma2",
            "head_dim": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 32,
        },
        _gemma2,
        norm_offset=1.0,
    ),
    Family(
        MODEL_ARCH.GEMMA3,
        _GEMMA
        | {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 32,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 8,
            "sliding_window_pattern": 6,
            "rope_scaling": {"type": "linear", "factor": 8.0},
        },
        _gemma3,
        norm_offset=1.0,
    ),
    Family(
        MODEL_ARCH.PHI3,
        BASE
        | {
            "model_type": "phi3",
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_scaling": _LONGROPE,
        },
        _phi3,
    ),
    Family(
        MODEL_ARCH.GRANITE,
        BASE
        | {
            "model_type": "granite",
            "attention_multiplier": 0.125,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "attention_bias": False,
            "mlp_bias": False,
        },
        _granite,
        is_paired=True,
    ),
    Family(MODEL_ARCH.OLMO2, BASE | {"model_type": "olmo2"}),
    Family(
        MODEL_ARCH.SMOLLM3,
        BASE | {"model_type": "smollm3", "num_hidden_layers": 4},
        is_paired=True,
    ),
    Family(
        MODEL_ARCH.GPT_OSS,
        BASE
        | {
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_scaling": _YARN,
        },
        _gpt_oss,
        {
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_proj": "ffn_gate_exps",
            "mlp.experts.up_proj": "ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
            "self_attn.sinks": "attn_sinks",
            "post_attention_layernorm": "post_attention_norm",
        },
    ),
    Family(
        MODEL_ARCH.COMMAND_R,
        _COHERE | {"model_type": "cohere", "use_qk_norm": True},
        _cohere,
    ),
    Family(
        MODEL_ARCH.COHERE2,
        _COHERE
        | {
            "model_type": "cohere2",
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "sliding_window_pattern": 4,
        },
        _cohere,
    ),
    Family(
        MODEL_ARCH.GLM4,
        BASE | {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
        _glm4,
        {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
        },
    ),
]


def family_weights(family: Family, seed: int = 0) -> Arrays:
    """Float32 arrays by mlx-lm's names; a tied model has no head."""
    weights = random_weights(family.config, seed)
    if family.config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    rng = np.random.default_rng(seed + 1)
    for name, values in weights.items():
        if "norm" in name:
            center = 1.0 - family.norm_offset
            weights[name] = (center + rng.standard_normal(values.shape) * 0.2).astype(np.float32)
    return weights


def write_family(
    path: Path,
    family: Family,
    weights: Arrays,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter, int], None] = add_byte_level_tokenizer,
    split_max_tensors: int = 0,
    metadata: dict[str, Any] | None = None,
) -> Arrays:
    """Writes matrices as ``kind`` (or what ``kinds`` says of parts of names) and returns the weights that the
    file holds, by mlx-lm's names."""
    config = family.config
    writer = gguf.GGUFWriter(path, family.name, split_max_tensors=split_max_tensors)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if "layer_norm_eps" not in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    family.add_keys(writer, config)
    tokenizer(writer, config["vocab_size"])
    for key, value in (metadata or {}).items():
        adder = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}.get(type(value))
        writer.add_array(key, value) if adder is None else adder(key, value)
    held: Arrays = {}
    for name, values in weights.items():
        own = next((k for part, k in (kinds or {}).items() if part in name), kind)
        held[name] = _add_tensor(writer, family, name, values, own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_tensor(
    writer: gguf.GGUFWriter, family: Family, name: str, values: np.ndarray, kind: GGMLQuantizationType
) -> np.ndarray:
    config = family.config
    part = name.split(".")[-2]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(part)
    is_paired = family.is_paired and heads is not None
    offset = np.float32(family.norm_offset if "norm" in name else 0.0)
    stored = pair_rows(values, heads) if is_paired else values + offset
    is_matrix = values.ndim > 1 and name.endswith("weight") and "norm" not in name
    own = kind if is_matrix and "router" not in name else GGMLQuantizationType.F32
    raw = gguf.quants.quantize(np.ascontiguousarray(stored), own)
    writer.add_tensor(_gguf_name(family, name), raw, raw_dtype=own)
    exact = gguf.quants.dequantize(raw, own).reshape(stored.shape)
    if is_paired:
        order = np.argsort(pair_rows(np.arange(values.shape[0]), heads))
        return exact[order]
    return exact - offset


def _gguf_name(family: Family, name: str) -> str:
    pieces = name.split(".")
    if pieces[1] == "layers":
        inner = ".".join(pieces[3:])
        bare = inner.removesuffix(".weight").removesuffix(".bias")
        if bare in family.names:
            kind = "bias" if inner.endswith(".bias") else "weight"
            return f"blk.{pieces[2]}.{family.names[bare]}.{kind}"
    table = get_tensor_name_map(family.arch, family.config["num_hidden_layers"])
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found
