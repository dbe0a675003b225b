"""``mlxserve bench`` on a tiny model: its JSON and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.tiny_models import write_tiny_model

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context=4096))


def test_decode_with_contexts_and_a_profile(run: Run, folder: str) -> None:
    arguments = ["--context", "64,1024", "--tokens", "8", "--streams", "1,2", "--repeat", "1", "--profile"]
    result = run("bench", "decode", folder, *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    shapes = [(1, 64), (2, 64), (1, 1024), (2, 1024)]
    assert [(each["streams"], each["prompt_tokens"]) for each in report["runs"]] == shapes
    assert all(each["prefill_tok_s"] is None and each["decode_tok_s"] > 0 for each in report["runs"])
    assert [(each["streams"], each["prompt_tokens"]) for each in report["profiles"]] == shapes
    # A stream that began earlier ends earlier: fewer steps have all streams.
    assert all(1 <= each["steps"] <= 7 for each in report["profiles"])
    assert report["read_gbps"] >= report["read_gbps_small_pages"] > 0


def test_decode_with_quantized_pages(run: Run, tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "model", head_dim=32))
    arguments = ["--prompt-tokens", "40", "--tokens", "8", "--streams", "2", "--repeat", "1", "--json"]
    plain, quantized = (
        json.loads(run("bench", "decode", folder, *arguments, *more).out) for more in ([], ["--kv-bits", "8"])
    )
    assert (plain["kv_bits"], quantized["kv_bits"]) == (None, 8)
    assert quantized["runs"][0]["bytes_per_token"] < plain["runs"][0]["bytes_per_token"]


def test_serve(run: Run, folder: str) -> None:
    arguments = ["--streams", "1,3", "--prompt-tokens", "40", "--tokens", "24", "--repeat", "2", "--json"]
    result = run("bench", "serve", folder, *arguments)
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    runs = report.pop("runs")
    del report["threads"], report["kernels"]
    assert report == {"model": "model", "prompt_tokens": 40, "tokens": 24, "repeat": 2}
    assert [each["streams"] for each in runs] == [1, 3]
    for each in runs:
        assert each["engine_tok_s"] > 0 and each["http_tok_s"] > 0 and each["ratio"] > 0
        assert each["tokens_per_piece"] >= 1
        for spread in (each["first_token_ms"], each["gap_ms"]):
            assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]


def test_serve_as_a_table(run: Run, folder: str) -> None:
    result = run("bench", "serve", folder, "--streams", "2", "--tokens", "16", "--repeat", "1")
    assert (result.code, result.err) == (0, "")
    assert "HTTP tok/s" in result.out


def test_serve_refuses_what_the_context_cannot_hold(run: Run, folder: str) -> None:
    result = run("bench", "serve", folder, "--streams", "1", "--prompt-tokens", "4090", "--tokens", "7")
    message = "error: 4090 prompt and 7 new tokens are more than the context holds: 4096\n"
    assert result == Result(2, "", message)


def test_serve_says_that_streams_were_too_short(run: Run, folder: str) -> None:
    arguments = ["--streams", "4", "--prompt-tokens", "600", "--tokens", "2", "--repeat", "1"]
    result = run("bench", "serve", folder, *arguments)
    message = (
        "error: 2 new tokens are too few for 4 streams of 600 prompt tokens: the first one ends before the "
        "last one has begun\n"
    )
    assert result == Result(2, "", message)


def test_serve_wants_a_real_model(run: Run, script: Callable[..., str]) -> None:
    name = script([{"match": "", "pieces": ["a"], "end": "run"}])
    result = run("bench", "serve", name)
    assert result == Result(2, "", f"error: bench needs a real model, {name} is scripted\n")


def test_kernels(run: Run) -> None:
    arguments = ["--shape", "smollm2", "--only", "rms_norm,write_pages", "--repeat", "1"]
    result = run("bench", "kernels", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert [each["kernel"] for each in report["runs"]] == ["rms_norm"] * 3 + ["write_pages"] * 3
    assert all(each["us"] > 0 for each in report["runs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "m", "--context", "8k"], "--context wants numbers such as 1,4,16, got '8k'"),
        (["decode", "m", "--context", "0"], "--context wants numbers from 1 to 1048576, got '0'"),
        (
            ["decode", "m", "--context", "64", "--against", "mlx-lm"],
            "--context and --against exclude each other: a peer computes its whole prompt",
        ),
        (["decode", "m", "--kv-bits", "5"], "--kv-bits knows 8, 4, got 5"),
        (["kernels", "--shape", "x"], "--shape knows smollm2, llama-1b, qwen3-moe, got 'x'"),
        (
            ["kernels", "--only", "softmax"],
            "--only knows quantized_matmul, linear, paged_attention, rms_norm, silu_mul, write_pages, "
            "greedy_tokens, got 'softmax'",
        ),
    ],
)
def test_wrong_options_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    assert run("bench", *arguments) == Result(2, "", f"error: {message}\n")
