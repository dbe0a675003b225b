"""Tiny random models, written as a Hugging Face folder or as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType
from mlx.utils import tree_flatten

from mlxserve.models.architectures import build_model
from mlxserve_kernels import ops

Arrays = dict[str, np.ndarray]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

BYTE_CHARACTERS = sorted(
    {chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]}
)
"""The 256 characters that stand for bytes in byte-level BPE."""

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_weights(config: dict[str, Any], seed: int = 0) -> Arrays:
    """A float32 array for each parameter that mlx-lm's model of this config has."""
    rng = np.random.default_rng(seed)
    model = build_model(config, Path("test"))
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        scale, shift = (0.1, 1.0) if name.endswith("norm.weight") else (0.3, 0.0)
        weights[name] = (rng.standard_normal(tuple(value.shape)) * scale + shift).astype(np.float32)
    return weights


def write_folder(
    folder: Path,
    config: dict[str, Any],
    weights: Arrays,
    *,
    dtype: mx.Dtype = mx.float32,
    num_shards: int = 1,
) -> Path:
    """A folder as the hub has it: config, safetensors (with an index if there are several), tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    files = ["model.safetensors"]
    if num_shards > 1:
        files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {name: files[index % num_shards] for index, name in enumerate(names)}
    for file in files:
        part = {name: mx.array(weights[name]).astype(dtype) for name in names if weight_map[name] == file}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    vocabulary = {character: index for index, character in enumerate(BYTE_CHARACTERS)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, block, part = module.split(".", 3)
        return f"blk.{block}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[module]}.{kind}"


def pair_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Llama's converter puts row i of a head's first half next to row i of its second half."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: Arrays,
    kind: GGMLQuantizationType,
    *,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: Arrays | None = None,
) -> Arrays:
    """Writes a GGUF file with matrices of type ``kind`` (norms and biases stay F32) and returns the
    weights as that file holds them, under their Hugging Face names and in their row order."""
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    add_byte_level_tokenizer(writer, config["vocab_size"])
    for key, value in (metadata or {}).items():
        adder = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        adder(key, value)
    held: Arrays = {}
    for name, values in weights.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        part = name.split(".")[-2]
        is_paired = architecture == "llama" and part in heads
        stored = pair_rows(values, heads[part]) if is_paired else values
        own = (kinds or {}).get(name, kind) if values.ndim > 1 else GGMLQuantizationType.F32
        raw = gguf.quants.quantize(np.ascontiguousarray(stored), own)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=own)
        exact = gguf.quants.dequantize(raw, own).reshape(stored.shape)
        held[name] = _unpair(exact, heads[part]) if is_paired else exact
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _unpair(values: np.ndarray, heads: int) -> np.ndarray:
    inverse = np.argsort(pair_rows(np.arange(values.shape[0]), heads))
    return values[inverse]


def add_byte_level_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = [*BYTE_CHARACTERS, "he", "ll", "hell"]
    types = [1] * len(tokens)
    tokens += ["<|im_start|>", "<|im_end|>"]
    types += [3, 3]
    while len(tokens) < size:
        tokens.append(f"[unused{len(tokens)}]")
        types.append(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


def searched(values: mx.array, *, group_size: int, bits: int) -> tuple[mx.array, ...]:
    """Words, scales and biases as a conversion finds them: what they are worth is tested with the kernels."""
    effort = ops.SEARCH_EFFORT if bits < 8 else 0
    parts = ops.quantize(values, group_size=group_size, bits=bits, effort=effort)
    return tuple(part for part in parts if part is not None)


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    return np.array(model(mx.array([tokens])).astype(mx.float32))


def reference_model(config: dict[str, Any], weights: Arrays) -> Any:
    """mlx-lm's model with these float32 weights."""
    model = build_model(config, Path("test"))
    model.load_weights([(name, mx.array(values)) for name, values in weights.items()])
    return model
