"""Tiny random checkpoints in the layout of a Hugging Face folder, for tests of loading and serving.

The tokenizer has one token a character: printable ASCII, then the newline, then the special tokens,
then the other bytes. Encoding adds no special token, so a prompt of n ASCII characters has n tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (EOS_TOKEN, TURN_START, TURN_END)
EOS_ID = 96
NUM_REACHABLE_TOKENS = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Shape of a tiny checkpoint. ``has_eos`` False gives a model that never ends by itself;
    ``extra_config`` is laid over config.json last, so it can name any field of any architecture."""

    model_type: str = "llama"
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = 128
    context: int = 128
    seed: int = 0
    sliding_window: int | None = None
    tied: bool = True
    has_eos: bool = True
    chat_template: str | None = CHAT_TEMPLATE
    dtype: str = "float32"
    extra_config: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype,
        }
        if self.has_eos:
            config["eos_token_id"] = EOS_ID
        if self.sliding_window is not None:
            config["sliding_window"] = self.sliding_window
        if self.model_type == "gemma3_text":
            config["sliding_window_pattern"] = 2
        if self.model_type == "phi3":
            config["original_max_position_embeddings"] = self.context
        return config | self.extra_config


def write_tiny_model(folder: Path, model: TinyModel | None = None, **shape: Any) -> Path:
    """Writes the checkpoint of ``model``, or of ``TinyModel(**shape)``; returns ``folder``."""
    model = model if model is not None else TinyModel(**shape)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", model.config())
    save_file(_random_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    write_character_tokenizer(folder, vocab=model.vocab, has_eos=model.has_eos)
    if model.chat_template is not None:
        (folder / "chat_template.jinja").write_text(model.chat_template, encoding="utf-8")
    return folder


def write_character_tokenizer(folder: Path, *, vocab: int = 128, has_eos: bool = True) -> None:
    """Writes tokenizer.json and tokenizer_config.json of the one-token-a-character tokenizer."""
    tokens = _vocabulary(vocab)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    if has_eos:
        settings["eos_token"] = EOS_TOKEN
    _write_json(folder / "tokenizer_config.json", settings)


def _vocabulary(size: int) -> list[str]:
    """``size`` tokens in id order: printable ASCII, newline, specials, other bytes, unreachable fillers."""
    if size <= EOS_ID + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab must be over {EOS_ID + len(SPECIAL_TOKENS)}, not {size}")
    spelling = _byte_spelling()
    first = [*range(ord(" "), ord("~") + 1), ord("\n")]
    rest = [byte for byte in range(256) if byte not in first]
    tokens = [spelling[byte] for byte in first] + list(SPECIAL_TOKENS) + [spelling[byte] for byte in rest]
    tokens += [f"filler{i}" for i in range(size - len(tokens))]
    return tokens[:size]


def _byte_spelling() -> list[str]:
    """The character that byte-level BPE (GPT-2) writes for each byte: itself when it is printable
    Latin-1, otherwise the next free code point from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spelling, next_free = [], 256
    for byte in range(256):
        if byte in printable:
            spelling.append(chr(byte))
        else:
            spelling.append(chr(next_free))
            next_free += 1
    return spelling


def _random_weights(model: TinyModel) -> dict[str, np.ndarray]:
    """Random values in the shapes of mlx-lm's own module for this config. Norm weights lie near 1
    (Gemma's, which are offsets from 1, near 0). Small embeddings (Gemma scales them up by itself) and
    large projections let context, not the last token alone, decide, so that greedy text varies."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    config = model.config()
    model_class, args_class = _get_classes(config)
    parameters = model_class(args_class.from_dict(config)).parameters()
    shapes = {name: value.shape for name, value in tree_flatten(parameters)}
    rng = np.random.default_rng(model.seed)
    is_gemma = model.model_type.startswith("gemma")
    norm_centre, embedding_scale = (0.0, 0.2 / np.sqrt(model.hidden)) if is_gemma else (1.0, 0.2)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = rng.standard_normal(shape)
        if "norm" in name:
            value = norm_centre + 0.1 * noise
        elif "embed" in name:
            value = embedding_scale * noise
        else:
            value = 2.0 * noise / np.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * noise
        weights[name] = np.ascontiguousarray(value.astype(model.dtype))
    return weights


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
