"""The rows of a data file, each with its place.

Texts are UTF-8, with or without a byte order mark. What cannot be read is a row with a problem instead of a
value, so that every fault of a file is found in one go.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from mlxserve.errors import UsageError
from mlxserve.tuning.csv_rows import read_csv
from mlxserve.tuning.json_rows import read_json, read_jsonl
from mlxserve.tuning.raw_row import RawRow

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PACKINGS = (".gz", ".zst")


def data_format(path: Path) -> str | None:
    """The suffix of a data file's format, without that of its compression."""
    suffixes = path.suffixes[-2:]
    if suffixes and suffixes[-1].lower() in PACKINGS:
        suffixes.pop()
    format_name = suffixes[-1].lower() if suffixes else ""
    return format_name if format_name in FORMATS else None


def read_rows(path: Path, name: str) -> Iterator[RawRow]:
    """All rows of a data file, in order; ``name`` is the file's in their places. Raises UsageError when the
    file as a whole cannot be read."""
    format_name = data_format(path)
    try:
        if format_name == ".parquet":
            yield from _read_parquet(path, name)
            return
        with _open(path) as file:
            if format_name in (".csv", ".tsv"):
                yield from read_csv(file, name, "," if format_name == ".csv" else "\t")
            elif format_name == ".json":
                yield from read_json(file, name)
            else:
                yield from read_jsonl(file, name)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(f"{path}: damaged, {_one_line(error)}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or _one_line(error)}") from None


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.GzipFile(path))
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            f"{path}: reading {path.suffix} files needs pyarrow: pip install 'mlxserve[data]'"
        ) from None
    return pyarrow


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _read_parquet(path: Path, name: str) -> Iterator[RawRow]:
    pyarrow = _pyarrow(path)
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{name}:{number}", value)
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path}: not a readable parquet file: {_one_line(error)}") from None
