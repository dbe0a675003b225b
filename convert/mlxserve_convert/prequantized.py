"""Checkpoints that others quantized: which method it is, and its decoder.

Each decoder takes all tensors by name and gives one weight for each matrix, under the name that an
unquantized checkpoint would use. A method, or a variant of one, that no decoder knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ConversionError
from mlxserve.json_file import read_json_object
from mlxserve_convert.methods.awq import AWQ
from mlxserve_convert.methods.compressed_tensors import COMPRESSED_TENSORS
from mlxserve_convert.methods.fp8 import FP8
from mlxserve_convert.methods.gptq import GPTQ
from mlxserve_convert.methods.method import Decoder, Method
from mlxserve_convert.methods.mxfp4 import MXFP4

_METHODS: dict[str, Method] = {
    "awq": AWQ,
    "compressed-tensors": COMPRESSED_TENSORS,
    "fbgemm_fp8": FP8,
    "fp8": FP8,
    "gptq": GPTQ,
    "mxfp4": MXFP4,
}
SIDE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Where earlier versions of a method's tools, or others, keep the settings."""
_MARKS = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8",
    "_proj_blocks": "MXFP4",
    ".SCB": "bitsandbytes",
    ".absmax": "bitsandbytes",
}
_KEYS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True, slots=True)
class Prequantized:
    """A method that we know, with the checkpoint's settings of it."""

    decode: Decoder
    settings: Mapping[str, Any]


def find_prequantized(config: Mapping[str, Any], path: Path) -> Prequantized | None:
    """The method of a config, None for floats: ``bits: null`` and an empty object mean that nothing is
    quantized. Raises ConversionError for one that no decoder knows, before any weights are read."""
    text_config = config.get("text_config")
    places = (config, text_config if isinstance(text_config, dict) else {})
    values = [place.get(key) for place in places for key in _KEYS]
    found = [value for value in values if isinstance(value, dict) and not _is_nothing(value)]
    methods = list(dict.fromkeys(str(settings.get("quant_method")) for settings in found))
    if len(methods) > 1:
        raise ConversionError(
            f"{path}: is quantized by several methods: quant_method {' and '.join(map(repr, methods))}, "
            "which is not supported; convert from the unquantized checkpoint"
        )
    if found:
        return _known(found[0], path)
    for name, method in SIDE_FILES.items():
        if (path / name).is_file():
            return _known({"quant_method": method, **read_json_object(path / name)}, path)
    return None


def check_plain(names: Iterable[str], path: Path) -> None:
    """Raises ConversionError if the names are those of a method that config.json does not tell of."""
    for name in names:
        method = next((method for suffix, method in _MARKS.items() if name.endswith(suffix)), None)
        if method is not None:
            raise ConversionError(
                f"{path}: holds tensors that are quantized ({name!r}, as in {method}), but config.json has "
                "no quantization_config that says how"
            )


def _is_nothing(settings: Mapping[str, Any]) -> bool:
    return set(settings) <= {"bits", "group_size", "mode"} and settings.get("bits") is None


def _known(settings: Mapping[str, Any], path: Path) -> Prequantized:
    method = settings.get("quant_method")
    if method is None:
        raise ConversionError(
            f"{path}: has a quantization that is not known, without a quant_method: "
            f"{', '.join(sorted(repr(str(key))[:40] for key in settings))}"
        )
    known = _METHODS.get(method) if isinstance(method, str) else None
    if known is None:
        inner = settings.get("quantization")
        inner = inner if isinstance(inner, dict) else settings
        form = settings.get("format") or settings.get("fmt") or inner.get("quant_algo")
        raise ConversionError(
            f"{path}: is quantized: quant_method {method!r:.60}, format {form!r:.60}, which is not supported "
            f"(supported: {', '.join(_METHODS)}); convert from the unquantized checkpoint"
        )
    known.check(settings, str(path))
    return Prequantized(known.decode, settings)
