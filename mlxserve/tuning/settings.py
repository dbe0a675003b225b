"""What a training run is asked for: flags over a YAML or TOML file over defaults, checked as a whole."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from mlxserve.errors import UsageError
from mlxserve.tuning.masking import LongRows, Mask

FineTuneType = Literal["lora", "dora", "full"]
Optimizer = Literal["adamw", "sgd"]
Schedule = Literal["constant", "linear", "cosine"]
GradCheckpoint = Literal["auto", "on", "off"]

DEFAULT_SCALE = 2.0
"""``alpha / rank`` where neither is given: the field's common alpha of twice the rank."""


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a run. Raises UsageError, naming the field, its limit and its value, for what cannot be done.

    type             lora, dora (weight-decomposed), or full (every parameter of the chosen layers)
    rank, alpha      of the low-rank change ``scale * x A B``; scale = alpha / rank, with rslora
                     alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732); alpha None: twice the rank
    targets          names of layers (``q_proj``, ``self_attn.q_proj``) or presets (mlxserve.tuning.targets)
    layers           the last so many decoder layers; None: all
    iters            optimizer steps; None: as many as ``epochs`` need
    batch_size       rows of a forward; ``accumulate`` of them make one optimizer step
    data             folder, file or hub data set; ``*_field`` name the columns of its rows
                     (mlxserve.tuning.dataset, with long_rows, mask, valid_share and skip_bad)
    warmup           steps in which the learning rate rises to its value
    end_rate         share of the learning rate at the end of a linear or cosine schedule
    clip             limit of the gradient's norm, None for no limit
    patience         evaluations without a better loss after which a run ends; None: never early
    """

    type: FineTuneType = "lora"
    rank: int = 8
    alpha: float | None = None
    rslora: bool = False
    dropout: float = 0.0
    targets: tuple[str, ...] = ("linear",)
    layers: int | None = None
    iters: int | None = None
    epochs: float = 1.0
    batch_size: int = 4
    accumulate: int = 1
    data: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    messages_field: str | None = None
    text_field: str | None = None
    tools_field: str | None = None
    max_length: int = 2048
    long_rows: LongRows = "cut"
    mask: Mask = "last"
    valid_share: float = 0.05
    skip_bad: bool = False
    pack: bool = True
    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-4
    schedule: Schedule = "cosine"
    warmup: int = 0
    end_rate: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    clip: float | None = 1.0
    grad_checkpoint: GradCheckpoint = "auto"
    seed: int = 0
    eval_every: int = 100
    eval_batches: int | None = 25
    save_every: int = 100
    report_every: int = 10
    patience: int | None = None

    def __post_init__(self) -> None:
        _at_least("rank", self.rank, 1)
        _at_least("iters", self.iters, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("accumulate", self.accumulate, 1)
        _at_least("max_length", self.max_length, 2)
        _at_least("warmup", self.warmup, 0)
        _at_least("eval_every", self.eval_every, 1)
        _at_least("eval_batches", self.eval_batches, 1)
        _at_least("save_every", self.save_every, 1)
        _at_least("report_every", self.report_every, 1)
        _at_least("patience", self.patience, 1)
        _at_least("seed", self.seed, 0)
        if self.layers is not None and self.layers < 1 and self.layers != -1:
            raise UsageError(f"layers must be at least 1, or -1 for all, not {self.layers}")
        _between("dropout", self.dropout, 0, 1)
        _between("end_rate", self.end_rate, 0, 1, is_high_open=False)
        _between("momentum", self.momentum, 0, 1)
        for name, beta in zip(("first beta", "second beta"), self.betas, strict=True):
            _between(name, beta, 0, 1)
        _positive("learning_rate", self.learning_rate)
        _positive("epochs", self.epochs)
        _positive("alpha", self.alpha)
        _positive("clip", self.clip)
        if self.weight_decay < 0:
            raise UsageError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not self.targets:
            raise UsageError("targets must name at least one layer or preset")

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied with."""
        alpha = DEFAULT_SCALE * self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.rslora else self.rank)


def _at_least(name: str, value: int | None, limit: int) -> None:
    if value is not None and value < limit:
        raise UsageError(f"{name} must be at least {limit}, not {value}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise UsageError(f"{name} must be more than 0, not {value}")


def _between(name: str, value: float, low: float, high: float, *, is_high_open: bool = True) -> None:
    if not (low <= value < high or (value == high and not is_high_open)):
        end = "less than" if is_high_open else "at most"
        raise UsageError(f"{name} must be at least {low} and {end} {high}, not {value}")


MAY_CHANGE = frozenset({"eval_every", "eval_batches", "save_every", "report_every", "patience"})
"""Settings that a run which goes on may have otherwise: they change nothing in its steps."""


def check_same(saved: Mapping[str, Any], wanted: TrainSettings, *, ignore: frozenset[str]) -> None:
    """Raises UsageError, naming the setting and both values, where a run cannot go on as it began."""
    # As JSON has it, whose lists are no tuples.
    for name, value in msgspec.json.decode(msgspec.json.encode(wanted)).items():
        before = saved.get(name)
        if name not in MAY_CHANGE | ignore and before != value:
            raise UsageError(f"the run to be resumed has {name} {before!r}, it cannot go on with {value!r}")


def make_settings(file: Path | None, flags: Mapping[str, Any]) -> TrainSettings:
    """Settings of a file with flags over them; a flag that is None says nothing."""
    values = {} if file is None else read_settings(file)
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert(values, TrainSettings)
    except msgspec.ValidationError as error:
        where = "" if file is None else f"{file}: "
        raise UsageError(f"{where}{_reason(error)}") from None


def _reason(error: msgspec.ValidationError) -> str:
    text = str(error)
    return text.replace("Object contains unknown field", "there is no setting").replace(" - at `$.", ", at `")


def read_settings(path: Path) -> dict[str, Any]:
    """A YAML or TOML file as a mapping; numbers like 1e-4 are numbers in both."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8 text") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path}: {error}") from None
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: settings are read from .yaml, .yml or .toml files")
    return _read_yaml(text, path)


def _read_yaml(text: str, path: Path) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: {str(error).splitlines()[0]}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected settings by name, found a {type(value).__name__}")
    # YAML 1.1 reads 1e-4 as text.
    return {str(name): _number(item) for name, item in value.items()}


def _number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate of each step: a linear warm-up from 0, then the schedule down to ``end_rate`` of it
    at the last step."""

    peak: float
    schedule: Schedule
    warmup: int
    end_rate: float
    num_steps: int

    def at(self, step: int) -> float:
        """Of optimizer step ``step``, from 0 on."""
        from math import cos, pi

        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        if self.schedule == "constant":
            return self.peak
        progress = min((step - self.warmup) / max(self.num_steps - 1 - self.warmup, 1), 1.0)
        share = 1 - progress if self.schedule == "linear" else (1 + cos(pi * progress)) / 2
        return self.peak * (self.end_rate + (1 - self.end_rate) * share)
