"""The architectures that GGUF files name, in the terms of mlx-lm's models.

Names and keys are those of the ``gguf`` package's tables; what each converter does to the weights (rows of q
and k in pairs, norms with one added, joined matrices) is told by ``Architecture``.
"""

from __future__ import annotations

from typing import Any

from mlxserve_convert.gguf_models import Architecture, ConfigReader

_PLAIN_SCALINGS = frozenset({"linear", "yarn", "llama3"})
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")}
_GEMMA_SCALARS = {("gemma2", 46), ("gemma3", 62)}
"""By depth, the 27B models: their queries are scaled by the mean width of a head, not by its own."""


def _with_biases(reader: ConfigReader) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in reader.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in reader.tensors,
    }


def _gemma(reader: ConfigReader) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(reader: ConfigReader) -> int:
    width = reader.integer("embedding_length")
    is_mean = (reader.architecture.name, reader.integer("block_count")) in _GEMMA_SCALARS
    return width // reader.num_heads if is_mean else reader.head_dim


def _gemma2(reader: ConfigReader) -> dict[str, Any]:
    return _gemma(reader) | {
        "attn_logit_softcapping": reader.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(reader),
    }


def _gemma3(reader: ConfigReader) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.get(key):
            raise reader.fail(key, "a soft cap is not supported")
    return _gemma(reader) | {
        "query_pre_attn_scalar": _query_scalar(reader),
        "rope_local_base_freq": reader.number("rope.freq_base_swa", 10000.0),
        "sliding_window": reader.integer("attention.sliding_window"),
        "sliding_window_pattern": reader.window_pattern(6),
    }


def _granite(reader: ConfigReader) -> dict[str, Any]:
    return _with_biases(reader) | {
        "attention_multiplier": reader.number("attention.scale", reader.head_dim**-0.5),
        "embedding_multiplier": reader.number("embedding_scale", 1.0),
        "residual_multiplier": reader.number("residual_scale", 1.0),
        "logits_scaling": reader.number("logit_scale", 1.0),
    }


def _command_r(reader: ConfigReader) -> dict[str, Any]:
    return {
        "logit_scale": reader.number("logit_scale"),
        "attention_bias": "blk.0.attn_q.bias" in reader.tensors,
        "layer_norm_bias": "output_norm.bias" in reader.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in reader.tensors,
    }


def _cohere2(reader: ConfigReader) -> dict[str, Any]:
    return _command_r(reader) | {
        "sliding_window": reader.integer("attention.sliding_window"),
        "sliding_window_pattern": reader.window_pattern(4),
    }


def _glm4(reader: ConfigReader) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in reader.tensors}


def _phi3(reader: ConfigReader) -> dict[str, Any]:
    original = reader.get("rope.scaling.original_context_length")
    return {} if original is None else {"original_max_position_embeddings": original}


def _smollm3(reader: ConfigReader) -> dict[str, Any]:
    # Every fourth layer has no rope; no key says so.
    return _with_biases(reader) | {"no_rope_layer_interval": 4}


def _qwen3moe(reader: ConfigReader) -> dict[str, Any]:
    """Every layer has experts; the weights of those chosen are brought to a sum of 1."""
    return {
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _gpt_oss(reader: ConfigReader) -> dict[str, Any]:
    pattern = reader.window_pattern(2)
    kinds = ("sliding_attention", "full_attention")
    return {
        "intermediate_size": reader.integer("expert_feed_forward_length"),
        "num_local_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "sliding_window": reader.integer("attention.sliding_window"),
        "layer_types": [kinds[(index + 1) % pattern == 0] for index in range(reader.integer("block_count"))],
    }


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "llama",
            "llama",
            "LlamaForCausalLM",
            _with_biases,
            is_rope_interleaved=True,
            rope_kinds=_PLAIN_SCALINGS,
        ),
        Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", rope_kinds=_PLAIN_SCALINGS),
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", rope_kinds=_PLAIN_SCALINGS),
        Architecture(
            "qwen3moe",
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _qwen3moe,
            rope_kinds=_PLAIN_SCALINGS,
            has_experts=True,
        ),
        Architecture("gemma", "gemma", "GemmaForCausalLM", _gemma, has_norm_offset=True, is_tied=True),
        Architecture(
            "gemma2",
            "gemma2",
            "Gemma2ForCausalLM",
            _gemma2,
            names=_GEMMA_NORMS,
            has_norm_offset=True,
            is_tied=True,
        ),
        Architecture(
            "gemma3",
            "gemma3_text",
            "Gemma3ForCausalLM",
            _gemma3,
            names=_GEMMA_NORMS,
            has_norm_offset=True,
            rope_kinds=frozenset({"linear"}),
            ties_in_sanitize=True,
        ),
        Architecture(
            "phi3",
            "phi3",
            "Phi3ForCausalLM",
            _phi3,
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            rope_kinds=frozenset({"longrope", "linear"}),
            has_partial_rope=True,
        ),
        Architecture(
            "granite",
            "granite",
            "GraniteForCausalLM",
            _granite,
            is_rope_interleaved=True,
            rope_kinds=_PLAIN_SCALINGS,
        ),
        Architecture(
            "olmo2",
            "olmo2",
            "Olmo2ForCausalLM",
            _with_biases,
            names={
                "post_attention_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
            rope_kinds=_PLAIN_SCALINGS,
        ),
        Architecture(
            "smollm3",
            "smollm3",
            "SmolLM3ForCausalLM",
            _smollm3,
            is_rope_interleaved=True,
            rope_kinds=_PLAIN_SCALINGS,
        ),
        Architecture(
            "gpt-oss",
            "gpt_oss",
            "GptOssForCausalLM",
            _gpt_oss,
            names={
                **_EXPERTS,
                "ffn_gate_inp": "mlp.router",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks": "self_attn.sinks",
            },
            rope_kinds=frozenset({"yarn"}),
            has_experts=True,
            is_tied=False,
        ),
        Architecture(
            "command-r",
            "cohere",
            "CohereForCausalLM",
            _command_r,
            has_layer_norm=True,
            is_tied=True,
        ),
        Architecture(
            "cohere2",
            "cohere2",
            "Cohere2ForCausalLM",
            _cohere2,
            has_layer_norm=True,
            is_tied=True,
        ),
        Architecture(
            "glm4",
            "glm4",
            "Glm4ForCausalLM",
            _glm4,
            names={
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
            },
            has_partial_rope=True,
            is_tied=False,
        ),
    )
}
"""By the name in ``general.architecture``."""
