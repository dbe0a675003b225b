"""A GGUF file as a checkpoint, under the names and shapes of the model that it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxserve.errors import ConversionError
from mlxserve_convert.checkpoint import Checkpoint, identity_of
from mlxserve_convert.front_matter import gguf_front_matter
from mlxserve_convert.gguf_blocks import SUPPORTED_TYPES, gguf_weight
from mlxserve_convert.gguf_models import ConfigReader, architecture_of
from mlxserve_convert.gguf_parts import GGUFParts
from mlxserve_convert.gguf_rope import ROPE_TENSORS
from mlxserve_convert.gguf_tokenizer import GGUFTokenizer, read_tokenizer
from mlxserve_convert.output_folder import write_json
from mlxserve_convert.weights import Leaf, Mapped, Weight, row_numbers, rows


def open_gguf(path: Path) -> Checkpoint:
    """``path`` may be any part of a split model. Raises ConversionError with one line for whatever is
    damaged, unknown or missing."""
    file = GGUFParts(path)
    try:
        return _opened(file)
    except BaseException:
        file.close()
        raise


def _opened(file: GGUFParts) -> Checkpoint:
    architecture = architecture_of(file)
    _check_types(file)
    reader = ConfigReader(file, architecture)
    config = reader.build()
    tokenizer = read_tokenizer(file.metadata, file.path)
    if tokenizer.num_tokens > config["vocab_size"]:
        raise ConversionError(
            f"{file.path}: the tokenizer has {tokenizer.num_tokens} tokens, the embedding only "
            f"{config['vocab_size']} rows"
        )
    config |= _token_ids(tokenizer)
    weights: dict[str, Weight] = {}
    source_names: dict[str, str] = {}
    for tensor in file.tensors.values():
        if tensor.name in ROPE_TENSORS:
            continue
        target = architecture.target_name(tensor.name)
        if target is None:
            raise ConversionError(
                f"{file.path}: tensor {tensor.name!r} has no place in a {config['model_type']} model"
            )
        weight = gguf_weight(file.file_of(tensor.name), tensor)
        if architecture.is_rope_interleaved and ".attn_q." in tensor.name:
            weight = _halves(weight, reader.num_heads)
        if architecture.is_rope_interleaved and ".attn_k." in tensor.name:
            weight = _halves(weight, reader.num_kv_heads)
        if architecture.has_norm_offset and tensor.name.endswith("_norm.weight"):
            weight = Mapped(weight, lambda values: values - 1, weight.dtype)
        weights[target] = weight
        source_names[target] = tensor.name
    return Checkpoint(
        path=file.path,
        source_format="gguf",
        config=config,
        weights=weights,
        write_texts=lambda folder: _write_texts(tokenizer, folder),
        identity=identity_of(file.paths),
        are_names_final=not architecture.ties_in_sanitize,
        source_names=source_names,
        keeps_layouts=True,
        num_source_bytes=sum(tensor.num_bytes for tensor in file.tensors.values()),
        warnings=reader.warnings,
        close=file.close,
        card=gguf_front_matter(file.metadata),
    )


def _check_types(file: GGUFParts) -> None:
    refused: dict[str, list[str]] = {}
    for tensor in file.tensors.values():
        if tensor.type_name not in SUPPORTED_TYPES:
            refused.setdefault(tensor.type_name, []).append(tensor.name)
    if refused:
        found = ", ".join(f"{kind} ({len(names)} tensors)" for kind, names in sorted(refused.items()))
        raise ConversionError(
            f"{file.path}: tensor types {found} are not supported, only: {', '.join(SUPPORTED_TYPES)}"
        )


def _halves(weight: Weight, num_heads: int) -> Weight:
    """Within each head the file holds rows 0, h/2, 1, h/2 + 1, …: put back in the order 0, 1, 2, …

    A vector (a bias) has its values in the same order.
    """
    if weight.shape[0] % (2 * num_heads):
        raise ConversionError(
            f"tensors of the attention have {weight.shape[0]} rows, no {num_heads} heads of even size"
        )
    if len(weight.shape) == 1:
        return _halved_vector(weight, num_heads)
    numbers = row_numbers(weight)
    order = numbers.reshape(num_heads, numbers.size // num_heads // 2, 2).swapaxes(1, 2)
    return rows([weight], order.reshape(-1))


def _halved_vector(weight: Weight, num_heads: int) -> Weight:
    values = weight.value().reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return Leaf(values, "+".join(weight.source_types))


def _token_ids(tokenizer: GGUFTokenizer) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    if tokenizer.bos_id is not None:
        ids["bos_token_id"] = tokenizer.bos_id
    if tokenizer.eos_ids:
        ids["eos_token_id"] = tokenizer.eos_ids[0] if len(tokenizer.eos_ids) == 1 else list(tokenizer.eos_ids)
    if tokenizer.pad_id is not None:
        ids["pad_token_id"] = tokenizer.pad_id
    return ids


def _write_texts(tokenizer: GGUFTokenizer, folder: Path) -> None:
    write_json(folder / "generation_config.json", _token_ids(tokenizer))
    tokenizer.write(folder)
