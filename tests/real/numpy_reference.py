"""Llama and Gemma 3 in float32 numpy, from a GGUF file that the ``gguf`` package dequantizes.

Written from the papers and the published model code; shares nothing with the converter or the engine, so that
both are judged by it. One forward over a whole prompt, without a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Settings:
    """``window_period``: every so manieth layer sees everything, the others ``window`` positions."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    is_gemma: bool
    window: int = 0
    window_period: int = 6
    local_theta: float = 10000.0


class NumpyModel:
    """``logits`` gives float32 [tokens, vocabulary]."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.settings = _settings(reader)
        self._weights = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
        }

    def logits(self, tokens: list[int], last: int | None = None) -> Array:
        """Of the ``last`` positions, or of all."""
        s, embedding = self.settings, self._weights["token_embd.weight"]
        hidden = embedding[tokens]
        if s.is_gemma:
            # The model was trained with this factor in bfloat16.
            hidden = hidden * _bfloat16(embedding.shape[1] ** 0.5)
        for layer in range(s.layers):
            block = {
                name.split(".")[2]: value
                for name, value in self._weights.items()
                if name.startswith(f"blk.{layer}.")
            }
            hidden = self._block(hidden, block, layer)
        hidden = _rms_norm(hidden[-(last or len(tokens)) :], self._weights["output_norm.weight"], s.eps)
        head: Array = self._weights.get("output.weight", embedding)
        return hidden @ head.T

    def _block(self, hidden: Array, block: dict[str, Array], layer: int) -> Array:
        eps = self.settings.eps
        out = self._attention(_rms_norm(hidden, block["attn_norm"], eps), block, layer)
        if self.settings.is_gemma:
            out = _rms_norm(out, block["post_attention_norm"], eps)
        hidden = hidden + out
        inner = _rms_norm(hidden, block["ffn_norm"], eps)
        gate, up = inner @ block["ffn_gate"].T, inner @ block["ffn_up"].T
        activated = _gelu(gate) if self.settings.is_gemma else gate / (1 + np.exp(-gate))
        out = (activated * up) @ block["ffn_down"].T
        if self.settings.is_gemma:
            out = _rms_norm(out, block["post_ffw_norm"], eps)
        return hidden + out

    def _attention(self, x: Array, block: dict[str, Array], layer: int) -> Array:
        s, count = self.settings, len(x)
        queries = (x @ block["attn_q"].T).reshape(count, s.heads, s.head_dim)
        keys = (x @ block["attn_k"].T).reshape(count, s.kv_heads, s.head_dim)
        values = (x @ block["attn_v"].T).reshape(count, s.kv_heads, s.head_dim)
        is_local = bool(s.window) and (layer + 1) % s.window_period != 0
        theta = s.local_theta if is_local else s.theta
        if s.is_gemma:
            queries = _rms_norm(queries, block["attn_q_norm"], s.eps)
            keys = _rms_norm(keys, block["attn_k_norm"], s.eps)
        # Llama's rows lie in pairs in the file, Gemma's in halves.
        queries = _rotate(queries, theta, in_pairs=not s.is_gemma)
        keys = _rotate(keys, theta, in_pairs=not s.is_gemma)
        distance = np.arange(count)[:, None] - np.arange(count)[None, :]
        is_hidden = (distance < 0) | (distance >= s.window) if is_local else distance < 0
        results = []
        for head in range(s.heads):
            kv_head = head * s.kv_heads // s.heads
            scores = queries[:, head] @ keys[:, kv_head].T * np.float32(s.head_dim**-0.5)
            scores = np.where(is_hidden, np.float32(-np.inf), scores)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            results.append(weights / weights.sum(axis=1, keepdims=True) @ values[:, kv_head])
        return np.concatenate(results, axis=1) @ block["attn_output"].T


def _settings(reader: gguf.GGUFReader) -> Settings:
    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    name = get("general.architecture")
    assert name in ("llama", "gemma3")
    heads = get(f"{name}.attention.head_count")
    return Settings(
        layers=get(f"{name}.block_count"),
        heads=heads,
        kv_heads=get(f"{name}.attention.head_count_kv"),
        head_dim=get(f"{name}.attention.key_length", get(f"{name}.embedding_length") // heads),
        eps=get(f"{name}.attention.layer_norm_rms_epsilon"),
        theta=get(f"{name}.rope.freq_base"),
        is_gemma=name == "gemma3",
        window=get(f"{name}.attention.sliding_window", 0),
    )


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    # In the file Gemma's norms have their 1 added already.
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight


def _gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3))) / 2


def _rotate(x: Array, theta: float, *, in_pairs: bool) -> Array:
    """x [tokens, heads, width]: each pair of columns turned by its position times its frequency."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (function(angles).astype(np.float32)[:, None] for function in (np.cos, np.sin))
    first, second = (x[..., 0::2], x[..., 1::2]) if in_pairs else (x[..., :half], x[..., half:])
    turned = first * cos - second * sin, second * cos + first * sin
    return np.stack(turned, axis=-1).reshape(x.shape) if in_pairs else np.concatenate(turned, axis=-1)


def _bfloat16(value: float) -> np.float32:
    bits = np.array(value, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )[()]
