"""Help, version and the errors of the command line itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve import __version__
from mlxserve.cli import COMMANDS
from tests.cli.conftest import Result

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., Result]


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"mlxserve {__version__}\n", "")


def test_no_arguments_print_the_help(run: Run) -> None:
    result = run()
    assert result == run("--help")
    assert result.code == 0
    assert all(f"\n  {name} " in result.out for name in COMMANDS)


GROUPS = {
    "bench": ("decode", "kernels", "kv"),
    "eval": ("perplexity", "kl"),
    "lora": ("check-data",),
}
LEAVES = [name for name in COMMANDS if name not in GROUPS]
LEAVES += [f"{group} {name}" for group, names in GROUPS.items() for name in names]


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_has_help_with_an_example(run: Run, name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert f"\n    mlxserve {name}" in result.out or f"| mlxserve {name}" in result.out
    assert result.err == ""


def test_help_does_not_import_the_engine() -> None:
    """What a shell waits for at each --help: no framework may load."""
    code = (
        "import sys\n"
        "from mlxserve.cli import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'aiohttp', 'transformers', 'tokenizers', 'huggingface_hub'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_documents_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gen_docs"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "No such command 'serv'. Did you mean 'serve'?"),
        (["serve", "--kv-bits", "4"], "No such option: --kv-bits"),
        (["--nonsense"], "No such option: --nonsense"),
        (
            ["serve", "--memory-limit", "12X"],
            "Invalid value for '--memory-limit': '12X' is not a size;"
            " write one like 12G, 800M or a number of bytes.",
        ),
        (["generate"], "Missing option '--prompt' / '-p'."),
        (["generate", "--prompt", ""], "--prompt is empty"),
        (
            ["generate", "--prompt", "a", "--raw", "--system", "b"],
            "--system needs the chat template, which --raw leaves out: give one of the two",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    run: Run, arguments: list[str], message: str
) -> None:
    assert run(*arguments) == Result(2, "", f"error: {message}\n")


@pytest.mark.parametrize("option", [["--port", "70000"], ["--parallel", "0"], ["--queue", "-1"]])
def test_a_number_out_of_range_names_its_option(run: Run, option: list[str]) -> None:
    result = run("serve", *option)
    assert result.code == 2
    assert result.err.startswith(f"error: Invalid value for '{option[0]}'")
    assert result.err.count("\n") == 1


def test_a_bad_debug_value_is_refused(run: Run) -> None:
    assert run("--version", MLXSERVE_DEBUG="yes") == Result(
        2, "", "error: MLXSERVE_DEBUG must be 0 or 1, not 'yes'\n"
    )
