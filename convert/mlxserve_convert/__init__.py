"""Conversion of checkpoints of any format into MLX folders, exactly where MLX has the source's layout."""

from mlxserve_convert.convert import convert
from mlxserve_convert.options import ConvertOptions, ConvertReport, PlannedTensor, Progress

__all__ = ["ConvertOptions", "ConvertReport", "PlannedTensor", "Progress", "convert"]
