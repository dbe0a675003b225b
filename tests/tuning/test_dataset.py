"""From files to examples: kinds of rows, problems by line, what is held out, and the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mlxserve.errors import UsageError
from mlxserve.text.chat_template import ChatTemplate
from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.tuning import dataset
from mlxserve.tuning.dataset import (
    DataRequest,
    Dataset,
    DataSummary,
    TrainingDataError,
    load_dataset,
    load_measured,
)
from mlxserve.tuning.rows import FieldNames
from tests.tuning.case_28 import DROPS_OLD_THOUGHTS, text_tools

MESSAGES = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
SHAREGPT = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def tools(tmp_path: Path) -> tuple[FolderTokenizer, ChatTemplate | None]:
    return text_tools(tmp_path / "model", DROPS_OLD_THOUGHTS)


@pytest.fixture
def load(tmp_path: Path, tools: tuple[FolderTokenizer, ChatTemplate | None]) -> Any:
    def load_data(data: Path, **options: Any) -> Dataset:
        return load_dataset(DataRequest(str(data), **({"valid_share": 0.0} | options)), *tools)

    return load_data


@pytest.fixture
def texts(load: Any, tmp_path: Path, tools: tuple[FolderTokenizer, ChatTemplate | None]) -> Any:
    def texts_of(rows: list[Any], **options: Any) -> list[str]:
        """What is trained of each row."""
        data = load(write(tmp_path / "train.jsonl", rows), **options)
        return [
            tools[0].decode([i for i, flag in zip(e.token_ids, e.is_trained, strict=True) if flag])
            for e in data.train
        ]

    return texts_of


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def refused(load: Any, data: Path, **options: Any) -> tuple[str, DataSummary]:
    with pytest.raises(TrainingDataError) as error:
        load(data, **options)
    assert "\n" not in str(error.value)
    return str(error.value), error.value.summary


@pytest.mark.parametrize(
    ("row", "fields", "trained"),
    [
        ({"messages": MESSAGES}, {}, "A"),
        ({"messages": json.dumps(MESSAGES), "tools": json.dumps(TOOLS)}, {}, "A"),
        ({"messages": MESSAGES, "tools": ""}, {}, "A"),
        ({"conversations": SHAREGPT}, {}, "A"),
        ({"conversations": MESSAGES}, {}, "A"),
        ({"chat": SHAREGPT, "text": "no"}, {"messages": "chat"}, "A"),
        ({"prompt": "Q", "completion": "A", "text": "no"}, {}, "A"),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, {}, "A"),
        ({"question": "Q", "answer": "A"}, {"prompt": "question", "completion": "answer"}, "A"),
        ({"question": "Q", "completion": "A"}, {"prompt": "question"}, "A"),
        ({"text": "abc", "id": 7}, {}, "bc"),
        ({"body": "abc", "messages": MESSAGES}, {"text": "body"}, "bc"),
    ],
)
def test_kinds_of_rows(texts: Any, row: dict[str, Any], fields: dict[str, str], trained: str) -> None:
    assert texts([row], fields=FieldNames(**fields)) == [trained]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"a": 1, "b": 2}, "has no field messages, text, or prompt and completion; it has a, b (--messages-"),
        ({}, "has no field messages, text, or prompt and completion; it has nothing"),
        ({"messages": []}, "messages is empty"),
        ({"messages": None}, "messages is null"),
        ({"messages": "hello"}, "messages must be a list, or the JSON text of one"),
        ({"messages": "{}"}, "messages must be a list, not an object"),
        ({"messages": [1]}, "messages[0] must be an object, not a number"),
        ({"messages": [{"role": "poet", "content": "x"}, MESSAGES[1]]}, "messages[0].role must be one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, MESSAGES[1]]},
            "messages[0].content[0]: this model takes text only",
        ),
        ({"messages": MESSAGES, "tools": [1]}, "tools[0] must be an object, not a number"),
        ({"messages": MESSAGES, "tools": {}}, "tools must be a list, not an object"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "conversations[0].from must be one of system"),
        ({"conversations": [{"from": "gpt", "value": 5}]}, "conversations[0].value must be a string, not a"),
        ({"prompt": "a", "completion": None}, "completion is null"),
        ({"prompt": 5, "completion": "b"}, "prompt must be a string, not a number"),
        ({"text": ""}, "text is empty"),
        ({"text": ["a"]}, "text must be a string, not a list"),
    ],
)
def test_bad_rows_name_the_field(load: Any, tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    _, summary = refused(load, write(tmp_path / "train.jsonl", [row]))
    assert str(summary.bad[0]).startswith(f"train.jsonl:1: {reason}")


def test_rows_of_another_kind_are_bad_by_line(load: Any, tmp_path: Path) -> None:
    rows = [{"text": "abc"}, {"messages": MESSAGES}, "{broken", {"text": "def"}, {"prompt": "a"}]
    data = write(tmp_path / "train.jsonl", rows)
    message, summary = refused(load, data)
    assert message == (
        "3 rows are bad, the first train.jsonl:2: text is missing; --skip-bad leaves bad rows out"
    )
    assert [problem.place for problem in summary.bad] == [f"train.jsonl:{line}" for line in (2, 3, 5)]
    found = load(data, skip_bad=True)
    assert [example.place for example in found.train] == ["train.jsonl:1", "train.jsonl:4"]
    assert found.summary.num_bad == 3


def test_too_many_bad_rows_are_counted(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_KEPT_PROBLEMS", 3)
    message, summary = refused(load, write(tmp_path / "train.jsonl", [{"text": "a"}, *["x"] * 9]))
    assert message.startswith("9 rows are bad")
    assert len(summary.bad) == 3 and summary.num_bad == 9


def test_splits_are_read_from_their_files(load: Any, tmp_path: Path) -> None:
    for name, count in (("train", 3), ("valid", 2), ("test", 1)):
        write(tmp_path / "data" / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(count)])
    data = load(tmp_path / "data", valid_share=0.5)
    assert [len(part) for part in (data.train, data.valid, data.test)] == [3, 2, 1]
    assert data.valid[0].place == "valid.jsonl:1"
    write(tmp_path / "data" / "valid.jsonl", [{"messages": MESSAGES}])
    assert refused(load, tmp_path / "data")[0].startswith("1 row is bad, the first valid.jsonl:1: text is")


def test_rows_are_held_out_by_share_and_seed(load: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "train.jsonl", [{"text": f"row {i}"} for i in range(40)])
    found = load(data, valid_share=0.1, seed=3)
    assert (len(found.train), len(found.valid)) == (36, 4)
    places = [example.place for example in (*found.train, *found.valid)]
    assert sorted(places) == sorted(f"train.jsonl:{i + 1}" for i in range(40))
    assert found.summary.notes[0] == (
        "there is no valid file: 4 of 40 train rows are held out (share 0.1, seed 3)"
    )
    assert found.summary.splits["valid"].num_rows == 4
    assert load(data, valid_share=0.1, seed=3).valid == found.valid
    assert load(data, valid_share=0.1, seed=4).valid != found.valid


@pytest.mark.parametrize(
    ("count", "share", "sizes"), [(2, 0.01, (1, 1)), (3, 0.99, (1, 2)), (1, 0.5, (1, 0)), (5, 0.0, (5, 0))]
)
def test_at_least_one_row_on_each_side(
    load: Any, tmp_path: Path, count: int, share: float, sizes: tuple[int, int]
) -> None:
    data = write(tmp_path / "train.jsonl", [{"text": f"row {i}"} for i in range(count)])
    found = load(data, valid_share=share)
    assert (len(found.train), len(found.valid)) == sizes
    assert ("no validation" in found.summary.notes[0]) == (sizes[1] == 0)


def test_the_summary_counts_rows_and_tokens(load: Any, tmp_path: Path) -> None:
    def row(question: str, answer: str) -> dict[str, str]:
        return {"prompt": question, "completion": answer}

    rows = [row("abc", "xy"), row("abcdefghij", "x"), row("a", "uvwxyz" * 3), "broken", row("q" * 30, "a")]
    found = load(write(tmp_path / "train.jsonl", rows), max_length=20, skip_bad=True).summary
    split = found.splits["train"]
    assert (split.num_rows, split.num_bad, split.num_skipped, split.num_examples) == (5, 1, 1, 3)
    assert (split.num_cut, split.longest, split.longest_place) == (1, 23, "train.jsonl:3")
    assert split.num_tokens == 9 + 15 + 20
    assert split.num_trained == 3 + 2 + 16
    assert split.masked_share == pytest.approx(1 - 21 / 44)
    assert [str(problem) for problem in found.skipped] == [
        "train.jsonl:5: has nothing to train on in its first 20 of 35 tokens"
    ]


def test_an_empty_file_is_an_error(load: Any, tmp_path: Path) -> None:
    message, summary = refused(load, write(tmp_path / "train.jsonl", []))
    assert message.endswith("train.jsonl: no row of train is left, 0 bad and 0 skipped")
    assert summary.splits["train"].num_rows == 0


def test_nulls_of_a_table_are_no_keys_of_a_message(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Q", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "R", "tool_calls": None},
        {"role": "assistant", "content": "A", "tool_calls": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), tmp_path / "train.parquet")
    shows_calls = DROPS_OLD_THOUGHTS.replace(
        "<|end|>", "{{ '(calls f)' if m.tool_calls is defined }}<|end|>", 1
    )
    tools = text_tools(tmp_path / "model", shows_calls)
    found = load_dataset(DataRequest(str(tmp_path / "train.parquet")), *tools)
    assert found.train[0].place == "train.parquet:1"
    assert tools[0].decode(found.train[0].token_ids) == "Q(calls f)<|tool|>RA"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "the maximal length must be at least 2 tokens, not 1"),
        ({"valid_share": 1.0}, "the share held out must be at least 0 and less than 1, not 1.0"),
        (
            {"fields": FieldNames(text="a", prompt="b")},
            "the named fields are of several kinds of rows: prompt/completion, text",
        ),
    ],
)
def test_requests_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataRequest("x", **options)


def test_another_split_can_be_the_main_one(load: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "data" / "test.jsonl", [{"text": "abc"}])
    for source in (tmp_path / "data", data):
        found = load(source, main="test", valid_share=0.5)
        assert (len(found.train), len(found.valid), len(found.test)) == (0, 0, 1)
        assert found.summary.notes == ["rows of text have no prompt to mask: they are trained whole"]
    with pytest.raises(
        UsageError, match=r"no data file whose name begins with train .*; there is test\.jsonl"
    ):
        load(tmp_path / "data")


def test_files_of_one_name_are_told_apart(load: Any, tmp_path: Path) -> None:
    for name in ("train", "val"):
        write(tmp_path / "data" / name / "0.jsonl", [{"text": "abc"}])
    found = load(tmp_path / "data")
    assert (found.train[0].place, found.valid[0].place) == ("train/0.jsonl:1", "val/0.jsonl:1")


def test_rows_of_valid_that_are_trained_on_are_counted(load: Any, tmp_path: Path) -> None:
    write(tmp_path / "data" / "train.jsonl", [{"text": "abc"}, {"text": "def"}])
    write(tmp_path / "data" / "valid.jsonl", [{"text": "abc"}, {"text": "new"}])
    assert "1 row of valid can be found in train, too" in load(tmp_path / "data").summary.notes


@pytest.mark.parametrize(
    ("files", "split"),
    [
        (["train", "valid", "test"], "test"),
        (["train", "valid"], "valid"),
        (["train"], "train"),
        (["a"], "test"),
    ],
)
def test_rows_to_measure_are_those_of_test_or_what_is_nearest(
    tmp_path: Path, tools: tuple[FolderTokenizer, ChatTemplate | None], files: list[str], split: str
) -> None:
    for name in files:
        write(tmp_path / "data" / f"{name}.jsonl", [{"text": name}, {"text": f"more {name}"}])
    found, examples, summary = load_measured(DataRequest(str(tmp_path / "data")), *tools)
    assert (found, len(examples), list(summary.splits)) == (split, 2, [split])
    alone = load_measured(DataRequest(str(tmp_path / "data" / f"{files[0]}.jsonl")), *tools)
    assert (alone[0], len(alone[1])) == ("test", 2)


def test_a_folder_with_nothing_to_measure(
    tmp_path: Path, tools: tuple[FolderTokenizer, ChatTemplate | None]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"begins with train, valid or test .*; there is no data file"):
        load_measured(DataRequest(str(tmp_path / "empty")), *tools)
