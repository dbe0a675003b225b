"""``mlxserve lora check-data`` as a process, on files and on a data set of a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Result
from tests.hub.hub_stub import Hub, Repo
from tests.tuning.case_28 import DROPS_OLD_THOUGHTS, write_model

Run = Callable[..., Result]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model", DROPS_OLD_THOUGHTS))


def jsonl(rows: list[Any]) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def test_good_data(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(jsonl([pair("2+2", "4"), pair("abc", "d")]))
    result = run("lora", "check-data", model, "--data", "rows.jsonl", "--valid-share", "0")
    assert result == Result(
        0,
        "rows of prompt/completion; lengths are in tokens\n"
        "       ROWS  BAD  SKIPPED  CUT  TOKENS  TRAINED  MASKED           LONGEST\n"
        "train     2    0        0    0      16        4   75.0%  8 (rows.jsonl:1)\n"
        "note: no validation: there is no valid file, and nothing is held out\n"
        "\n"
        "rows.jsonl:1: 2 of 8 tokens are trained, those in ⟦ ⟧\n"
        "<|user|>2+2<|end|><|assistant|>⟦4<|end|>⟧\n",
        "",
    )


def test_bad_rows_are_listed_and_fail(run: Run, model: str, tmp_path: Path) -> None:
    rows = [pair("a", "b"), *["{"] * 25, pair("abcdefghijkl", "yes")]
    (tmp_path / "rows.jsonl").write_text(jsonl(rows))
    command = ("lora", "check-data", model, "--data", "rows.jsonl", "--max-length", "8", "--show", "0")
    result = run(*command)
    assert result.code == 1
    lines = result.err.splitlines()
    assert lines[0].startswith("bad: rows.jsonl:2: is not valid JSON: ")
    assert lines[19:] == [
        lines[0].replace(":2:", ":21:"),
        "bad: … and 5 more rows (--json lists the first 1000)",
        "skipped: rows.jsonl:27: has nothing to train on in its first 8 of 19 tokens",
    ]
    assert run(*command, "--skip-bad") == Result(0, result.out, result.err)


def test_json(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("id,question,answer\n1,2+2,4\n2,5+5\n")
    fields = ("--prompt-field", "question", "--completion-field", "answer")
    result = run("lora", "check-data", model, "--data", "qa.csv", *fields, "--json")
    assert result.code == 1
    value = json.loads(result.out)
    assert value["splits"]["train"] == {
        "rows": 2,
        "bad": 1,
        "skipped": 0,
        "cut": 0,
        "examples": 1,
        "tokens": 8,
        "trained": 2,
        "masked_share": 0.75,
        "longest": 8,
        "longest_place": "qa.csv:2",
    }
    assert value["bad"] == [{"place": "qa.csv:3", "reason": "has 2 fields, the header names 3"}]
    assert value["samples"][0]["parts"] == [
        {"text": "<|user|>2+2<|end|><|assistant|>", "trained": False},
        {"text": "4<|end|>", "trained": True},
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data", "none.jsonl"], 2, "none.jsonl: no such file or folder (a hub data set is owner/name)"),
        ([], 2, "Missing option '--data'."),
        (
            ["--data", "x.jsonl", "--mask", "some"],
            2,
            "'some' is not one of 'last', 'all-assistant', 'none'.",
        ),
        (["--data", "x.jsonl", "--text-field", "a", "--prompt-field", "b"], 2, "several kinds of rows"),
        (
            ["--data", "x.jsonl"],
            1,
            "x.jsonl: no row of train is left, 0 bad and 1 skipped, the first x.jsonl:1",
        ),
        (["--data", "owner/name"], 1, "owner/name: the hub cannot be reached and the data set is not in its"),
    ],
)
def test_errors_are_one_line(
    run: Run, model: str, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "x.jsonl").write_text(jsonl([{"text": "a"}]))
    write_model(tmp_path / "bare", None, eos="")
    model = str(tmp_path / "bare") if message.startswith("x.jsonl") else model
    result = run("lora", "check-data", model, *arguments, HF_HOME=str(tmp_path / "hf"))
    assert result.code == code
    assert result.err.splitlines()[-1].startswith("error: ") and message in result.err.splitlines()[-1]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def test_a_hub_data_set_then_without_the_hub(run: Run, model: str, tmp_path: Path, hub: Hub) -> None:
    hub.data_sets["owner/name"] = Repo(
        {
            "README.md": b"# a data set",
            "loader.py": b"raise SystemExit('never run')",
            "main/train-00000.jsonl": jsonl([pair("a", "b")] * 3).encode(),
            "main/test-00000.jsonl": jsonl([pair("c", "d")]).encode(),
            "other/train-00000.jsonl": jsonl([pair("e", "f")]).encode(),
        }
    )
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
    command = ("lora", "check-data", model, "--json", "--data")
    online = run(*command, "owner/name/main", HF_HUB_OFFLINE="0", **variables)
    assert online.code == 0
    splits = json.loads(online.out)["splits"]
    assert {name: split["rows"] for name, split in splits.items()} == {"train": 2, "valid": 1, "test": 1}
    assert sorted(hub.sent) == ["main/test-00000.jsonl", "main/train-00000.jsonl"]
    offline = run(*command, "owner/name/main", HF_HUB_OFFLINE="1", **variables)
    assert (offline.code, offline.out, offline.err) == (0, online.out, "")
    whole = run(*command, "owner/name", HF_HUB_OFFLINE="0", **variables)
    assert whole.code == 2
    assert "train files lie in several folders (main, other); name one of these" in whole.err
    missing = run(*command, "owner/nothing", HF_HUB_OFFLINE="0", **variables)
    assert (missing.code, missing.err) == (
        1,
        "error: owner/nothing: no such data set on the hub (or it is private)\n",
    )
