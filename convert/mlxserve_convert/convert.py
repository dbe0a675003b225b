"""The one entry: looks at the source and hands it to the reader of its format."""

from __future__ import annotations

from pathlib import Path

from mlxserve.errors import ConversionError
from mlxserve_convert.gguf_import import import_gguf
from mlxserve_convert.hf_convert import convert_folder
from mlxserve_convert.options import ConvertOptions, ConvertReport, Progress


def convert(
    source: Path, output: Path, options: ConvertOptions, on_progress: Progress | None = None
) -> ConvertReport:
    """Converts a GGUF file or a Hugging Face folder into an MLX folder.

    The output appears as a whole or not at all. Raises ConversionError (or UnsupportedModelError) with
    one line on anything that is wrong with the source, the options for it, or the output.
    """
    source = source.expanduser()
    if not source.exists():
        raise ConversionError(f"{source}: no such file or folder")
    if source.resolve().is_relative_to(output.expanduser().resolve()):
        raise ConversionError(f"{output}: holds the source {source}, choose another output")
    output = output.expanduser()
    if source.is_file():
        return import_gguf(source, output, options, on_progress)
    return convert_folder(source, output, options, on_progress)
