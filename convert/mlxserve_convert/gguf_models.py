"""What a GGUF file's architecture means in the names and config of its Hugging Face counterpart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve.errors import ConversionError
from mlxserve.models.architectures import config_fields
from mlxserve_convert.gguf_file import GGUFTensor
from mlxserve_convert.gguf_parts import GGUFParts
from mlxserve_convert.gguf_rope import rope_scaling, shortest_float

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
_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
_WITHOUT_KIND = frozenset({"self_attn.sinks"})
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def _nothing(reader: ConfigReader) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """``model_type`` is the config's name, ``own_config`` what its config has beyond the usual. ``names`` are
    the parts of a block that are called otherwise than usual. ``is_rope_interleaved``: the file's q and k
    rows are in pairs for interleaved rotation and must be put back to halves. ``has_norm_offset``: the file's
    norms have 1 added, which the model adds itself. ``rope_kinds``: the scalings that mlx-lm's model reads.
    ``is_tied``: what holds for every model of the family, None where the file decides. ``ties_in_sanitize``:
    mlx-lm's model gives up its head only when it sees weights without one."""

    name: str
    model_type: str
    class_name: str
    own_config: Callable[[ConfigReader], dict[str, Any]] = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    is_rope_interleaved: bool = False
    has_norm_offset: bool = False
    has_layer_norm: bool = False
    has_partial_rope: bool = False
    has_experts: bool = False
    is_tied: bool | None = None
    ties_in_sanitize: bool = False
    rope_kinds: frozenset[str] = frozenset()

    def target_name(self, gguf_name: str) -> str | None:
        """The model's name of a tensor, None for one that it does not have."""
        match = _BLOCK_NAME.fullmatch(gguf_name)
        if match is None:
            part, _, kind = gguf_name.rpartition(".")
            return f"{_TOP_LEVEL[part]}.{kind}" if part in _TOP_LEVEL and kind in ("weight", "bias") else None
        block, part, kind = match.groups()
        name = self.names.get(part, _IN_BLOCK.get(part))
        if name is None:
            return None
        return f"model.layers.{block}.{name}" + ("" if name in _WITHOUT_KIND else f".{kind}")


def architecture_of(file: GGUFParts) -> Architecture:
    from mlxserve_convert.gguf_families import ARCHITECTURES

    name = file.metadata.get("general.architecture")
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    known = ", ".join(sorted(ARCHITECTURES))
    raise ConversionError(f"{file.path}: architecture {str(name)[:40]!r} is not supported, only: {known}")


class ConfigReader:
    """Reads the hyperparameters of a file; a missing or wrong one is an error that names the key.
    ``warnings`` grows while ``build`` runs."""

    def __init__(self, file: GGUFParts, architecture: Architecture) -> None:
        self._file = file
        self.architecture = architecture
        self.tensors: Mapping[str, GGUFTensor] = file.tensors
        self.warnings: list[str] = []

    @property
    def path(self) -> Path:
        return self._file.path

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._file.data(name)

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self.architecture.name}.{key}", default)

    def fail(self, key: str, problem: str) -> ConversionError:
        return ConversionError(f"{self.path}: {self.architecture.name}.{key}: {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise self.fail(key, "differs between layers, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.fail(key, f"expected a positive integer, found {str(value)[:40]!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < 1e38:
            raise self.fail(key, f"expected a positive number, found {str(value)[:40]!r}")
        return shortest_float(value) if isinstance(value, float) else float(value)

    def window_pattern(self, default: int) -> int:
        """Every so manieth layer attends to everything, those between through the sliding window."""
        key = "attention.sliding_window_pattern"
        value = self.get(key, default)
        if not isinstance(value, list):
            return self.integer(key, default)
        for period in range(1, len(value) + 2):
            if all(bool(item) == bool((index + 1) % period) for index, item in enumerate(value)):
                return period
        raise self.fail(key, "the full layers do not follow one another at equal distances")

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length", self.integer("embedding_length") // self.num_heads)

    def build(self) -> dict[str, Any]:
        """config.json, but for ``quantization``."""
        architecture = self.architecture
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise ConversionError(f"{self.path}: tensor 'token_embd.weight' is missing")
        eps = "attention.layer_norm_epsilon" if architecture.has_layer_norm else _RMS_EPSILON
        is_tied = "output.weight" not in self.tensors
        rotated = self._rotated()
        config: dict[str, Any] = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            "hidden_size": self.integer("embedding_length"),
            "num_hidden_layers": self.integer("block_count"),
            "intermediate_size": self.integer("feed_forward_length", self.get("expert_feed_forward_length")),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "layer_norm_eps" if architecture.has_layer_norm else "rms_norm_eps": self.number(eps),
            "max_position_embeddings": self.integer("context_length"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": is_tied if architecture.is_tied is None else architecture.is_tied,
        }
        if architecture.has_partial_rope:
            config["partial_rotary_factor"] = rotated / self.head_dim
        self._check_supported(config)
        config |= architecture.own_config(self)
        scaling = rope_scaling(self, config["rope_theta"], rotated)
        if scaling is not None:
            config["rope_scaling"] = scaling
        self._check_window(config)
        return config

    def _rotated(self) -> int:
        rotated = self.integer("rope.dimension_count", self.head_dim)
        is_wrong = rotated > self.head_dim or rotated % 2
        if is_wrong or (rotated != self.head_dim and not self.architecture.has_partial_rope):
            raise self.fail(
                "rope.dimension_count", f"expected the head size {self.head_dim}, found {rotated}"
            )
        return rotated

    def _check_supported(self, config: dict[str, Any]) -> None:
        if self.get("expert_count", 0) and not self.architecture.has_experts:
            raise self.fail("expert_count", "a mixture of experts is not supported in this architecture")
        if self.get("attention.value_length", self.head_dim) != self.head_dim:
            raise self.fail("attention.value_length", "differs from key_length, which is not supported")
        is_own = self.head_dim * self.num_heads != config["hidden_size"]
        if is_own and "head_dim" not in config_fields(config, self.path):
            raise self.fail("attention.key_length", "a head size of its own is not supported")
        if self.num_heads % self.num_kv_heads:
            raise self.fail(
                "attention.head_count_kv", f"{self.num_kv_heads} does not divide {self.num_heads}"
            )

    def _check_window(self, config: dict[str, Any]) -> None:
        window = self.get("attention.sliding_window")
        if window and "sliding_window" not in config and window < config["max_position_embeddings"]:
            self.warnings.append(
                f"mlx-lm's {config['model_type']} attends without the sliding window of {window} tokens: "
                "longer texts come out otherwise than in the original"
            )
