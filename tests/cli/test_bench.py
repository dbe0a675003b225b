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
