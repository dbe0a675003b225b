"""Files of training data: every format, good and bad, and which file belongs to which split."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxserve.errors import UsageError
from mlxserve.tuning.data_files import find_data
from mlxserve.tuning.file_rows import read_rows
from mlxserve.tuning.raw_row import RawRow

ROWS = [
    {"prompt": "one", "completion": "1"},
    {"prompt": 'two\nlines, "quoted"', "completion": "zwölf 日本 🚀"},
    {"prompt": "three", "completion": ""},
]


def table(rows: list[dict[str, str]], delimiter: str) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def encoded(name: str, rows: list[dict[str, Any]]) -> bytes:
    texts = {
        "a.jsonl": lines(rows),
        "a.json": json.dumps(rows, indent=1),
        "data.json": json.dumps({"version": [1, {"data": 2}], "data": rows, "more": None}),
        "lines.json": lines(rows),
        "a.csv": table(rows, ","),
        "a.tsv": table(rows, "\t"),
    }
    return parquet(rows) if name.endswith(".parquet") else texts[name].encode()


FORMATS = ["a.jsonl", "a.json", "data.json", "lines.json", "a.csv", "a.tsv", "a.parquet"]


def read(folder: Path, name: str, content: bytes | str) -> list[RawRow]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(path, name))


def problems(rows: list[RawRow]) -> list[str]:
    assert all((row.value is None) == bool(row.problem) for row in rows)
    return [f"{row.place}: {row.problem}" for row in rows if row.value is None]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = read(tmp_path, name, encoded(name, ROWS))
    assert problems(rows) == []
    assert [row.value for row in rows] == ROWS


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("name", FORMATS[:-1])
def test_compressed_files(tmp_path: Path, name: str, packing: str) -> None:
    content = encoded(name, ROWS)
    packed = (
        gzip.compress(content) if packing == ".gz" else pyarrow.Codec("zstd").compress(content, asbytes=True)
    )
    assert [row.value for row in read(tmp_path, name + packing, packed)] == ROWS


@pytest.mark.parametrize("name", FORMATS[:-1])
def test_a_byte_order_mark_and_dos_lines(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "a", "completion": "ü"}, {"prompt": "b", "completion": "x"}]
    content = b"\xef\xbb\xbf" + encoded(name, rows).replace(b"\n", b"\r\n")
    assert [row.value for row in read(tmp_path, name, content)] == rows


def test_places_are_lines_of_the_file(tmp_path: Path) -> None:
    places = {name: [row.place for row in read(tmp_path, name, encoded(name, ROWS))] for name in FORMATS}
    assert places["a.jsonl"] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert places["a.json"] == ["a.json:2", "a.json:6", "a.json:10"]
    assert places["data.json"] == ["data.json:1"] * 3
    assert places["lines.json"] == ["lines.json:1", "lines.json:2", "lines.json:3"]
    assert places["a.csv"] == ["a.csv:2", "a.csv:3", "a.csv:5"]
    assert places["a.parquet"] == ["a.parquet:1", "a.parquet:2", "a.parquet:3"]


def test_bad_lines_are_told_by_line_and_the_others_are_read(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n\n{"text": \n[1]\n{"text": "\xff"}\n"x"\n{"text": "b"}'
    rows = read(tmp_path, "a.jsonl", content)
    assert [row.value for row in rows if row.value] == [{"text": "a"}, {"text": "b"}]
    assert problems(rows) == [
        "a.jsonl:3: is not valid JSON: Expecting value in column 1",
        "a.jsonl:4: is not a JSON object",
        "a.jsonl:5: is not UTF-8: byte 0xff in column 11",
        "a.jsonl:6: is not a JSON object",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "a.jsonl:1: is UTF-16, not UTF-8"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: is not valid JSON: nested too deeply"),
        ("a.json", '[{"text": "a"},\n {"text": "b"}', "a.json:2: is not valid JSON: expected , or ]"),
        ("a.json", '[{"text": "a"},\n 5]', "a.json:2: is not a JSON object"),
        ("a.json", '[{"text": "a"},\n nope]', "a.json:2: is not valid JSON: Expecting value in column 2"),
        ("a.json", '{"rows": []}', "a.json:1: must be a list of objects, or an object with the list data"),
        ("a.json", "\n7", "a.json:2: must be a list of objects"),
        ("a.json", b'[{"text": "a"},\n{"text": "\xe9"}]', "a.json:2: is not UTF-8"),
        ("a.json", '{"text": "a"}\n{"text": }', "a.json:2: is not valid JSON"),
        ("a.csv", "a,b\n1,2\n3\n", "a.csv:3: has 1 fields, the header names 2"),
        ("a.csv", "a,a\n1,2\n", "a.csv:1: the header names 'a' twice"),
        ("a.csv", b"a,b\n1,2\n3,\xe9\n5,6\n", "a.csv:3: b is not UTF-8: byte 0xe9"),
        ("a.csv", b"a,\xe9\n1,2\n", "a.csv:1: the header is not UTF-8"),
        ("a.csv", 'a,b\n1,2\n3,"4\n5,6\n', "a.csv:3: is not valid CSV: unexpected end of data"),
        ("a.tsv", "a\tb\n1\t2\t3\n", "a.tsv:2: has 3 fields, the header names 2"),
    ],
)
def test_bad_content(tmp_path: Path, name: str, content: bytes | str, message: str) -> None:
    found = problems(read(tmp_path, name, content))
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 nothing PAR1", "not a readable parquet file"),
        ("a.jsonl.gz", b"not packed", "damaged, Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-12], "damaged"),
        ("a.jsonl.zst", b"not packed", "cannot be read"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read(tmp_path, name, content)
    assert "\n" not in str(error.value) and name in str(error.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"needs pyarrow: pip install 'mlxserve\[data\]'"):
        read(tmp_path, name, b"")


def test_nested_columns_of_parquet(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = read(tmp_path, "a.parquet", parquet([{"messages": messages, "tools": None}]))
    assert rows[0].value == {"messages": messages, "tools": None}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=3), max_size=5),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.booleans(),
)
def test_any_json_is_read_back(
    tmp_path: Path, rows: list[dict[str, Any]], indent: int | None, is_ascii: bool, is_wrapped: bool
) -> None:
    value = {"a": rows, "data": rows, "z": {"data": []}} if is_wrapped else rows
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    found = read(tmp_path, "a.json", text.encode("utf-8", "surrogatepass"))
    assert [row.value for row in found] == rows
    found = read(tmp_path, "a.jsonl", "".join(f"{json.dumps(row, ensure_ascii=is_ascii)}\n" for row in rows))
    assert [row.value for row in found] == rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv"]))
def test_any_bytes_are_rows_or_problems(tmp_path: Path, content: bytes, name: str) -> None:
    problems(read(tmp_path, name, content))


def folder_of(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return folder


def splits(folder: Path) -> dict[str, list[str]]:
    found = find_data(str(folder))
    return {split: [str(path.relative_to(folder)) for path in paths] for split, paths in found.splits.items()}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.jsonl"], {"train": ["train.jsonl"]}),
        (
            ["train.jsonl", "valid.jsonl", "test.jsonl", "README.md", "notes.txt"],
            {"train": ["train.jsonl"], "valid": ["valid.jsonl"], "test": ["test.jsonl"]},
        ),
        (
            ["data/train-00001-of-2.parquet", "data/train-00000-of-2.parquet", "data/validation-0.parquet"],
            {
                "train": ["data/train-00000-of-2.parquet", "data/train-00001-of-2.parquet"],
                "valid": ["data/validation-0.parquet"],
            },
        ),
        (
            ["train/0000.parquet", "val/0000.parquet"],
            {"train": ["train/0000.parquet"], "valid": ["val/0000.parquet"]},
        ),
        (["TRAIN_sft.csv.gz", "values.csv.gz"], {"train": ["TRAIN_sft.csv.gz"]}),
        (["training.jsonl", "trainer_state.json"], {"train": ["training.jsonl"]}),
        (["rows.jsonl", "dataset_infos.json", ".hidden/train.jsonl"], {"train": ["rows.jsonl"]}),
    ],
)
def test_files_of_a_folder(tmp_path: Path, names: list[str], expected: dict[str, list[str]]) -> None:
    assert splits(folder_of(tmp_path, *names)) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no data file whose name begins with train .*; there is no data file"),
        (["a.jsonl", "b.jsonl"], "there is a.jsonl, b.jsonl"),
        (["valid.jsonl"], "there is valid.jsonl"),
        (["train.jsonl", "train.csv"], r"several formats \(\.csv, \.jsonl\)"),
        (["main/train.jsonl", "socratic/train.jsonl"], r"lie in several folders \(main, socratic\)"),
    ],
)
def test_folders_that_say_too_little(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_data(str(folder_of(tmp_path, *names)))


def test_a_file_alone_is_train(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "test.jsonl", "a.txt")
    assert find_data(str(folder / "test.jsonl")).splits["train"] == [folder / "test.jsonl"]
    with pytest.raises(UsageError, match=r"not a data file; these are \.jsonl, \.json, \.csv"):
        find_data(str(folder / "a.txt"))
    for name in ("./owner/name", "none.jsonl", "owner/none.jsonl", "a b"):
        with pytest.raises(UsageError, match="no such file or folder"):
            find_data(name)
