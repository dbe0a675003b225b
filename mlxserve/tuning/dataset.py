"""From ``--data`` to examples: what was found, what is wrong with it, and what training will see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mlxserve.errors import MlxserveError, UsageError
from mlxserve.text.chat_template import ChatTemplate
from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.tuning.data_files import RawRow, find_data, read_rows
from mlxserve.tuning.examples import Example
from mlxserve.tuning.masking import ExampleMaker, LongRows, Mask, fit
from mlxserve.tuning.rows import (
    BadRowError,
    FieldNames,
    Row,
    RowKind,
    RowReader,
    TextRow,
    asked_kinds,
    make_reader,
)

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

MAX_KEPT_PROBLEMS = 1000
"""Problems beyond these are counted only."""


class TrainingDataError(MlxserveError):
    """Data that cannot be trained on. ``summary`` is what was found where reading got that far."""

    code = "training_data_error"

    def __init__(self, message: str, summary: DataSummary | None = None) -> None:
        super().__init__(message)
        self.summary = summary


@dataclass(frozen=True, slots=True)
class DataRequest:
    """``data`` is a folder, a file or a hub data set. ``valid_share`` of the train rows are held out, drawn
    by ``seed``, where there are no valid files; 0 for none. ``skip_bad`` leaves bad rows out instead of
    refusing the data."""

    data: str
    fields: FieldNames = field(default_factory=FieldNames)
    mask: Mask = "last"
    max_length: int = 2048
    long_rows: LongRows = "cut"
    valid_share: float = 0.05
    seed: int = 0
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UsageError(f"the maximal length must be at least 2 tokens, not {self.max_length}")
        if not 0 <= self.valid_share < 1:
            raise UsageError(f"the share held out must be at least 0 and less than 1, not {self.valid_share}")
        kinds = asked_kinds(self.fields)
        if len(kinds) > 1:
            raise UsageError(f"the named fields are of several kinds of rows: {', '.join(sorted(kinds))}")


@dataclass(frozen=True, slots=True)
class Problem:
    """``place`` is "file:line" (of a parquet file "file:row")."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(slots=True)
class SplitSummary:
    """``num_rows`` were read, good or bad; ``num_examples`` of them are used. ``num_skipped`` are good rows
    that are left out: over the maximal length by the rule "skip", or with nothing to train. ``longest`` is
    in tokens, before anything was cut."""

    num_rows: int = 0
    num_bad: int = 0
    num_skipped: int = 0
    num_cut: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    longest: int = 0
    longest_place: str = ""

    @property
    def masked_share(self) -> float:
        """Of the tokens of the examples, those that are not trained."""
        return 1 - self.num_trained / self.num_tokens if self.num_tokens else 0.0


@dataclass(slots=True)
class DataSummary:
    """``bad`` and ``skipped`` list the first MAX_KEPT_PROBLEMS rows of each sort; the splits count all."""

    kind: RowKind | None = None
    splits: dict[SplitName, SplitSummary] = field(default_factory=dict)
    bad: list[Problem] = field(default_factory=list)
    skipped: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        return sum(split.num_bad for split in self.splits.values())

    @property
    def num_skipped(self) -> int:
        return sum(split.num_skipped for split in self.splits.values())


@dataclass(frozen=True, slots=True)
class Dataset:
    train: list[Example]
    valid: list[Example]
    test: list[Example]
    summary: DataSummary


@dataclass(frozen=True, slots=True)
class _Placed:
    place: str
    row: Row


def load_dataset(
    request: DataRequest,
    tokenizer: FolderTokenizer,
    template: ChatTemplate | None,
    on_rows: Callable[[int], None] = lambda num_rows: None,
) -> Dataset:
    """Reads, checks and encodes everything. ``on_rows`` hears how many rows are encoded.

    Raises TrainingDataError for bad rows (unless they are skipped) and when nothing is left to train on,
    UsageError for a ``data`` that names nothing.
    """
    loader = _Loader(request, ExampleMaker(tokenizer, template, request.mask), tokenizer.bos_id, on_rows)
    return loader.load()


class _Loader:
    def __init__(
        self,
        request: DataRequest,
        maker: ExampleMaker,
        bos_id: int | None,
        on_rows: Callable[[int], None],
    ) -> None:
        self._request = request
        self._maker = maker
        self._bos_id = bos_id
        self._on_rows = on_rows
        self._num_encoded = 0
        self._reader: RowReader | None = None
        self._summary = DataSummary()

    def load(self) -> Dataset:
        summary = self._summary
        files = find_data(self._request.data)
        rows: dict[SplitName, list[_Placed]] = {}
        for name in SPLITS:
            if files[name]:
                summary.splits[name] = SplitSummary()
                rows[name] = [row for path in files[name] for row in self._read(name, read_rows(path))]
        if "valid" not in rows:
            self._hold_out(rows)
        examples = {name: self._encode(name, placed) for name, placed in rows.items()}
        self._note_whole_texts(rows)
        if self._maker.num_ended:
            summary.notes.append(
                f"the chat template ends no reply: {self._maker.num_ended} rows got an end token behind it"
            )
        if summary.num_bad and not self._request.skip_bad:
            raise TrainingDataError(self._bad_rows(), summary)
        if not examples.get("train"):
            raise TrainingDataError(self._nothing_left(), summary)
        return Dataset(examples["train"], examples.get("valid", []), examples.get("test", []), summary)

    def _read(self, name: SplitName, raw_rows: Iterable[RawRow]) -> list[_Placed]:
        split = self._summary.splits[name]
        placed = []
        for raw in raw_rows:
            split.num_rows += 1
            try:
                placed.append(_Placed(raw.place, self._row(raw)))
            except BadRowError as error:
                self._report_bad(split, raw.place, str(error))
        return placed

    def _row(self, raw: RawRow) -> Row:
        if raw.value is None:
            raise BadRowError(raw.problem)
        if self._reader is None:
            self._reader = make_reader(raw.value, self._request.fields)
            self._summary.kind = self._reader.kind
        return self._reader.read(raw.value)

    def _report_bad(self, split: SplitSummary, place: str, reason: str) -> None:
        split.num_bad += 1
        if len(self._summary.bad) < MAX_KEPT_PROBLEMS:
            self._summary.bad.append(Problem(place, reason))

    def _report_skipped(self, split: SplitSummary, place: str, reason: str) -> None:
        split.num_skipped += 1
        if len(self._summary.skipped) < MAX_KEPT_PROBLEMS:
            self._summary.skipped.append(Problem(place, reason))

    def _hold_out(self, rows: dict[SplitName, list[_Placed]]) -> None:
        """Moves a share of the train rows to valid; both keep the order of the file."""
        train, share = rows.get("train", []), self._request.valid_share
        if share == 0 or len(train) < 2:
            self._summary.notes.append("no validation rows: there is no valid file and nothing was held out")
            return
        count = min(max(round(len(train) * share), 1), len(train) - 1)
        order = np.random.RandomState(np.random.MT19937(self._request.seed)).permutation(len(train))
        held = set(order[:count].tolist())
        rows["valid"] = [row for i, row in enumerate(train) if i in held]
        rows["train"] = [row for i, row in enumerate(train) if i not in held]
        self._summary.splits["train"].num_rows -= count
        self._summary.splits["valid"] = SplitSummary(num_rows=count)
        self._summary.notes.append(
            f"no valid file: {count} of {len(train)} train rows are held out for validation "
            f"(share {share:g}, seed {self._request.seed})"
        )

    def _encode(self, name: SplitName, placed: Sequence[_Placed]) -> list[Example]:
        split, request = self._summary.splits[name], self._request
        examples = []
        for row in placed:
            self._num_encoded += 1
            self._on_rows(self._num_encoded)
            try:
                whole = self._maker.make(row.row, row.place)
            except BadRowError as error:
                self._report_bad(split, row.place, str(error))
                continue
            length = len(whole.token_ids)
            if length > split.longest:
                split.longest, split.longest_place = length, row.place
            example = fit(whole, request.max_length, request.long_rows, self._bos_id)
            if example is None:
                self._report_skipped(
                    split, row.place, f"has {length} tokens, over the limit of {request.max_length}"
                )
            elif not example.num_trained:
                self._report_skipped(split, row.place, _nothing_to_train(whole, example))
            else:
                examples.append(example)
                split.num_cut += len(example.token_ids) < length
                split.num_tokens += len(example.token_ids)
                split.num_trained += example.num_trained
        split.num_examples = len(examples)
        return examples

    def _note_whole_texts(self, rows: dict[SplitName, list[_Placed]]) -> None:
        is_text = any(isinstance(placed[0].row, TextRow) for placed in rows.values() if placed)
        if is_text and self._request.mask != "none":
            self._summary.notes.append("rows of text have no prompt to mask: they are trained whole")

    def _bad_rows(self) -> str:
        count, first = self._summary.num_bad, self._summary.bad[0]
        rows = "1 row is" if count == 1 else f"{count} rows are"
        return f"{rows} bad, the first {first}; --skip-bad leaves bad rows out"

    def _nothing_left(self) -> str:
        summary = self._summary
        reasons = [*summary.bad, *summary.skipped]
        first = f", the first {reasons[0]}" if reasons else ""
        return (
            f"{self._request.data}: nothing is left to train on: {summary.num_bad} rows are bad, "
            f"{summary.num_skipped} were left out{first}"
        )


def _nothing_to_train(whole: Example, example: Example) -> str:
    length = len(example.token_ids)
    if length == len(whole.token_ids):
        return "has nothing to train on"
    return f"has nothing to train on in its first {length} of {len(whole.token_ids)} tokens"
