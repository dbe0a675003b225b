"""``generate`` and ``chat`` on scripted models, as real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from tests.cli.conftest import Result, Starter

Run = Callable[..., Result]
Script = Callable[..., str]

TOWN: list[dict[str, object]] = [
    {"match": "harbour", "pieces": ["Cape", " Town", " ", {"hex": "f09f"}, {"hex": "9a80"}], "end": "eos"},
    {"match": "", "pieces": ["ok", " then", "!"], "end": "eos"},
]


def test_text_to_stdout_and_figures_to_stderr(run: Run, script: Script) -> None:
    result = run("generate", script(TOWN), "--prompt", "Which harbour?")
    assert (result.code, result.out) == (0, "Cape Town 🚀\n")
    assert "prompt tokens" in result.err
    assert "6 new tokens" in result.err
    assert "tok/s" in result.err


def test_the_prompt_from_stdin(run: Run, script: Script) -> None:
    result = run("generate", script(TOWN), "--prompt", "-", stdin="a harbour\n")
    assert (result.code, result.out) == (0, "Cape Town 🚀\n")


def test_json_is_one_object(run: Run, script: Script) -> None:
    result = run("generate", script(TOWN), "--prompt", "Which harbour?", "--json")
    report = json.loads(result.out)
    assert result.err == ""
    assert report["text"] == "Cape Town 🚀"
    assert (report["model"], report["finish_reason"], report["completion_tokens"]) == ("echo", "stop", 6)
    assert set(report) == {
        "model",
        "text",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "prefill_s",
        "decode_tok_s",
    }


def test_raw_leaves_the_template_out(run: Run, script: Script) -> None:
    name = script([{"match": "", "pieces": "prompt", "end": "eos"}])
    raw = run("generate", name, "--prompt", "plain", "--raw")
    assert raw.out == "plain\n"
    assert json.loads(run("generate", name, "--prompt", "plain", "--raw", "--json").out)["prompt_tokens"] == 5
    templated = run("generate", name, "--prompt", "plain", "--system", "Be kind.")
    assert "Be kind." in templated.out
    assert "plain" in templated.out
    assert templated.out != raw.out


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        (["--max-tokens", "2"], "ok then", "length"),
        (["--stop", "then"], "ok ", "stop"),
        (["--stop", "k th"], "o", "stop"),
        (["--stop", "never", "--stop", "!"], "ok then", "stop"),
        (["--stop", "!x"], "ok then!", "stop"),
    ],
)
def test_limits_and_stop_strings(
    run: Run, script: Script, options: list[str], text: str, reason: str
) -> None:
    report = json.loads(run("generate", script(TOWN), "--prompt", "a", "--json", *options).out)
    assert (report["text"], report["finish_reason"]) == (text, reason)


def test_a_seed_repeats_the_text(run: Run, script: Script) -> None:
    name = script([{"match": "", "pieces": [{"any": ["a", "b", "c", "d"]}] * 24, "end": "eos"}])

    def text(seed: int) -> str:
        return run("generate", name, "--prompt", "x", "--temperature", "1", "--seed", str(seed)).out

    assert text(1) == text(1)
    assert len({text(1), text(2), text(3)}) > 1


def test_a_prompt_over_the_context_states_both_numbers(run: Run, script: Script) -> None:
    result = run("generate", script(TOWN, context_length=128), "--raw", "--prompt", "x" * 200)
    assert result == Result(1, "", "error: the prompt of 200 tokens does not fit the context of 128 tokens\n")


def test_more_tokens_than_the_context_holds_are_refused(run: Run, script: Script) -> None:
    result = run("generate", script(TOWN), "--raw", "--prompt", "abc", "--max-tokens", "5000")
    assert result == Result(
        1,
        "",
        "error: the prompt of 3 tokens and --max-tokens 5000 do not fit the context of 4096 tokens\n",
    )


@pytest.mark.parametrize(
    ("name", "value"), [("MLXSERVE_KERNELS", "foo"), ("MLXSERVE_THREADS", "0"), ("MLXSERVE_THREADS", "two")]
)
def test_a_bad_kernel_variable_is_one_line_and_exit_code_2(
    run: Run, script: Script, name: str, value: str
) -> None:
    result = run("generate", script(TOWN), "--prompt", "a", **{name: value})
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {name} must be ")
    assert repr(value) in result.err
    assert result.err.count("\n") == 1


def test_ctrl_c_stops_with_130_and_no_traceback(start: Starter, script: Script) -> None:
    name = script([{"match": "", "pieces": ["a"], "end": "run", "delay_ms": 20}])
    process = start("generate", name, "--prompt", "x")
    assert process.popen.stdout is not None
    assert process.popen.stdout.read(1) == "a"
    process.signal(signal.SIGINT)
    assert process.end() == 130
    assert process.lines == []


def test_chat_over_a_pipe(run: Run, script: Script) -> None:
    result = run("chat", script(TOWN), stdin="hello\n\nWhich harbour?\n")
    assert (result.code, result.out) == (0, "ok then!\nCape Town 🚀\n")


def test_chat_keeps_the_conversation_until_reset(run: Run, script: Script) -> None:
    name = script([{"match": "", "pieces": "prompt", "end": "eos"}])
    result = run("chat", name, stdin="first\nsecond\n/reset\nthird\n")
    assert result.code == 0
    assert result.out.count("first") > 1
    after = result.out.rpartition("third")[0].rpartition("second")[2]
    assert "first" not in after


def test_chat_commands(run: Run, script: Script) -> None:
    result = run("chat", script(TOWN), stdin="/help\n/nonsense\n/exit\nnever read\n")
    assert (result.code, result.out) == (0, "")
    assert "/reset" in result.err
    assert "error: no command /nonsense; /help lists them\n" in result.err


def test_chat_goes_on_after_a_message_that_does_not_fit(run: Run, script: Script) -> None:
    result = run("chat", script(TOWN, context_length=200), stdin="x" * 300 + "\nhello\n")
    assert (result.code, result.out) == (0, "ok then!\n")
    assert "does not fit the context of 200 tokens (/reset starts anew)" in result.err
