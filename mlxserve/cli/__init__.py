"""The ``mlxserve`` command: one module a command, each imported only when it is wanted.

``mlxserve --help`` and ``--version`` never import mlx: command modules hold a signature and import
the rest inside their function. Exit codes: 0 done, 1 failed, 2 wrong command line, 130 interrupted.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from mlxserve import __version__
from mlxserve.cli.process import end_process
from mlxserve.config import is_debug
from mlxserve.errors import MlxserveError, UsageError

COMMANDS = (
    "serve",
    "chat",
    "generate",
    "convert",
    "lora",
    "pull",
    "list",
    "show",
    "rm",
    "bench",
    "fit",
    "eval",
    "doctor",
)
"""Command names in the order of the help. ``mlxserve.cli.<name>`` holds ``<name>_command``, or, for a
command with commands of its own, a ``typer.Typer`` named ``<name>_app``."""

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main() -> NoReturn:
    """Entry point of the installed script."""
    end_process(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Every failure is one line on stderr."""
    try:
        is_debug()
        command = typer.main.get_command(build_app(argv))
        return command.main([*argv] or ["--help"], prog_name="mlxserve", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except SystemExit as end:  # SIGTERM, see StopSignals
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except MlxserveError as error:
        return _fail(str(error), EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    except Exception as error:  # noqa: BLE001 - the last resort: a user gets a line, not a traceback
        if is_debug():
            traceback.print_exc()
        hint = "" if is_debug() else " (run with MLXSERVE_DEBUG=1 for the traceback)"
        return _fail(f"{type(error).__name__}: {error}{hint}", EXIT_FAILED)


def build_app(argv: Sequence[str]) -> typer.Typer:
    """The app with the one command that ``argv`` names, or with all of them (help, a misspelt name)."""
    app = typer.Typer(
        name="mlxserve",
        add_completion=False,
        rich_markup_mode=None,
        context_settings=HELP_FLAGS,
    )
    app.callback()(_root)
    for name in [argv[0]] if argv and argv[0] in COMMANDS else COMMANDS:
        _register(app, name)
    return app


def _register(app: typer.Typer, name: str) -> None:
    module = import_module(f"mlxserve.cli.{name}")
    group: typer.Typer | None = getattr(module, f"{name}_app", None)
    if group is not None:
        group.rich_markup_mode = None
        for registered in group.registered_commands:
            registered.help = help_text(registered.callback)
            registered.short_help = summary(registered.callback)
            registered.context_settings = HELP_FLAGS
        app.add_typer(group, name=name, context_settings=HELP_FLAGS)
        return
    function: Callable[..., Any] = getattr(module, f"{name}_command")
    app.command(name, help=help_text(function), short_help=summary(function), context_settings=HELP_FLAGS)(
        function
    )


def help_text(function: Callable[..., Any] | None) -> str:
    """A command's docstring for the terminal: paragraphs that begin with "Example" keep their lines."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(f"\b\n{part}" if part.startswith("Example") else part for part in paragraphs)


def summary(function: Callable[..., Any] | None) -> str:
    """The first sentence of a command's docstring, for the list of commands."""
    return (
        (inspect.getdoc(function) or "")
        .partition("\n\n")[0]
        .replace("\n", " ")
        .partition(". ")[0]
        .rstrip(".")
    )


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"mlxserve {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Convert models and serve them to every tool that speaks OpenAI's API, with MLX.

    MODEL is a built-in name (smollm2), a folder, a .gguf file or a Hugging Face repo id.
    """


def _fail(message: str, exit_code: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return exit_code
