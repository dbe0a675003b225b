"""Damaged and hostile checkpoints, made from sound tiny ones by a seeded generator.

Each case is a file or folder on the disk; readers must end in success or in one of our errors of one line.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gguf import GGMLQuantizationType as Kind

from mlxserve.errors import ConversionError, ModelLoadError
from mlxserve.models.safetensors_file import read_tensors
from mlxserve_convert import ConvertOptions, gguf_parts
from mlxserve_convert.gguf_checkpoint import open_gguf
from mlxserve_convert.gguf_file import GGUFFile
from mlxserve_convert.hf_checkpoint import open_hf
from mlxserve_convert.plan import make_plan
from tests.convert.checkpoints import LLAMA, random_weights, write_folder, write_gguf

TINY = {
    **LLAMA,
    "hidden_size": 32,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 300,
}
_NUMBERS = (0, 1, 2, 7, 31, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
_HOSTILE: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**63, 10**30, 1.5, -0.5, 1e308, float("nan"), float("inf"), True, False, None, "", "4",
    "\0", "a\nb", "../x", [], {}, [[]], [1, "x"], {"a": {"b": []}}, "x" * 5000,
)  # fmt: skip
_QUANTIZED: tuple[dict[str, Any], ...] = (
    {"bits": 4, "group_size": 64, "mode": "affine"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "mxfp4"},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    },
)


class Readers:
    """The sound files, and a case of each kind by number. Not to be shared between processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weights = random_weights(TINY)
        self._hf = write_folder(folder / "hf", TINY, weights, num_shards=2)
        self._shard = sorted(self._hf.glob("*.safetensors"))[0]
        self._sound_shard = self._shard.read_bytes()
        self._index = self._hf / "model.safetensors.index.json"
        self._sound_index = self._index.read_text()
        self._gguf = folder / "case.gguf"
        write_gguf(self._gguf, TINY, weights, Kind.Q8_0)
        self._sound_gguf = self._gguf.read_bytes()
        self._gguf_header = self._sound_gguf.index(b"tokenizer.ggml.tokens")
        self.kinds: dict[str, Callable[[random.Random], None]] = {
            "safetensors bytes": self._shard_bytes,
            "safetensors header": self._shard_header,
            "gguf bytes": self._gguf_bytes,
            "gguf fields": self._gguf_fields,
            "gguf metadata": self._gguf_metadata,
            "config": self._config,
            "index": self._index_json,
        }

    def run(self, kind: str, seed: int) -> str:
        """The name of the outcome. Raises whatever is none of our errors, or one of several lines."""
        try:
            self.kinds[kind](random.Random(f"{kind}/{seed}"))
        except (ConversionError, ModelLoadError) as error:
            if "\n" in str(error) or len(str(error)) > 4000:
                raise AssertionError(f"not one line: {str(error)[:200]!r}") from error
            return type(error).__name__
        finally:
            self._shard.write_bytes(self._sound_shard)
        return "read"

    def _shard_bytes(self, rng: random.Random) -> None:
        self._shard.write_bytes(damaged(self._sound_shard, rng, 2500))
        read_tensors(self._hf)

    def _shard_header(self, rng: random.Random) -> None:
        length = int.from_bytes(self._sound_shard[:8], "little")
        header = json.loads(self._sound_shard[8 : 8 + length])
        text = hostile_json(header, rng)
        raw = text.encode("utf-8", "surrogatepass")
        claimed = rng.choice(_NUMBERS) if rng.random() < 0.1 else len(raw)
        self._shard.write_bytes(struct.pack("<Q", claimed) + raw + self._sound_shard[8 + length :])
        read_tensors(self._hf)

    def _gguf_bytes(self, rng: random.Random) -> None:
        self._gguf.write_bytes(damaged(self._sound_gguf, rng, len(self._sound_gguf)))
        self._open_gguf()

    def _gguf_fields(self, rng: random.Random) -> None:
        """Counts, lengths and types are small integers between texts: those are what is exchanged."""
        raw = bytearray(self._sound_gguf)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(8, self._gguf_header + 200)
            width, code = rng.choice(((4, "<I"), (8, "<Q")))
            value = rng.choice(_NUMBERS)
            if rng.random() < 0.5:
                value = rng.randrange(14)
            raw[at : at + width] = struct.pack(code, value % 2 ** (8 * width))
        self._gguf.write_bytes(raw)
        self._open_gguf()

    def _gguf_metadata(self, rng: random.Random) -> None:
        """Values of other types than a key has, whatever a file may hold there."""
        self._gguf.write_bytes(self._sound_gguf)
        file = GGUFFile(self._gguf)
        metadata = file.metadata
        if rng.random() < 0.5:
            scores = [-float(index) for index in range(len(metadata["tokenizer.ggml.tokens"]))]
            metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
            metadata |= {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "split.count": 1,
            }
            metadata["llama.rope.scaling.original_context_length"] = 128
        for _ in range(rng.randint(1, 2)):
            key = rng.choice(list(metadata))
            if rng.random() < 0.15:
                del metadata[key]
            elif isinstance(metadata[key], list) and metadata[key] and rng.random() < 0.5:
                metadata[key][rng.randrange(len(metadata[key]))] = rng.choice(_HOSTILE)
            else:
                metadata[key] = copy.deepcopy(rng.choice(_HOSTILE))
        with patch.object(gguf_parts, "GGUFFile", lambda path: file):
            self._open_gguf()

    def _open_gguf(self) -> None:
        with open_gguf(self._gguf) as checkpoint:
            make_plan(checkpoint, ConvertOptions())

    def _config(self, rng: random.Random) -> None:
        path = self._hf / "config.json"
        config = dict(TINY)
        if rng.random() < 0.3:
            config["quantization_config"] = rng.choice(_QUANTIZED)
        path.write_text(hostile_json(config, rng))
        try:
            with open_hf(self._hf) as checkpoint:
                make_plan(checkpoint, ConvertOptions())
        finally:
            path.write_text(json.dumps(TINY))

    def _index_json(self, rng: random.Random) -> None:
        self._index.write_text(hostile_json(json.loads(self._sound_index), rng))
        try:
            open_hf(self._hf).close()
        finally:
            self._index.write_text(self._sound_index)


def damaged(raw: bytes, rng: random.Random, reach: int) -> bytes:
    """Bits turned, bytes set, removed, doubled or cut off, within the first ``reach`` bytes."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(reach, len(data)) or 1)
        action = rng.randrange(6)
        if action == 0:
            data[at : at + 1] = bytes([data[at] ^ (1 << rng.randrange(8))]) if at < len(data) else b""
        elif action == 1:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif action == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif action == 3:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        elif action == 4:
            data[at : at + 8] = struct.pack("<Q", rng.choice(_NUMBERS))
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)


def hostile_json(value: Any, rng: random.Random) -> str:
    """JSON text with some values exchanged for wrong ones, now and then not JSON at all."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        _exchange(value, rng)
    text = json.dumps(value)
    if rng.random() < 0.02:
        return rng.choice(("[" * 100_000, '{"a":' * 50_000, "", "null", "[\\ud800]", text[: len(text) // 2]))
    if rng.random() < 0.05:
        key = json.dumps(rng.choice(list(value) or ["x"]))
        return text[:-1] + f", {key}: 1}}"
    return text


def _exchange(value: Any, rng: random.Random) -> None:
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        if rng.random() < 0.15 and isinstance(place, dict):
            place[rng.choice(("", "\0", "../../x", "a\nb", "model.norm.weight"))] = place.pop(key)
        elif rng.random() < 0.1:
            del place[key]
        else:
            place[key] = copy.deepcopy(rng.choice(_HOSTILE))
        return
