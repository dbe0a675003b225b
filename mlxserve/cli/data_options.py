"""Options that say what the training data is, shared by the commands of ``mlxserve lora``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class MaskChoice(StrEnum):
    """Spelled as mlxserve.tuning.masking.Mask."""

    last = "last"
    all_assistant = "all-assistant"
    none = "none"


class LongRowsChoice(StrEnum):
    """Spelled as mlxserve.tuning.masking.LongRows."""

    cut = "cut"
    keep_answer = "keep-answer"
    skip = "skip"


Data = Annotated[
    str,
    typer.Option(
        metavar="DATA",
        help="A folder with train, valid and test files, one file, or a hub data set (owner/name). "
        "Files are .jsonl, .json, .csv, .tsv or .parquet, also with .gz or .zst.",
    ),
]
MessagesField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field with a conversation.", show_default="messages")
]
PromptField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field with a prompt.", show_default="prompt")
]
CompletionField = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Field with the answer to the prompt.", show_default="completion"),
]
TextField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field with text to train on whole.", show_default="text")
]
ToolsField = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Field with a conversation's tools.", show_default="tools"),
]
MaskOption = Annotated[
    MaskChoice,
    typer.Option(
        "--mask",
        help="Train the last reply of a conversation, every reply that later turns leave as it was, or "
        "everything (none).",
    ),
]
MaxLength = Annotated[int, typer.Option(metavar="N", min=2, help="Most tokens of a row.")]
LongRowsOption = Annotated[
    LongRowsChoice,
    typer.Option(
        "--long-rows",
        help="Of longer rows: cut the end, cut the prompt's beginning and keep the answer, or skip them.",
    ),
]
ValidShare = Annotated[
    float,
    typer.Option(
        metavar="X",
        min=0.0,
        max=0.99,
        help="Share of the train rows to hold out where there is no valid file.",
    ),
]
DataSeed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Decides which rows these are.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out instead of stopping.")]
