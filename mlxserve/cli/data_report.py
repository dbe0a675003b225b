"""What was found in training data, for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import typer

from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.tuning.dataset import DataSummary, Problem, SplitSummary
from mlxserve.tuning.examples import Example

MAX_SHOWN = 20
"""Rows listed of each sort; the others are counted."""

_COLUMNS = ("", "ROWS", "BAD", "SKIPPED", "CUT", "TOKENS", "TRAINED", "MASKED", "LONGEST")


def print_summary(summary: DataSummary) -> None:
    """Rows and tokens of each split, then what is worth knowing. On stdout."""
    kind = "no readable row" if summary.kind is None else f"rows of {summary.kind}"
    typer.echo(f"{kind}; lengths are in tokens")
    table = [_COLUMNS, *(_line(name, split) for name, split in summary.splits.items())]
    widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
    for name, *cells in table:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        typer.echo("  ".join((name.ljust(widths[0]), *numbers)))
    for note in summary.notes:
        typer.echo(f"note: {note}")


def _line(name: str, split: SplitSummary) -> tuple[str, ...]:
    longest = f"{split.longest} ({split.longest_place})" if split.longest_place else "-"
    counts = (split.num_rows, split.num_bad, split.num_skipped, split.num_cut, split.num_tokens)
    return (name, *map(str, counts), str(split.num_trained), f"{split.masked_share:.1%}", longest)


def print_problems(summary: DataSummary) -> None:
    """Bad and skipped rows by file and line, the first of each. On stderr."""
    _print_some("bad", summary.bad, summary.num_bad)
    _print_some("skipped", summary.skipped, summary.num_skipped)


def _print_some(word: str, problems: Sequence[Problem], count: int) -> None:
    for problem in problems[:MAX_SHOWN]:
        typer.echo(f"{word}: {problem}", err=True)
    if count > MAX_SHOWN:
        typer.echo(f"{word}: … and {count - MAX_SHOWN} more rows (--json lists the first 1000)", err=True)


def summary_object(summary: DataSummary) -> dict[str, Any]:
    return {
        "kind": summary.kind,
        "splits": {
            name: {
                "rows": split.num_rows,
                "bad": split.num_bad,
                "skipped": split.num_skipped,
                "cut": split.num_cut,
                "examples": split.num_examples,
                "tokens": split.num_tokens,
                "trained": split.num_trained,
                "masked_share": split.masked_share,
                "longest": split.longest,
                "longest_place": split.longest_place,
            }
            for name, split in summary.splits.items()
        },
        "bad": [{"place": problem.place, "reason": problem.reason} for problem in summary.bad],
        "skipped": [{"place": problem.place, "reason": problem.reason} for problem in summary.skipped],
        "notes": summary.notes,
    }


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an example's text that is trained, or is not."""

    text: str
    is_trained: bool


def parts_of(example: Example, tokenizer: FolderTokenizer) -> list[Part]:
    """The text of an example, control tokens by name, in stretches."""
    controls = {
        ids[0]: text
        for text in tokenizer.control_tokens
        if len(ids := tokenizer.encode(text, add_special_tokens=False)) == 1
    }
    pairs = zip(example.token_ids, example.is_trained, strict=True)
    return [
        Part("".join(_texts([token_id for token_id, _ in run], controls, tokenizer)), is_trained)
        for is_trained, run in groupby(pairs, key=lambda pair: pair[1])
    ]


def _texts(ids: Sequence[int], controls: dict[int, str], tokenizer: FolderTokenizer) -> Iterator[str]:
    for is_control, run in groupby(ids, key=controls.__contains__):
        if is_control:
            yield from (controls[token_id] for token_id in run)
        else:
            yield tokenizer.decode([*run])


def print_example(example: Example, tokenizer: FolderTokenizer) -> None:
    """An example's text, what is trained in ⟦ ⟧ and in colour."""
    count = len(example.token_ids)
    typer.echo(f"\n{example.place}: {example.num_trained} of {count} tokens are trained, those in ⟦ ⟧")
    for part in parts_of(example, tokenizer):
        if part.is_trained:
            typer.secho(f"⟦{part.text}⟧", fg="green", nl=False)
        else:
            typer.echo(part.text, nl=False)
    typer.echo()
