"""What a GGUF file's architecture means in the names and config of its Hugging Face counterpart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.gguf_file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """``model_type`` is the config's name. ``is_rope_interleaved``: the file's q and k rows are in
    pairs for interleaved rotation and must be put back to halves."""

    name: str
    model_type: str
    class_name: str
    is_rope_interleaved: bool


_ARCHITECTURES = {
    "llama": Architecture("llama", "llama", "LlamaForCausalLM", True),
    "qwen2": Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", False),
    "qwen3": Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", False),
    "qwen3moe": Architecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", False),
}


def architecture_of(file: GGUFFile) -> Architecture:
    name = file.metadata.get("general.architecture")
    if isinstance(name, str) and name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    known = ", ".join(sorted(_ARCHITECTURES))
    raise ConversionError(f"{file.path}: architecture {str(name)[:40]!r} is not supported, only: {known}")


def target_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a tensor, None for one that no supported model has."""
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match is not None:
        block, part, kind = match.groups()
        return f"model.layers.{block}.{_IN_BLOCK[part]}.{kind}" if part in _IN_BLOCK else None
    part, _, kind = gguf_name.rpartition(".")
    return f"{_TOP_LEVEL[part]}.{kind}" if part in _TOP_LEVEL and kind in ("weight", "bias") else None


class ConfigReader:
    """Reads the hyperparameters of a file; a missing or wrong one is an error that names the key."""

    def __init__(self, file: GGUFFile, architecture: Architecture) -> None:
        self._file = file
        self._metadata: Mapping[str, Any] = file.metadata
        self._architecture = architecture

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._architecture.name}.{key}", default)

    def _fail(self, key: str, problem: str) -> ConversionError:
        return ConversionError(f"{self._file.path}: {self._architecture.name}.{key}: {problem}")

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise self._fail(key, "differs between layers, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._fail(key, f"expected a positive integer, found {str(value)[:40]!r}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < 1e38:
            raise self._fail(key, f"expected a positive number, found {str(value)[:40]!r}")
        return shortest_float(value) if isinstance(value, float) else float(value)

    @property
    def num_heads(self) -> int:
        return self._integer("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return self._integer("attention.head_count_kv", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self._integer("attention.key_length", self._integer("embedding_length") // self.num_heads)

    def build(self) -> dict[str, Any]:
        """config.json, but for ``quantization``."""
        self._check_supported()
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ConversionError(f"{self._file.path}: tensor 'token_embd.weight' is missing")
        config: dict[str, Any] = {
            "architectures": [self._architecture.class_name],
            "model_type": self._architecture.model_type,
            "hidden_size": self._integer("embedding_length"),
            "num_hidden_layers": self._integer("block_count"),
            "intermediate_size": self._integer("feed_forward_length"),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._integer("context_length"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
        }
        if self._architecture.name == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._file.tensors
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self._file.tensors
        if self._has_experts:
            config |= self._experts()
        scaling = self._rope_scaling(config)
        if scaling is not None:
            config["rope_scaling"] = scaling
        return config

    @property
    def _has_experts(self) -> bool:
        return self._architecture.model_type == "qwen3_moe"

    def _experts(self) -> dict[str, Any]:
        """Every layer has experts; the weights of those chosen are brought to a sum of 1."""
        return {
            "num_experts": self._integer("expert_count"),
            "num_experts_per_tok": self._integer("expert_used_count"),
            "moe_intermediate_size": self._integer("expert_feed_forward_length"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }

    def _check_supported(self) -> None:
        parts = self._metadata.get("split.count", 0)
        if not isinstance(parts, int):
            raise ConversionError(f"{self._file.path}: split.count: expected an integer")
        if parts > 1:
            raise ConversionError(
                f"{self._file.path}: is one part of a split GGUF, merge the {parts} parts first"
            )
        if self._get("expert_count", 0) and not self._has_experts:
            raise self._fail("expert_count", "a mixture of experts is supported in qwen3moe files alone")
        if self._get("attention.value_length", self.head_dim) != self.head_dim:
            raise self._fail("attention.value_length", "differs from key_length, which is not supported")
        if self._architecture.name == "qwen2" and self.head_dim * self.num_heads != self._integer(
            "embedding_length"
        ):
            raise self._fail("attention.key_length", "a head size of its own is not supported")
        rotated = self._integer("rope.dimension_count", self.head_dim)
        if rotated != self.head_dim:
            raise self._fail(
                "rope.dimension_count", f"expected the head size {self.head_dim}, found {rotated}"
            )
        if self.num_heads % self.num_kv_heads:
            raise self._fail(
                "attention.head_count_kv", f"{self.num_kv_heads} does not divide {self.num_heads}"
            )

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type", "none")
        if ROPE_FACTORS in self._file.tensors:
            if kind not in ("none", "llama3"):
                raise self._fail(
                    "rope.scaling.type", f"{kind!r} together with {ROPE_FACTORS} is not supported"
                )
            return self._llama3_scaling(config)
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0))
        if factor != 0:
            for key in ("rope.scale_linear", "rope.scaling.factor"):
                if f"{self._architecture.name}.{key}" in self._metadata:
                    factor = self._number(key)
        if kind == "none" and "rope.scaling.type" not in self._metadata and factor not in (0, 1.0):
            kind = "linear"
        if kind == "none" or factor in (0, 1.0):
            return None
        if kind == "linear":
            return {"type": "linear", "rope_type": "linear", "factor": shortest_float(factor)}
        if kind == "yarn":
            return self._yarn_scaling(shortest_float(factor))
        raise self._fail(
            "rope.scaling.type", f"{str(kind)[:40]!r} is not supported, only none, linear, yarn and llama3"
        )

    def _yarn_scaling(self, factor: float) -> dict[str, Any]:
        if self._get("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self._fail("rope.scaling.attn_factor", "an attention factor of its own is not supported")
        return {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._integer("rope.scaling.original_context_length"),
            "beta_fast": self._number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._number("rope.scaling.yarn_beta_slow", 1.0),
        }

    def _llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        tensor = self._file.tensors[ROPE_FACTORS]
        if tensor.type_name != "F32" or tensor.shape != (self.head_dim // 2,):
            raise ConversionError(
                f"{self._file.path}: {ROPE_FACTORS} should be F32 of shape ({self.head_dim // 2},), "
                f"found {tensor.type_name} of shape {tensor.shape}"
            )
        factors = self._file.data(ROPE_FACTORS).view(np.float32).astype(np.float64)
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ConversionError(f"{self._file.path}: {ROPE_FACTORS} holds values that are no factors")
        scaling = fit_llama3_scaling(factors.tolist(), config["rope_theta"])
        if scaling is None:
            raise ConversionError(
                f"{self._file.path}: {ROPE_FACTORS} follows no known rule (llama3 was tried)"
            )
        return scaling


def shortest_float(value: float) -> float:
    """The shortest decimal that names the same float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def llama3_factors(scaling: Mapping[str, Any], theta: float, count: int) -> list[float]:
    """How much slower each of ``count`` frequencies turns under Llama 3's rule."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    factors = []
    for index in range(count):
        turns = context / (2 * math.pi * theta ** (index / count))
        if turns < low:
            factors.append(float(factor))
        elif turns > high:
            factors.append(1.0)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def fit_llama3_scaling(factors: list[float], theta: float) -> dict[str, Any] | None:
    """The Llama 3 parameters that give these factors, None when none do."""
    for scaling in (_llama3(max(factors), 4.0, 8192), _fit_smooth_part(factors, theta)):
        if scaling is None:
            continue
        expected = llama3_factors(scaling, theta, len(factors))
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return scaling
    return None


def _llama3(factor: float, high: float, context: int) -> dict[str, Any]:
    return {
        "type": "llama3",
        "rope_type": "llama3",
        "factor": shortest_float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _fit_smooth_part(factors: list[float], theta: float) -> dict[str, Any] | None:
    """Between the two limits, the smoothing is linear in the turns per token: two unknowns, with the
    lower limit set to 1 (the rule depends on the ratios of its parameters only)."""
    factor = max(factors)
    points = [
        (1 / (2 * math.pi * theta ** (index / len(factors))), (1 / value - 1 / factor) / (1 - 1 / factor))
        for index, value in enumerate(factors)
        if 1 < value < factor
    ]
    if len(points) < 2:
        return None
    slope, offset = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    if offset >= 0 or slope <= 0:
        return None
    high = 1 - 1 / float(offset)
    return _llama3(factor, round(high, 4), round(float(slope) * (high - 1)))
