"""Import of a GGUF file into an MLX folder, without requantization: every weight keeps its value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve.errors import ConversionError
from mlxserve.models.architectures import build_model
from mlxserve_convert.gguf_blocks import (
    FLOAT_TYPES,
    GROUP_SIZE,
    QUANTIZED_BITS,
    SUPPORTED_TYPES,
    AffineRows,
    dequantize,
    read_affine,
    read_float,
)
from mlxserve_convert.gguf_file import GGUFFile, GGUFTensor
from mlxserve_convert.gguf_models import (
    ROPE_FACTORS,
    Architecture,
    ConfigReader,
    architecture_of,
    target_name,
)
from mlxserve_convert.gguf_tokenizer import GGUFTokenizer, read_tokenizer
from mlxserve_convert.mlx_arrays import fit_group_size, write_quantized
from mlxserve_convert.options import (
    DEFAULT_BITS,
    DEFAULT_GROUP_SIZE,
    ConvertOptions,
    ConvertReport,
    PlannedTensor,
    Progress,
)
from mlxserve_convert.output_folder import OutputFolder, ShardedWriter, write_json
from mlxserve_convert.verify import verify_folder

_FLOAT_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_QUANTIZED_SUFFIXES = ("weight", "scales", "biases")


@dataclass(frozen=True, slots=True)
class _Plan:
    architecture: Architecture
    config: dict[str, Any]
    tokenizer: GGUFTokenizer
    names: dict[str, str]
    """Target name by the file's name, for tensors that are written."""
    heads: dict[str, int]
    """Heads by the file's name, for q and k tensors whose rows are to be put back in order."""
    tensors: tuple[PlannedTensor, ...]


def import_gguf(
    source: Path, output: Path, options: ConvertOptions, on_progress: Progress | None
) -> ConvertReport:
    """Writes ``output`` from a GGUF file. Everything that can be known to be wrong is refused before
    anything is written.
    """
    with GGUFFile(source) as file:
        plan = _make_plan(file, options)
        num_bytes = sum(_planned_bytes(tensor, options) for tensor in plan.tensors)
        folder = OutputFolder(output, force=options.force)
        folder.check(num_bytes)
        warnings = _requantization_warning(file, _bits_wanted(options))
        verified = "not checked: nothing was written"
        if not options.dry_run:
            with folder:
                num_bytes = _Writer(file, plan, options, folder.path).write(on_progress)
                _write_texts(plan, folder.path)
                verified = "not checked: switched off"
                if options.verify == "auto":
                    verified = verify_folder(folder.path, num_bytes)
        return ConvertReport(
            source=source,
            output=output,
            source_format="gguf",
            model_type=plan.config["model_type"],
            tensors=plan.tensors,
            num_bytes=num_bytes,
            warnings=tuple(warnings),
            verified=verified,
            is_dry_run=options.dry_run,
        )


def _make_plan(file: GGUFFile, options: ConvertOptions) -> _Plan:
    architecture = architecture_of(file)
    _check_types(file)
    bits = _bits_wanted(options)
    reader = ConfigReader(file, architecture)
    config = reader.build()
    names = _target_names(file, config)
    tokenizer = read_tokenizer(file.metadata, file.path)
    if tokenizer.num_tokens > config["vocab_size"]:
        raise ConversionError(
            f"{file.path}: the tokenizer has {tokenizer.num_tokens} tokens, the embedding only "
            f"{config['vocab_size']} rows"
        )
    tensors = tuple(_planned(file.tensors[name], target, bits, options) for name, target in names.items())
    config |= _token_ids(tokenizer)
    quantization = _quantization(tensors)
    if quantization is not None:
        config["quantization"] = quantization
    heads: dict[str, int] = {}
    if architecture.is_rope_interleaved:
        for name in names:
            if ".attn_q." in name:
                heads[name] = reader.num_heads
            elif ".attn_k." in name:
                heads[name] = reader.num_kv_heads
    return _Plan(architecture, config, tokenizer, names, heads, tensors)


def _check_types(file: GGUFFile) -> None:
    refused: dict[str, list[str]] = {}
    for tensor in file.tensors.values():
        if tensor.type_name not in SUPPORTED_TYPES:
            refused.setdefault(tensor.type_name, []).append(tensor.name)
    if refused:
        found = ", ".join(f"{kind} ({len(names)} tensors)" for kind, names in sorted(refused.items()))
        raise ConversionError(
            f"{file.path}: tensor types {found} are not supported, only: {', '.join(SUPPORTED_TYPES)}"
        )


def _bits_wanted(options: ConvertOptions) -> int | None:
    """Bits for all matrices; None imports every tensor in its own format."""
    if options.bits is None and options.group_size is not None:
        return DEFAULT_BITS
    return options.bits


def _requantization_warning(file: GGUFFile, bits: int | None) -> list[str]:
    kinds = {tensor.type_name for tensor in file.tensors.values() if tensor.type_name in QUANTIZED_BITS}
    if bits is None or not kinds:
        return []
    return [
        f"{file.path.name} is quantized already ({', '.join(sorted(kinds))}) and is quantized again to "
        f"{bits} bits, which loses more than either; without --bits it is imported exactly"
    ]


def _target_names(file: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    """Pairs the file's tensors with the model's parameters. An extra, missing or misshapen one is an
    error."""
    from mlx.utils import tree_flatten

    expected = {
        name: value.shape for name, value in tree_flatten(build_model(config, file.path).parameters())
    }
    names: dict[str, str] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        target = target_name(tensor.name)
        if target is None or target not in expected:
            raise ConversionError(
                f"{file.path}: tensor {tensor.name!r} has no place in a {config['model_type']} model"
            )
        if tuple(expected[target]) != tensor.shape:
            raise ConversionError(
                f"{file.path}: tensor {tensor.name!r} has shape {tensor.shape}, the metadata asks for "
                f"{tuple(expected[target])}"
            )
        names[tensor.name] = target
    missing = sorted(set(expected) - set(names.values()))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConversionError(f"{file.path}: the tensor for {missing[0]}{more} is missing")
    return names


def _planned(tensor: GGUFTensor, target: str, bits: int | None, options: ConvertOptions) -> PlannedTensor:
    """``bits`` is for all matrices, None keeps each in its format."""
    is_matrix = len(tensor.shape) > 1
    own_bits: int | None = QUANTIZED_BITS.get(tensor.type_name)
    group: int | None = None if own_bits is None else GROUP_SIZE
    if bits is not None and is_matrix:
        group = fit_group_size(tensor.shape[-1], options.group_size or DEFAULT_GROUP_SIZE)
        own_bits = None if group is None else bits
    return PlannedTensor(
        name=target,
        shape=tensor.shape,
        source_type=tensor.type_name,
        bits=own_bits,
        group_size=group,
        is_matrix=is_matrix,
    )


def _planned_bytes(tensor: PlannedTensor, options: ConvertOptions) -> int:
    kind = tensor.source_type if options.dtype is None else _FLOAT_NAMES[options.dtype]
    width = 2 if kind in ("F16", "BF16") else 4
    if tensor.bits is None or tensor.group_size is None:
        return tensor.num_elements * width
    return tensor.num_elements * tensor.bits // 8 + 2 * width * (tensor.num_elements // tensor.group_size)


def _quantization(tensors: tuple[PlannedTensor, ...]) -> dict[str, Any] | None:
    """mlx-lm's form: defaults on top, an entry for each module that differs, false for one left alone."""
    kinds = [(tensor.bits, tensor.group_size) for tensor in tensors if tensor.bits is not None]
    if not kinds:
        return None
    usual = max(sorted(set(kinds)), key=kinds.count)
    quantization: dict[str, Any] = {"group_size": usual[1], "bits": usual[0], "mode": "affine"}
    for tensor in tensors:
        if tensor.is_matrix and (tensor.bits, tensor.group_size) != usual:
            module = tensor.name.removesuffix(".weight")
            entry = {"group_size": tensor.group_size, "bits": tensor.bits, "mode": "affine"}
            quantization[module] = False if tensor.bits is None else entry
    return quantization


def _token_ids(tokenizer: GGUFTokenizer) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    if tokenizer.bos_id is not None:
        ids["bos_token_id"] = tokenizer.bos_id
    if tokenizer.eos_ids:
        ids["eos_token_id"] = tokenizer.eos_ids[0] if len(tokenizer.eos_ids) == 1 else list(tokenizer.eos_ids)
    if tokenizer.pad_id is not None:
        ids["pad_token_id"] = tokenizer.pad_id
    return ids


def _write_texts(plan: _Plan, folder: Path) -> None:
    write_json(folder / "config.json", plan.config)
    write_json(folder / "generation_config.json", _token_ids(plan.tokenizer))
    plan.tokenizer.write(folder)


class _Writer:
    def __init__(self, file: GGUFFile, plan: _Plan, options: ConvertOptions, folder: Path) -> None:
        self._file = file
        self._plan = plan
        self._dtype = options.dtype
        self._is_requantized = _bits_wanted(options) is not None
        modules = [target.rpartition(".")[0] for target in plan.names.values()]
        names = [*plan.names.values(), *(f"{m}.{s}" for m in modules for s in _QUANTIZED_SUFFIXES)]
        self._shards = ShardedWriter(folder, names)

    def write(self, on_progress: Progress | None) -> int:
        total = sum(self._file.tensors[name].num_bytes for name in self._plan.names)
        done = 0
        try:
            for planned, (name, target) in zip(self._plan.tensors, self._plan.names.items(), strict=True):
                self._write_tensor(self._file.tensors[name], planned)
                done += self._file.tensors[name].num_bytes
                if on_progress is not None:
                    on_progress(done, total, target)
            self._shards.finish()
        finally:
            self._shards.abandon()
        return self._shards.num_bytes

    def _write_tensor(self, tensor: GGUFTensor, planned: PlannedTensor) -> None:
        order = self._row_order(tensor)
        if tensor.type_name in FLOAT_TYPES:
            values = read_float(self._file, tensor)
            self._add_floats(planned, tensor.type_name, values if order is None else values[order])
            return
        rows = read_affine(self._file, tensor)
        rows = rows if order is None else rows.take_rows(order)
        if self._is_requantized:
            self._add_floats(planned, "F32", dequantize(rows).reshape(tensor.shape))
        else:
            self._add_affine(planned, rows)

    def _row_order(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Within each head the file holds rows 0, h/2, 1, h/2 + 1, …: the order that restores 0, 1, 2, …"""
        heads = self._plan.heads.get(tensor.name)
        if heads is None:
            return None
        rows = tensor.shape[0]
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def _add_affine(self, planned: PlannedTensor, rows: AffineRows) -> None:
        module = planned.name.removesuffix(".weight")
        # The experts of a layer are one tensor of matrices.
        outer = planned.shape[:-1]
        words = rows.weight.reshape(*outer, -1)
        self._shards.add(planned.name, "U32", words.shape, words)
        if self._dtype == "bfloat16":
            raise ConversionError(
                f"{self._file.path}: --dtype bfloat16 cannot hold the scales of {planned.name} exactly, "
                "use float16 or float32"
            )
        for suffix, flat in (("scales", rows.scales), ("biases", rows.biases)):
            values = flat.reshape(*outer, -1)
            if self._dtype == "float16":
                halves = self._exact_cast(values, planned)
                self._shards.add(f"{module}.{suffix}", "F16", halves.shape, halves)
            else:
                self._shards.add(f"{module}.{suffix}", "F32", values.shape, values)

    def _exact_cast(self, values: np.ndarray[Any, Any], planned: PlannedTensor) -> np.ndarray[Any, Any]:
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        changed = int(np.count_nonzero(halves.astype(np.float32) != values))
        if changed:
            raise ConversionError(
                f"{self._file.path}: --dtype float16 would change {changed} scales of {planned.name}, "
                "use float32"
            )
        return halves

    def _add_floats(self, planned: PlannedTensor, kind: str, values: np.ndarray[Any, Any]) -> None:
        wanted = kind if self._dtype is None else _FLOAT_NAMES[self._dtype]
        if wanted != kind:
            values = _cast_floats(values, kind, wanted)
            if wanted == "F16" and not np.isfinite(values).all():
                raise ConversionError(
                    f"{self._file.path}: --dtype float16 cannot hold {int((~np.isfinite(values)).sum())} "
                    f"values of {planned.name}, use bfloat16 or float32"
                )
        values = np.ascontiguousarray(values)
        if planned.bits is None or planned.group_size is None:
            self._shards.add(planned.name, wanted, values.shape, values)
            return
        import mlx.core as mx

        array = mx.array(values)
        array = array.view(mx.bfloat16) if wanted == "BF16" else array
        write_quantized(self._shards, planned.name, array, planned.group_size, planned.bits)


def _cast_floats(values: np.ndarray[Any, Any], kind: str, wanted: str) -> np.ndarray[Any, Any]:
    """``BF16`` arrays are uint16, in and out."""
    wide = (values.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else values.astype(np.float32)
    if wanted == "F32":
        return wide
    if wanted == "F16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16)
    bits = wide.view(np.uint32)
    # Round to nearest, ties to even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)
