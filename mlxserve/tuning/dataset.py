"""From ``--data`` to examples: what was found, what is wrong with it, and what training will see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlxserve.errors import MlxserveError, UsageError
from mlxserve.text.chat_template import ChatTemplate
from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.tuning.data_files import DataFiles, SplitName, find_data
from mlxserve.tuning.examples import Example
from mlxserve.tuning.masking import ExampleMaker, LongRows, Mask, fit
from mlxserve.tuning.raw_row import RawRow
from mlxserve.tuning.rows import (
    BadRowError,
    FieldNames,
    Row,
    RowKind,
    RowReader,
    asked_kinds,
    make_reader,
)

SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

MAX_KEPT_PROBLEMS = 1000
"""Problems beyond these are counted only."""


class TrainingDataError(MlxserveError):
    """Data that cannot be trained on. ``summary`` says what was found."""

    code = "training_data_error"

    def __init__(self, message: str, summary: DataSummary) -> None:
        super().__init__(message)
        self.summary = summary


@dataclass(frozen=True, slots=True)
class DataRequest:
    """``data`` is a folder, a file or a hub data set. ``main`` is the split that must not be empty, and that
    of a file alone. Of train, ``valid_share`` of the rows are held out, drawn by ``seed``, where there are no
    valid files; 0 for none. ``skip_bad`` leaves bad rows out instead of refusing the data."""

    data: str
    fields: FieldNames = field(default_factory=FieldNames)
    mask: Mask = "last"
    max_length: int = 2048
    long_rows: LongRows = "cut"
    valid_share: float = 0.05
    seed: int = 0
    skip_bad: bool = False
    main: SplitName = "train"

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
    of the used ones in tokens, before they were cut."""

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
class _Fitted:
    """An example within the maximal length, and how many tokens its row has."""

    example: Example
    whole_length: int


def load_dataset(
    request: DataRequest,
    tokenizer: FolderTokenizer,
    template: ChatTemplate | None,
    on_rows: Callable[[int], None] | None = None,
) -> Dataset:
    """Reads, checks and encodes everything. ``on_rows`` hears how many rows are done.

    Raises TrainingDataError for bad rows (unless they are skipped) and when nothing is left to train on,
    UsageError for a ``data`` that names nothing.
    """
    maker = ExampleMaker(tokenizer, template, request.mask)
    loader = _Loader(request, maker, tokenizer.bos_id, on_rows or _ignore)
    return loader.load(find_data(request.data, request.main), can_hold_out=request.main == "train")


def load_measured(
    request: DataRequest, tokenizer: FolderTokenizer, template: ChatTemplate | None
) -> tuple[SplitName, list[Example], DataSummary]:
    """The rows to measure a model on, and of which split they are: test, else valid, else train. The others
    are not read, and a file alone is test. Raises as load_dataset does."""
    files = find_data(request.data, None)
    split: SplitName = next(name for name in ("test", "valid", "train") if name in files.splits)
    measured = replace(request, main=split)
    loader = _Loader(measured, ExampleMaker(tokenizer, template, request.mask), tokenizer.bos_id, _ignore)
    found = loader.load(replace(files, splits={split: files.splits[split]}), can_hold_out=False)
    return split, {"train": found.train, "valid": found.valid, "test": found.test}[split], found.summary


def _ignore(num_rows: int) -> None:
    """Nobody watches."""


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
        self._num_read = 0
        self._reader: RowReader | None = None
        self._summary = DataSummary()

    def load(self, files: DataFiles, *, can_hold_out: bool) -> Dataset:
        request, summary = self._request, self._summary
        fitted = {name: self._read(name, files.rows(name)) for name in SPLITS if name in files.splits}
        if can_hold_out and "valid" not in fitted:
            self._hold_out(fitted)
        examples = {name: self._count(name, found) for name, found in fitted.items()}
        self._note_overlap(examples)
        if summary.kind == "text" and request.mask != "none":
            summary.notes.append("rows of text have no prompt to mask: they are trained whole")
        if self._maker.num_ended:
            count = self._maker.num_ended
            summary.notes.append(f"the chat template ends no reply: {rows_text(count)} got an end token")
        if summary.num_bad and not request.skip_bad:
            raise TrainingDataError(self._bad_rows(), summary)
        if not examples[request.main]:
            raise TrainingDataError(self._nothing_left(), summary)
        train, valid, test = (examples.get(name, []) for name in SPLITS)
        return Dataset(train, valid, test, summary)

    def _read(self, name: SplitName, raw_rows: Iterable[RawRow]) -> list[_Fitted]:
        split = self._summary.splits[name] = SplitSummary()
        found = []
        for raw in raw_rows:
            split.num_rows += 1
            self._num_read += 1
            self._on_rows(self._num_read)
            try:
                whole = self._maker.make(self._row(raw), raw.place)
            except BadRowError as error:
                split.num_bad += 1
                _keep(self._summary.bad, Problem(raw.place, str(error)))
                continue
            fitted = self._fitted(whole)
            if isinstance(fitted, str):
                split.num_skipped += 1
                _keep(self._summary.skipped, Problem(raw.place, fitted))
            else:
                found.append(fitted)
        return found

    def _row(self, raw: RawRow) -> Row:
        if raw.value is None:
            raise BadRowError(raw.problem)
        if self._reader is None:
            self._reader = make_reader(raw.value, self._request.fields)
            self._summary.kind = self._reader.kind
        return self._reader.read(raw.value)

    def _fitted(self, whole: Example) -> _Fitted | str:
        """The example as it is trained, or why it is not."""
        length, limit = len(whole.token_ids), self._request.max_length
        example = fit(whole, limit, self._request.long_rows, self._bos_id)
        if example is None:
            return f"has {length} tokens, over the limit of {limit}"
        if example.num_trained:
            return _Fitted(example, length)
        left = len(example.token_ids)
        return "has nothing to train on" + (
            "" if left == length else f" in its first {left} of {length} tokens"
        )

    def _hold_out(self, fitted: dict[SplitName, list[_Fitted]]) -> None:
        """Moves a share of the train rows to valid; both keep the order of the file."""
        found, share = fitted["train"], self._request.valid_share
        notes = self._summary.notes
        if share == 0 or len(found) < 2:
            why = "nothing is held out" if share == 0 else "there are too few rows to hold one out"
            notes.append(f"no validation: there is no valid file, and {why}")
            return
        count = min(max(round(len(found) * share), 1), len(found) - 1)
        order = np.random.RandomState(np.random.MT19937(self._request.seed)).permutation(len(found))
        held = set(order[:count].tolist())
        fitted["valid"] = [row for i, row in enumerate(found) if i in held]
        fitted["train"] = [row for i, row in enumerate(found) if i not in held]
        self._summary.splits["train"].num_rows -= count
        self._summary.splits["valid"] = SplitSummary(num_rows=count)
        notes.append(
            f"there is no valid file: {count} of {len(found)} train rows are held out "
            f"(share {share:g}, seed {self._request.seed})"
        )

    def _count(self, name: SplitName, fitted: Sequence[_Fitted]) -> list[Example]:
        split = self._summary.splits[name]
        for one in fitted:
            length = len(one.example.token_ids)
            split.num_examples += 1
            split.num_tokens += length
            split.num_trained += one.example.num_trained
            split.num_cut += length < one.whole_length
            if one.whole_length > split.longest:
                split.longest, split.longest_place = one.whole_length, one.example.place
        return [one.example for one in fitted]

    def _note_overlap(self, examples: dict[SplitName, list[Example]]) -> None:
        """Rows that are both trained on and measured with make a loss that says too little."""
        trained = {example.token_ids for example in examples.get("train", ())}
        for name in ("valid", "test"):
            count = sum(example.token_ids in trained for example in examples.get(name, ()))
            if count:
                self._summary.notes.append(f"{rows_text(count)} of {name} can be found in train, too")

    def _bad_rows(self) -> str:
        count, first = self._summary.num_bad, self._summary.bad[0]
        verb = "is" if count == 1 else "are"
        return f"{rows_text(count)} {verb} bad, the first {first}; --skip-bad leaves bad rows out"

    def _nothing_left(self) -> str:
        summary = self._summary
        reasons = [*summary.bad, *summary.skipped]
        first = f", the first {reasons[0]}" if reasons else ""
        return (
            f"{self._request.data}: no row of {self._request.main} is left, {summary.num_bad} bad and "
            f"{summary.num_skipped} skipped{first}"
        )


def rows_text(count: int) -> str:
    """A number of rows, in words."""
    return "1 row" if count == 1 else f"{count} rows"


def _keep(problems: list[Problem], problem: Problem) -> None:
    if len(problems) < MAX_KEPT_PROBLEMS:
        problems.append(problem)
