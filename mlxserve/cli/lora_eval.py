"""``mlxserve lora eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxserve.cli.options import ModelArgument
from mlxserve.config import DEFAULT_MODEL
from mlxserve.errors import UsageError

_SHOWN_ANSWERS = 3


def eval_command(
    model: ModelArgument = DEFAULT_MODEL,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder with test files, or a file of rows.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Adapter to evaluate with the model.")
    ] = None,
    exact_match: Annotated[
        bool, typer.Option("--exact-match", help="Answer every prompt and compare with the row's answer.")
    ] = False,
    max_length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of an example.")] = 2048,
    mask: Annotated[
        str, typer.Option(metavar="RULE", help="What counts: last reply, all-assistant or none masked.")
    ] = "last",
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Use the first N rows alone.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a model on rows: perplexity of their answers and, with --exact-match, its own answers.

    A folder's test files are used, else its valid files.

    Example:
      mlxserve lora eval smollm2 --adapter ./adapters --data ./data --exact-match
    """
    import json as json_module

    from rich.console import Console

    from mlxserve.cli.evaluation import evaluate_rows
    from mlxserve.tuning.settings import TrainSettings, make_settings

    if data is None:
        raise UsageError("--data is missing: a folder or a file of rows to measure on")
    settings: TrainSettings = make_settings(None, {"data": data, "max_length": max_length, "mask": mask})
    console = Console(stderr=True)
    result = evaluate_rows(model, adapter, settings, exact_match=exact_match, limit=limit, console=console)
    if json:
        typer.echo(json_module.dumps(result.to_json()))
        return
    typer.echo(f"{result.num_examples} rows of {result.split}, {result.perplexity.num_tokens} tokens")
    typer.echo(f"perplexity {result.perplexity.perplexity:.4f} (loss {result.perplexity.loss:.4f})")
    if result.answers is not None:
        exact = sum(answer.is_exact for answer in result.answers)
        typer.echo(f"exact match {exact} of {len(result.answers)} ({exact / len(result.answers):.1%})")
        for answer in [answer for answer in result.answers if not answer.is_exact][:_SHOWN_ANSWERS]:
            typer.echo(f"  {answer.place}: expected {answer.expected!r}, found {answer.found!r}")
