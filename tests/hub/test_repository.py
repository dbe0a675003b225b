"""Pulling from a hub: a stub of its API on a free port, through huggingface-hub itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import constants

from mlxserve import cli
from mlxserve.errors import MlxserveError, ModelLoadError, ModelNotFoundError
from mlxserve.hub import (
    Patterns,
    PullProgress,
    download,
    find_pull,
    parse_reference,
    pull_repository,
    resolve,
)
from mlxserve.hub import repository as repository_module
from mlxserve.hub.pulls import Pull
from mlxserve.hub.reference import RepoReference
from tests.convert.checkpoints import LLAMA, random_weights, write_folder, write_gguf
from tests.convert.torch_files import plain, save
from tests.hub.hub_stub import COMMIT, Hub, Repo, sha256

Run = Callable[..., tuple[int, str, str]]
REFERENCE = RepoReference("owner/tiny")
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_folder(tmp_path_factory.mktemp("tiny"), LLAMA, random_weights(LLAMA), num_shards=2)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    extra = {"modeling_tiny.py": b"raise SystemExit", "original/model.safetensors": b"x" * 2000}
    with Hub({"owner/tiny": Repo({**files, **extra})}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(download, "_FIRST_PAUSE_S", 0.001)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def environment(hub: Hub, tmp_path: Path, **more: str) -> dict[str, str]:
    values = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    return {**os.environ, **values, "MLXSERVE_HOME": str(tmp_path / "home"), **more}


def pulled(hub: Hub, **options: object) -> Pull:
    return pull_repository(REFERENCE, **options)  # type: ignore[arg-type]


def refusal(reference: RepoReference = REFERENCE, patterns: Patterns | None = None) -> str:
    with pytest.raises(MlxserveError) as error:
        pull_repository(reference, patterns)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(reference)) or "safetensors" in str(error.value)
    return str(error.value)


def test_a_pull_brings_the_data_and_no_code_and_is_done_once(hub: Hub, files: dict[str, bytes]) -> None:
    seen: list[PullProgress] = []
    pull = pulled(hub, on_pull=seen.append)
    assert pull.folder.name == COMMIT
    found = {str(p.relative_to(pull.folder)): p.read_bytes() for p in pull.folder.rglob("*") if p.is_file()}
    assert found == files
    total = sum(len(content) for content in files.values())
    assert seen[-1] == PullProgress(total, total)
    assert all(0 <= progress.done_bytes <= total for progress in seen)
    sent = dict(hub.sent)
    assert pulled(hub) == pull
    assert hub.sent == sent


def test_a_cut_connection_is_gone_on_with_in_the_same_pull(hub: Hub, files: dict[str, bytes]) -> None:
    hub.cut_after[WEIGHTS] = [30_000, 20_000, 0]
    pull = pulled(hub)
    assert (pull.folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    # No byte came twice: what was buffered when a connection was cut may be asked for again.
    assert len(hub.ranges) == 3
    assert hub.sent[WEIGHTS] <= len(files[WEIGHTS]) + 50_000


def test_an_interrupted_pull_is_partial_and_the_next_one_goes_on(
    hub: Hub, run: Run, files: dict[str, bytes]
) -> None:
    hub.cut_after[WEIGHTS] = [60_000, *[0] * 10]
    assert "the download failed" in refusal()
    record = find_pull(REFERENCE)
    assert record is not None
    assert WEIGHTS in record.missing
    assert resolve("owner/tiny").path is None
    code, out, _ = run("list")
    assert (code, "(partial)" in out) == (0, True)
    code, _, err = run("show", "owner/tiny")
    assert code == 1
    assert "only in part" in err
    assert "mlxserve pull owner/tiny" in err
    with pytest.raises(ModelLoadError, match="offline mode is on, and only a part of it was pulled"):
        pulled(hub, offline=True)
    hub.cut_after.clear()
    hub.ranges.clear()
    pull = pulled(hub)
    assert len(hub.ranges) == 1
    assert int(hub.ranges[0].removeprefix("bytes=").rstrip("-")) > 0
    assert (pull.folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert not list(pull.folder.parent.parent.glob("blobs/*.incomplete"))
    code, out, _ = run("list")
    assert "owner/tiny  safetensors  llama" in out
    assert json.loads(run("show", "owner/tiny", "--json")[1])["context_length"] == 256


def test_a_server_without_ranges_sends_the_file_anew(hub: Hub, files: dict[str, bytes]) -> None:
    hub.no_ranges = True
    hub.cut_after[WEIGHTS] = [30_000]
    seen: list[PullProgress] = []
    pull = pulled(hub, on_pull=seen.append)
    assert (pull.folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert seen[-1].done_bytes == seen[-1].total_bytes


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_another_content_than_the_hub_names_is_thrown_away(hub: Hub, name: str) -> None:
    hub.damage.add(name)
    assert f"{name}" in (message := refusal())
    assert "expected" in message
    assert find_pull(REFERENCE) is not None
    assert resolve("owner/tiny").path is None
    hub.damage.clear()
    assert pulled(hub).is_whole


def test_a_part_that_belongs_to_another_content_is_noticed(hub: Hub, files: dict[str, bytes]) -> None:
    blobs = Path(constants.HF_HUB_CACHE) / "models--owner--tiny" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{sha256(files[WEIGHTS])}.incomplete"
    partial.write_bytes(b"?" * 5000)
    assert "is damaged and was thrown away" in refusal()
    assert not partial.exists()
    partial.write_bytes(b"?" * (len(files[WEIGHTS]) + 5))
    assert pulled(hub).is_whole


def test_a_file_of_another_size_in_the_cache_is_fetched_again(hub: Hub, files: dict[str, bytes]) -> None:
    path = pulled(hub).folder / WEIGHTS
    path.resolve().write_bytes(b"short")
    assert resolve("owner/tiny").path is None
    assert (pulled(hub).folder / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_revisions_and_commits(hub: Hub, run: Run) -> None:
    assert pull_repository(RepoReference("owner/tiny", "v1")).is_whole
    assert pull_repository(RepoReference("owner/tiny", COMMIT)).folder.name == COMMIT
    message = refusal(RepoReference("owner/tiny", "v9"))
    assert message == "owner/tiny@v9: the repository has no revision 'v9'"
    assert run("pull", "owner/tiny", "--revision", "v1")[0] == 0
    assert resolve("owner/tiny@v1").path is not None
    code, _, err = run("pull", "owner/tiny@v1", "--revision", "v2")
    assert (code, "two revisions" in err) == (2, True)


def test_what_a_hub_refuses_is_one_line(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFoundError):
        pull_repository(RepoReference("owner/none"))
    assert "no such repository on the hub, or it is private" in refusal(RepoReference("owner/none"))
    hub.repos["owner/closed"] = Repo(files, token="secret")
    hub.repos["owner/gated"] = Repo(files, token="secret", is_gated=True)
    assert "or it is private" in refusal(RepoReference("owner/closed"))
    assert "access is gated" in refusal(RepoReference("owner/gated"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pull_repository(RepoReference("owner/closed")).is_whole
    assert pull_repository(RepoReference("owner/gated")).is_whole


def test_without_a_hub_what_was_pulled_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", dead)
    assert "the hub cannot be reached" in (message := refusal())
    assert message.endswith("and it was not pulled")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    pull = pulled(hub)
    monkeypatch.setattr(constants, "ENDPOINT", dead)
    assert pulled(hub) == pull
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pulled(hub) == pull
    # A snapshot of another program has no record of ours.
    shutil.rmtree(Path("home"))
    assert pulled(hub).folder == pull.folder
    assert not hub.is_broken


def test_offline_asks_nothing(hub: Hub, run: Run) -> None:
    pulled(hub)
    hub.requests.clear()
    code, out, _ = run("pull", "owner/tiny", "--offline")
    assert code == 0
    assert COMMIT in out
    code, _, err = run("pull", "owner/other", "--offline")
    assert code == 1
    assert err == "error: owner/other: offline mode is on, and it was not pulled\n"
    assert hub.requests == []


def test_a_full_disk_is_named_before_anything_comes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(repository_module.shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    assert "GB free" in refusal()
    assert hub.sent == {}


def test_include_and_exclude(hub: Hub, run: Run) -> None:
    pull = pull_repository(REFERENCE, Patterns(include=("*.json", "*.jinja"), exclude=("tokenizer*",)))
    assert set(pull.files) == {"config.json", "model.safetensors.index.json", "chat_template.jinja"}
    # Some files are no model: serve would fetch the rest.
    assert resolve("owner/tiny").path is None
    assert "no file matches *.onnx" in refusal(REFERENCE, Patterns(include=("*.onnx",)))
    code, out, _ = run("pull", "owner/tiny", "--exclude", "chat*")
    assert code == 0
    assert not (Path(out.split(" is at ")[1].strip()) / "chat_template.jinja").exists() or pull.is_whole


def test_gguf_repositories(hub: Hub, run: Run, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", LLAMA, random_weights(LLAMA), Kind.Q8_0)
    content = (tmp_path / "a.gguf").read_bytes()
    hub.repos["owner/one"] = Repo({"tiny.Q8_0.gguf": content, "mmproj-tiny.gguf": b"x", "README.md": b"x"})
    hub.repos["owner/two"] = Repo({"tiny.Q8_0.gguf": content, "tiny.Q4_0.gguf": content})
    pull = pull_repository(RepoReference("owner/one"))
    assert pull.model_path == pull.folder / "tiny.Q8_0.gguf"
    message = refusal(RepoReference("owner/two"))
    assert "holds 2 GGUF models, choose one as owner/two:FILE.gguf: tiny.Q4_0.gguf, tiny.Q8_0.gguf" in message
    assert "its GGUF files: tiny.Q8_0.gguf" in refusal(RepoReference("owner/two", file="none.gguf"))
    code, out, err = run("convert", "owner/two:tiny.Q8_0.gguf", "-o", "out")
    assert code == 0, err
    assert "matrices quantized" in out
    assert resolve("owner/two:tiny.Q8_0.gguf").path is not None
    hub.repos["owner/split"] = Repo({f"m-{part:05d}-of-00003.gguf": content for part in (1, 2)})
    assert "1 of 3 parts are missing, first m-00003-of-00003.gguf" in refusal(RepoReference("owner/split"))


def test_only_bin_files_are_chosen_where_nothing_else_is(hub: Hub, files: dict[str, bytes]) -> None:
    hub.repos["owner/bin"] = Repo({"config.json": files["config.json"], "pytorch_model.bin": b"x" * 2000})
    assert set(pull_repository(RepoReference("owner/bin")).files) == {"config.json", "pytorch_model.bin"}
    hub.repos["owner/none"] = Repo({"README.md": b"x"})
    assert "holds no model" in refusal(RepoReference("owner/none"))


def test_a_repository_of_bin_files_is_converted_and_not_served(
    hub: Hub, run: Run, files: dict[str, bytes], tmp_path: Path
) -> None:
    save(
        tmp_path / "pytorch_model.bin",
        {name: plain(name, values) for name, values in random_weights(LLAMA).items()},
    )
    texts = {name: content for name, content in files.items() if "safetensors" not in name}
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    hub.repos["owner/bin"] = Repo({**texts, "pytorch_model.bin": content})
    for command in (("serve",), ("generate", "--prompt", "hello")):
        code, _, err = run(command[0], "owner/bin", *command[1:])
        assert code == 1
        assert err.splitlines()[-1] == (
            "error: owner/bin: has PyTorch files only (pytorch_model*.bin), which are not run as they are; "
            "convert it first: mlxserve convert owner/bin"
        )
    code, _, err = run("convert", "owner/bin")
    assert (code, err) == (0, "")
    assert list((tmp_path / "home" / "models").glob("bin-*/model.safetensors"))


def test_convert_takes_a_repository(hub: Hub, run: Run, tmp_path: Path) -> None:
    code, _, err = run("convert", "owner/tiny", "--bits", "8")
    assert (code, err) == (0, "")
    assert (tmp_path / "home" / "models" / "tiny-8bit" / "config.json").is_file()
    code, _, err = run("convert", "owner/none")
    assert (code, err.count("\n")) == (1, 1)


def test_damaged_weights_on_the_hub_are_named(hub: Hub, run: Run, files: dict[str, bytes]) -> None:
    hub.repos["owner/tiny"].files[WEIGHTS] = files[WEIGHTS][:-100]
    code, _, err = run("pull", "owner/tiny")
    assert code == 1
    assert WEIGHTS in err
    assert "truncated" in err


def test_a_killed_pull_goes_on_by_the_command_line(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub.stall.add(WEIGHTS)
    command = [sys.executable, "-m", "mlxserve", "pull", "owner/tiny"]
    process = subprocess.Popen(command, env=environment(hub, tmp_path), stderr=subprocess.DEVNULL)
    blobs = tmp_path / "cache" / "models--owner--tiny" / "blobs"
    partial = blobs / f"{sha256(files[WEIGHTS])}.incomplete"
    deadline = time.monotonic() + 60
    while not (partial.is_file() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert resolve("owner/tiny").path is None
    hub.stall.clear()
    hub.ranges.clear()
    done = subprocess.run(
        command, env=environment(hub, tmp_path, HF_TOKEN="x"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(hub.ranges) == 1
    assert (Path(done.stdout.split(" is at ")[1].strip()) / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_generate_runs_from_a_repository(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlxserve", "generate", "owner/tiny", "-p", "hello", "--max-tokens", "3"]
    done = subprocess.run(
        command, env=environment(hub, tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", RepoReference("a/b")),
        ("a/b@refs/pr/1", RepoReference("a/b", "refs/pr/1")),
        ("a/b@v1:x/y.gguf", RepoReference("a/b", "v1", "x/y.gguf")),
        ("a/b:y.bin", None),
        ("a/../b", None),
        ("a/b:../y.gguf", None),
        ("smollm2", None),
    ],
)
def test_names_of_repositories(text: str, expected: RepoReference | None) -> None:
    assert parse_reference(text) == expected
    assert expected is None or str(expected) == text
