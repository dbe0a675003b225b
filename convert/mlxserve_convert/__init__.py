"""Conversion of checkpoints into MLX folders: GGUF files exactly, Hugging Face folders quantized."""

from mlxserve_convert.convert import convert
from mlxserve_convert.options import ConvertOptions, ConvertReport, PlannedTensor

__all__ = ["ConvertOptions", "ConvertReport", "PlannedTensor", "convert"]
