"""``mlxserve lora check-data``: what training would see, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mlxserve.cli.data_options import (
    CompletionField,
    Data,
    DataSeed,
    LongRowsChoice,
    LongRowsOption,
    MaskChoice,
    MaskOption,
    MaxLength,
    MessagesField,
    PromptField,
    SkipBad,
    TextField,
    ToolsField,
    ValidShare,
)
from mlxserve.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxserve.text.folder_tokenizer import FolderTokenizer
    from mlxserve.tuning.dataset import DataRequest, DataSummary
    from mlxserve.tuning.examples import Example


def check_data_command(
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model that is to be trained.")
    ] = DEFAULT_MODEL,
    data: Data,
    messages_field: MessagesField = None,
    prompt_field: PromptField = None,
    completion_field: CompletionField = None,
    text_field: TextField = None,
    tools_field: ToolsField = None,
    mask: MaskOption = MaskChoice.last,
    max_length: MaxLength = 2048,
    long_rows: LongRowsOption = LongRowsChoice.cut,
    valid_share: ValidShare = 0.05,
    seed: DataSeed = 0,
    skip_bad: SkipBad = False,
    show: Annotated[int, typer.Option(metavar="N", min=0, help="Print the first rows as trained.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check training data and show what would be trained. Exit code 1 when a row is bad.

    Every bad row is named by file and line. The rows shown have what is trained in brackets.

    Example:
      mlxserve lora check-data smollm2 --data ./my-data
      mlxserve lora check-data smollm2 --data qa.csv --prompt-field question --completion-field answer
    """
    from dataclasses import replace

    from rich.console import Console

    from mlxserve.cli.model_source import prepare_model
    from mlxserve.errors import UsageError
    from mlxserve.text.chat_template import load_chat_template
    from mlxserve.text.tokenizer import load_tokenizer
    from mlxserve.tuning.dataset import DataRequest, TrainingDataError, load_dataset
    from mlxserve.tuning.rows import FieldNames

    request = DataRequest(
        data,
        FieldNames(messages_field, prompt_field, completion_field, text_field, tools_field),
        mask.value,
        max_length,
        long_rows.value,
        valid_share,
        seed,
        skip_bad,
    )
    console = Console(stderr=True)
    source = prepare_model(model, console=console)
    if source.kind == "scripted":
        raise UsageError(f"{model} is a scripted model, it cannot be trained")
    tokenizer = load_tokenizer(source.path)
    template = load_chat_template(source.path, tokenizer)
    examples: Sequence[Example] = ()
    failure: TrainingDataError | None = None
    try:
        with console.status("Reading the data"):
            found = load_dataset(replace(request, skip_bad=True), tokenizer, template)
        summary, examples = found.summary, found.train[:show]
    except TrainingDataError as error:
        summary, failure = error.summary, error
    _print_json(request, summary, examples, tokenizer) if as_json else _print_text(
        summary, examples, tokenizer
    )
    if failure is not None:
        raise failure
    if summary.num_bad and not skip_bad:
        raise typer.Exit(1)


def _print_text(summary: DataSummary, examples: Sequence[Example], tokenizer: FolderTokenizer) -> None:
    from mlxserve.cli.data_report import print_example, print_problems, print_summary

    print_problems(summary)
    print_summary(summary)
    for example in examples:
        print_example(example, tokenizer)


def _print_json(
    request: DataRequest, summary: DataSummary, examples: Sequence[Example], tokenizer: FolderTokenizer
) -> None:
    import json

    from mlxserve.cli.data_report import parts_of, summary_object

    samples = [
        {
            "place": example.place,
            "tokens": len(example.token_ids),
            "parts": [
                {"text": part.text, "trained": part.is_trained} for part in parts_of(example, tokenizer)
            ],
        }
        for example in examples
    ]
    value = {
        "data": request.data,
        "mask": request.mask,
        "max_length": request.max_length,
        "long_rows": request.long_rows,
        **summary_object(summary),
        "samples": samples,
    }
    typer.echo(json.dumps(value, ensure_ascii=False))
