"""``mlxserve eval``: how well a model predicts a text, and how far it is from another model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

eval_app = typer.Typer(help="Measure how well a model predicts text.", no_args_is_help=True)

TextFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The text, UTF-8.", show_default="a lecture of Michael Faraday, 1861"),
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, help="Tokens that the model sees together.", show_default="512"),
]
Stride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens from one window to the next; a token counts in the first window that has it.",
        show_default="half the context",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, help="Use the first N tokens of the text.", show_default="all"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@eval_app.callback()
def evaluate() -> None:
    """Measure how well a model predicts text."""


@eval_app.command("perplexity")
def perplexity_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to measure.")],
    text: TextFile = None,
    context: Context = None,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a model on a text: lower is better, equal texts and windows compare.

    Example:
      mlxserve eval perplexity smollm2
      mlxserve eval perplexity ./my-model --text notes.txt --context 1024 --json
    """
    from mlxserve.cli.evaluations import Wishes, measure_perplexity

    measure_perplexity(model, Wishes(text, context, stride, max_tokens), as_json=as_json)


@eval_app.command("kl")
def kl_command(
    first: Annotated[str, typer.Argument(metavar="A", help="The model to compare with.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model to measure.")],
    text: TextFile = None,
    context: Context = None,
    stride: Stride = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Use the first N tokens of the text.")
    ] = 1024,
    as_json: AsJson = False,
) -> None:
    """Measure how far model B is from A: the mean of KL(A || B) over a text, in nats a token.

    Both must have the same tokens. One is in memory at a time; A's log-probabilities wait in a temporary
    file of 4 bytes for each token of the text and of the vocabulary.

    Example:
      mlxserve eval kl ./my-model ./my-model-4bit
    """
    from mlxserve.cli.evaluations import Wishes, measure_kl

    measure_kl(first, second, Wishes(text, context, stride, max_tokens), as_json=as_json)
