"""Files of training data: which there are, and the rows in them, each with its place.

Texts are UTF-8, with or without a byte order mark. What cannot be read is a row with a problem instead of a
value, so that every fault of a file is found in one go.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from mlxserve.errors import UsageError
from mlxserve.hub.datasets import is_dataset_name, pull_dataset

SplitName = Literal["train", "valid", "test"]
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_PACKINGS = (".gz", ".zst")
_SPLITS: dict[str, SplitName] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "test": "test",
}
_SPLIT_NAME = re.compile(r"(training|train|validation|valid|val|test)(?![a-z])")
_PATH_STARTS = ("/", "./", "../", "~")
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")
_NOT_DATA = frozenset({"dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json"})


@dataclass(frozen=True, slots=True)
class RawRow:
    """``value`` is None exactly when ``problem`` says why."""

    place: str
    value: dict[str, Any] | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Files by split, those of a split by name. ``folder`` is what they are named relative to."""

    folder: Path
    splits: dict[SplitName, list[Path]]

    def rows(self, split: SplitName) -> Iterator[RawRow]:
        """All rows of a split. Raises UsageError for a file that as a whole cannot be read."""
        for path in self.splits.get(split, ()):
            yield from read_rows(path, str(path.relative_to(self.folder)))


def find_data(data: str, main: SplitName = "train") -> DataFiles:
    """The files of train, valid and test, where there are any; always some of ``main``.

    ``data`` is a file (all of it is ``main``), a folder, or a hub data set ``owner/name``, or a folder in
    one, ``owner/name/folder`` (downloaded first). In a folder a file belongs to the split that its own name,
    or else that of a folder above it, begins with (train…, valid… or val…, test…); if none does, the only
    data file is ``main``. Raises UsageError, MlxserveError subclasses of a download.
    """
    path = Path(data).expanduser()
    if path.is_file():
        if data_format(path) is None:
            raise UsageError(f"{path}: not a data file; these are {_known_formats()}")
        return DataFiles(path.parent, {main: [path]})
    if path.is_dir():
        return _find_in(path, main)
    if not data.startswith(_PATH_STARTS) and data_format(path) is None and is_dataset_name(data):
        return _find_in(pull_dataset(data), main)
    raise UsageError(f"{data}: no such file or folder (a hub data set is owner/name)")


def data_format(path: Path) -> str | None:
    """The suffix of a data file's format, without that of its compression."""
    suffixes = path.suffixes[-2:]
    if suffixes and suffixes[-1].lower() in _PACKINGS:
        suffixes.pop()
    format_name = suffixes[-1].lower() if suffixes else ""
    return format_name if format_name in FORMATS else None


def _known_formats() -> str:
    return f"{', '.join(FORMATS)}, also with {' or '.join(_PACKINGS)}"


def _find_in(folder: Path, main: SplitName) -> DataFiles:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if data_format(path) and path.name not in _NOT_DATA and _is_visible(path.relative_to(folder))
    ]
    splits: dict[SplitName, list[Path]] = {}
    for path in files:
        split = _split_of(path.relative_to(folder))
        if split is not None:
            splits.setdefault(split, []).append(path)
    if not splits and len(files) == 1:
        splits[main] = files
    if main not in splits:
        found = ", ".join(str(path.relative_to(folder)) for path in files[:5]) or "no data file"
        raise UsageError(
            f"{folder}: no data file whose name begins with {main} ({_known_formats()}); there is {found}"
        )
    for split, paths in splits.items():
        _check_alike(folder, split, paths)
    return DataFiles(folder, splits)


def _is_visible(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _split_of(path: Path) -> SplitName | None:
    for part in reversed(path.parts):
        match = _SPLIT_NAME.match(part.lower())
        if match:
            return _SPLITS[match[1]]
    return None


def _check_alike(folder: Path, split: str, paths: Sequence[Path]) -> None:
    """One set of files: the same rows in two formats, or two subsets of a repository, are not meant."""
    formats = sorted({data_format(path) or "" for path in paths})
    if len(formats) > 1:
        raise UsageError(f"{folder}: the {split} files have several formats ({', '.join(formats)}), keep one")
    homes = sorted({str(_home(path.relative_to(folder))) for path in paths})
    if len(homes) > 1:
        raise UsageError(
            f"{folder}: {split} files lie in several folders ({', '.join(homes)}); name one of these"
        )


def _home(path: Path) -> Path:
    """The folder of a file, that of its split aside."""
    home = path.parent
    return home.parent if _SPLIT_NAME.match(home.name.lower()) else home


def read_rows(path: Path, name: str) -> Iterator[RawRow]:
    """All rows of a data file, in order; ``name`` is the file's in their places. Raises UsageError when the
    file as a whole cannot be read."""
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv}
    format_name = data_format(path)
    try:
        if format_name == ".parquet":
            yield from _read_parquet(path, name)
            return
        with _open(path) as file:
            yield from readers[format_name or ""](file, name)
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


def _decoded(line: bytes) -> str:
    """Raises ValueError with the place of the fault in the line."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        if line.startswith(_OTHER_BOMS):
            raise ValueError("is UTF-16, not UTF-8: save the file as UTF-8") from None
        raise ValueError(
            f"is not UTF-8: byte 0x{line[error.start]:02x} in column {error.start + 1}"
        ) from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error.msg} in column {error.colno}") from None
    except RecursionError:
        raise ValueError("is not valid JSON: nested too deeply") from None


def _read_jsonl(file: IO[bytes], name: str) -> Iterator[RawRow]:
    for number, line in enumerate(file, start=1):
        place = f"{name}:{number}"
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            yield RawRow(place, _object(_loads(_decoded(line))))
        except ValueError as error:
            yield RawRow(place, None, str(error))
            if number == 1 and line.startswith(_OTHER_BOMS):
                return


def _read_json(file: IO[bytes], name: str) -> Iterator[RawRow]:
    """A list of objects, or an object whose ``data`` is one. Lines of objects are read as .jsonl is."""
    content = file.read()
    try:
        text = _decoded(content.removeprefix(_BOM))
    except ValueError:
        line = content.count(b"\n", 0, _first_fault(content)) + 1
        yield RawRow(f"{name}:{line}", None, "is not UTF-8: save the file as UTF-8")
        return
    yield from _JsonText(text, name).rows()


def _first_fault(content: bytes) -> int:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return len(content)


class _JsonText:
    """Walks the elements of the one list, to know the line of each."""

    _SPACE = re.compile(r"[ \t\r\n]*")

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._decoder = json.JSONDecoder()
        self._counted_to, self._line = 0, 1

    def rows(self) -> Iterator[RawRow]:
        try:
            start = self._skip(0)
            if self._text[start : start + 1] == "{":
                value, end = self._value(start)
                if self._skip(end) < len(self._text):
                    yield from self._lines()
                    return
                if not isinstance(value.get("data"), list):
                    raise self._fault(start, "must be a list of objects, or an object with the list data")
                start = self._start_of_data(start)
            elif self._text[start : start + 1] != "[":
                raise self._fault(start, "must be a list of objects, or an object with the list data")
            yield from self._elements(start)
        except _JsonFaultError as fault:
            yield RawRow(f"{self._name}:{self._line_at(fault.position)}", None, fault.reason)

    def _lines(self) -> Iterator[RawRow]:
        for number, line in enumerate(self._text.split("\n"), start=1):
            if line.strip():
                try:
                    yield RawRow(f"{self._name}:{number}", _object(_loads(line)))
                except ValueError as error:
                    yield RawRow(f"{self._name}:{number}", None, str(error))

    def _elements(self, start: int) -> Iterator[RawRow]:
        position = self._skip(start + 1)
        if self._text[position : position + 1] == "]":
            return
        while True:
            value, end = self._value(position)
            place = f"{self._name}:{self._line_at(position)}"
            if isinstance(value, dict):
                yield RawRow(place, value)
            else:
                yield RawRow(place, None, "is not a JSON object")
            end = self._skip(end)
            if self._text[end : end + 1] == "]":
                return
            if self._text[end : end + 1] != ",":
                raise self._fault(end, "is not valid JSON: expected , or ] after an element")
            position = self._skip(end + 1)

    def _start_of_data(self, start: int) -> int:
        """Where the list of the last key ``data`` begins, in an object that is known to be valid."""
        position, found = self._skip(start + 1), start
        while True:
            key, end = self._value(position)
            position = self._skip(self._skip(end) + 1)
            if key == "data":
                found = position
            _, end = self._value(position)
            position = self._skip(end)
            if self._text[position] == "}":
                return found
            position = self._skip(position + 1)

    def _skip(self, position: int) -> int:
        match = self._SPACE.match(self._text, position)
        assert match is not None
        return match.end()

    def _value(self, position: int) -> tuple[Any, int]:
        try:
            return self._decoder.raw_decode(self._text, position)
        except json.JSONDecodeError as error:
            raise self._fault(error.pos, f"is not valid JSON: {error.msg} in column {error.colno}") from None
        except RecursionError:
            raise self._fault(position, "is not valid JSON: nested too deeply") from None

    def _fault(self, position: int, reason: str) -> _JsonFaultError:
        return _JsonFaultError(position, reason)

    def _line_at(self, position: int) -> int:
        """Lines are counted on from the last place that was asked for."""
        if position < self._counted_to:
            self._counted_to, self._line = 0, 1
        self._line += self._text.count("\n", self._counted_to, position)
        self._counted_to = position
        return self._line


class _JsonFaultError(Exception):
    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


def _read_csv(file: IO[bytes], name: str) -> Iterator[RawRow]:
    """The first record names the fields. A record may span lines; its place is its first line."""
    delimiter = "\t" if data_format(Path(name)) == ".tsv" else ","
    csv.field_size_limit(1 << 30)
    reader = csv.reader(_csv_lines(file), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        place = f"{name}:{reader.line_num + 1}"
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Where this record ends is anyone's guess, so nothing after it can be read.
            yield RawRow(place, None, f"is not valid CSV: {error}; the rest of the file was not read")
            return
        if not record:
            continue
        if names is None:
            problem = _header_problem(record)
            if problem:
                yield RawRow(place, None, problem)
                return
            names = record
            continue
        yield _csv_row(place, names, record)


def _csv_lines(file: IO[bytes]) -> Iterator[str]:
    """Bytes that are no UTF-8 become lone surrogates, which are looked for in the record."""
    for number, line in enumerate(file):
        yield (line.removeprefix(_BOM) if number == 0 else line).decode("utf-8", "surrogateescape")


def _header_problem(names: Sequence[str]) -> str:
    if any(_bad_bytes(name) for name in names):
        return "the header is not UTF-8: save the file as UTF-8"
    twice = sorted({name for name in names if names.count(name) > 1})
    return f"the header names {twice[0]!r} twice" if twice else ""


def _csv_row(place: str, names: Sequence[str], record: Sequence[str]) -> RawRow:
    if len(record) != len(names):
        return RawRow(place, None, f"has {len(record)} fields, the header names {len(names)}")
    for name, value in zip(names, record, strict=True):
        bad = _bad_bytes(value)
        if bad:
            return RawRow(place, None, f"{name} is not UTF-8: byte 0x{bad:02x}")
    return RawRow(place, dict(zip(names, record, strict=True)))


def _bad_bytes(text: str) -> int:
    """The first byte that was no UTF-8, 0 if there is none."""
    return next((ord(char) - 0xDC00 for char in text if "\udc80" <= char <= "\udcff"), 0)


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
