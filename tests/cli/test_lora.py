"""``mlxserve lora`` as a process: what it prints, writes and refuses, and that what it trains is served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as load_stock

from mlxserve.cli import run as run_in_process
from mlxserve.config import EngineConfig
from mlxserve.engine.served_model import open_folder
from tests.cli.conftest import COMMAND, WAIT_S, Result
from tests.server.serving import COMPLETIONS, serving
from tests.tuning import runs

Run = Callable[..., Result]
SETTINGS = """\
rank: 8
targets: [linear]
iters: 30
batch_size: 6
learning_rate: 1e-2
eval_every: 10
report_every: 10
"""

OPTIONS = ["--config", "train.yaml", "--sample", "ab ab", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model ``m``, data ``d``, settings ``train.yaml`` and, trained by them, ``a``."""
    folder = tmp_path_factory.mktemp("lora")
    runs.write_model(folder / "m", has_eos=True)
    runs.write_rows(folder / "d")
    (folder / "train.yaml").write_text(SETTINGS)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    """The outcome of the run that made ``a``."""
    done = subprocess.run(
        [*COMMAND, "lora", "train", "m", "--data", "d", "--output", "a", *OPTIONS],
        cwd=folder,
        env=os.environ | {"MLXSERVE_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value | {"stderr": done.stderr}


def test_train_says_what_it_does(folder: Path, trained: dict[str, Any]) -> None:
    lines = trained["stderr"].splitlines()
    assert {key: trained[key] for key in ("output", "reason", "step", "best_step")} == {
        "output": "a",
        "reason": "finished",
        "step": 30,
        "best_step": 30,
    }
    assert trained["best_loss"] < 2 and trained["last_loss"] < 2
    assert lines[0].startswith("train: 24 of 24 rows, ") and lines[1].startswith("valid: 6 of 6 rows, ")
    assert any(line.startswith("Training ") and line.split()[1].replace(",", "").isdigit() for line in lines)
    assert [line.split(":")[0] for line in lines if ": loss " in line] == ["step 10", "step 20", "step 30"]
    assert sum("validation loss" in line for line in lines) == 3
    assert any(line.startswith("before: ab ab -> ") for line in lines)
    assert any(line.startswith("after 30 steps: ab ab -> ") for line in lines)
    assert sorted(path.name for path in (folder / "a").iterdir()) == [
        "adapter_config.json",
        "adapters.safetensors",
        "best",
        "metrics.jsonl",
        "report.html",
        "state",
    ]
    page = (folder / "a/report.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<svg") == 3


def test_flags_win_over_a_toml_file(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(
        f'data = "{folder / "d"}"\nrank = 3\niters = 9\ntargets = ["qv"]\nlayers = 1\n'
    )
    model = str(folder / "m")
    result = run("lora", "train", model, "--config", "train.toml", "--iters", "2", "--output", "out")
    assert result.code == 0, result.err
    last = result.out.splitlines()
    assert last[0].startswith("Finished at step 2, loss ") and last[0].endswith(". Saved in out")
    assert last[1] == f"Serve it with: mlxserve serve {model} --adapter NAME=out"
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["num_layers"], config["lora_parameters"]["rank"]) == (1, 3)
    assert config["lora_parameters"]["keys"] == ["self_attn.q_proj", "self_attn.v_proj"]


REFUSED = [
    (["train", "{m}"], "--data is missing"),
    (["train", "{m}", "--data", "none"], "none"),
    (["train", "{m}", "--data", "{d}", "--rank", "0"], "rank must be at least 1, not 0"),
    (["train", "{m}", "--data", "{d}", "--layers", "99"], "layers is 99, but the model has only 2"),
    (["train", "{m}", "--data", "{d}", "--type", "lors"], "type"),
    (["train", "{m}", "--data", "{d}", "--target", "nope"], "target 'nope' matches no layer"),
    (["train", "{m}", "--data", "{d}", "--resume", "gone"], "gone: no such run to resume"),
    (["train", "{m}", "--data", "{d}", "--config", "gone.yaml"], "gone.yaml: cannot be read"),
    (["train", "{m}", "--data", "{d}", "--config", "bad.yaml"], "bad.yaml: there is no setting `ranks`"),
    (["eval", "{m}"], "--data is missing"),
    (["eval", "{m}", "--data", "{d}", "--adapter", "gone"], "gone: no such adapter folder"),
    (["fuse", "{m}", "--adapter", "gone", "-o", "out"], "gone: no such adapter folder"),
    (["fuse", "{m}", "--adapter", "{a}", "-o", "out", "--bits", "5"], "--bits 5 is not possible"),
    (["export", "--adapter", "gone", "-o", "out"], "gone: no such adapter folder"),
    (["import", "gone", "-o", "out"], "gone"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    folder: Path,
    trained: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("ranks: 4\n")
    places = {name: str(folder / name) for name in "mda"}
    code = run_in_process(["lora", *(argument.format(**places) for argument in arguments)])
    out, err = capsys.readouterr()
    assert code in (1, 2) and out == ""
    error = [line for line in err.splitlines() if not line.startswith(("train:", "valid:", "note:"))]
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0], err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml"]


def test_eval(run: Run, folder: Path, trained: dict[str, Any]) -> None:
    found = []
    for adapter in ([], ["--adapter", str(folder / "a")]):
        result = run(
            "lora",
            "eval",
            str(folder / "m"),
            "--data",
            str(folder / "d"),
            *adapter,
            "--exact-match",
            "--json",
        )
        assert result.code == 0, result.err
        found.append(json.loads(result.out))
    base, tuned = found
    assert set(base) == {
        "split",
        "num_examples",
        "loss",
        "perplexity",
        "num_tokens",
        "exact_match",
        "answers",
    }
    assert (base["split"], base["num_examples"]) == ("valid", 6)
    assert tuned["loss"] == pytest.approx(trained["best_loss"], abs=1e-3)
    assert tuned["loss"] < base["loss"] and base["exact_match"] == 0
    assert [set(answer) for answer in tuned["answers"]] == [{"place", "expected", "found", "is_exact"}] * 6
    text = run("lora", "eval", str(folder / "m"), "--data", str(folder / "d"), "--limit", "2").out
    assert text.startswith("2 rows of valid, ") and "perplexity " in text


def test_fuse_and_evaluate(run: Run, folder: Path, trained: dict[str, Any], tmp_path: Path) -> None:
    result = run("lora", "fuse", str(folder / "m"), "--adapter", str(folder / "a"), "-o", "out", "--json")
    assert result.code == 0, result.err
    value = json.loads(result.out)
    assert set(value) == {"output", "num_bytes", "layers", "divergence", "effect"}
    assert len(value["layers"]) == 14 and value["divergence"] < 1e-3 < value["effect"]
    assert set(value["layers"][0]) == {"path", "bits_before", "bits_after", "lost"}
    evaluated = run("lora", "eval", "out", "--data", str(folder / "d"), "--json")
    assert json.loads(evaluated.out)["loss"] == pytest.approx(trained["best_loss"], abs=1e-3)
    again = run("lora", "fuse", str(folder / "m"), "--adapter", str(folder / "a"), "-o", "out")
    assert again.code == 1 and again.err.count("\n") == 1 and "out" in again.err


def test_export_and_import(run: Run, folder: Path, trained: dict[str, Any], tmp_path: Path) -> None:
    assert run("lora", "export", "--adapter", str(folder / "a"), "-o", "peft") == Result(
        0, "Wrote peft\n", ""
    )
    assert run("lora", "import", "peft", "-o", "back") == Result(0, "Wrote back\n", "")
    runs.assert_same_weights(runs.adapter(tmp_path / "back"), runs.adapter(folder / "a"))
    twice = run("lora", "import", "peft", "-o", "back")
    assert twice.code == 2 and "back: exists already" in twice.err


async def test_what_was_trained_is_served_at_once(
    folder: Path, trained: dict[str, Any], tmp_path: Path
) -> None:
    """By its server while that runs; with the greedy answer that mlx-lm gives with this adapter."""
    adapter = Path(shutil.copytree(folder / "a", tmp_path / "mine"))
    stock, _ = load_stock(folder / "m")
    load_adapters(stock, str(adapter))
    tokens = [ord(character) - 32 for character in "ab ab ab"]
    start = len(tokens)
    for _ in range(12):
        tokens.append(int(mx.argmax(stock(mx.array([tokens]))[0, -1]).item()))  # type: ignore[arg-type]
    model = open_folder(folder / "m", "tiny", EngineConfig())
    async with serving(model) as api:
        body = {"prompt": "ab ab ab", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        before = (await api.post(COMPLETIONS, {"model": "tiny", **body})).text
        added = await api.post("/v1/adapters", {"name": "mine", "path": str(adapter)})
        assert added.status == 201, added.body
        text = (await api.post(COMPLETIONS, {"model": "tiny:mine", **body})).text
    assert text != before
    wanted = model.tokenizer.decode(tokens[start:])
    assert wanted.startswith(text) and text
