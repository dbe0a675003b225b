"""Checkpoints that others quantized: which method it is, and its decoder.

Each decoder takes all tensors by name and gives one weight for each matrix, under the name that an
unquantized checkpoint would use. A method, or a variant of one, that no decoder knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ConversionError
from mlxserve.json_file import read_json_object
from mlxserve_convert.weights import Weight

Decoder = Callable[[Mapping[str, Weight], Mapping[str, Any], str], dict[str, Weight]]
"""Tensors, the quantization settings of the config, and where the checkpoint lies (for errors)."""

_DECODERS: dict[str, Decoder] = {}
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
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _KEYS:
            settings = place.get(key)
            if isinstance(settings, dict) and settings:
                return _known(settings, path)
    side_file = path / "hf_quant_config.json"
    if side_file.is_file():
        settings = read_json_object(side_file)
        algorithm = settings.get("quantization", settings).get("quant_algo")
        raise ConversionError(
            f"{path}: is quantized: quant_method 'modelopt', format {algorithm!r}, which is not supported"
        )
    return None


def _known(settings: Mapping[str, Any], path: Path) -> Prequantized | None:
    method = settings.get("quant_method")
    if method is None:
        unknown = sorted(set(settings) - {"bits", "group_size", "mode"})
        if unknown:
            raise ConversionError(f"{path}: has a quantization that is not known: {', '.join(unknown)}")
        return None
    decoder = _DECODERS.get(method)
    if decoder is None:
        form = settings.get("format") or settings.get("fmt")
        raise ConversionError(
            f"{path}: is quantized: quant_method {method!r}, format {form!r}, which is not supported "
            f"(supported: {', '.join(sorted(_DECODERS)) or 'none'}); convert from the unquantized checkpoint"
        )
    return Prequantized(decoder, settings)
