"""An evaluation on rows of data: the training forward for perplexity, the engine for answers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console

from mlxserve.cli.model_source import prepare_model
from mlxserve.config import EngineConfig
from mlxserve.engine.served_adapters import load_adapter
from mlxserve.engine.served_model import open_folder
from mlxserve.errors import UsageError
from mlxserve.models.adapter_folder import read_adapter
from mlxserve.text.chat_template import load_chat_template
from mlxserve.text.folder_tokenizer import load_tokenizer
from mlxserve.tuning.attach import attach_adapter
from mlxserve.tuning.dataset import load_measured
from mlxserve.tuning.evaluate import Answer, Perplexity, answer_all, measure_perplexity
from mlxserve.tuning.examples import Example
from mlxserve.tuning.session import data_request
from mlxserve.tuning.settings import TrainSettings
from mlxserve.tuning.training_model import load_training_model


@dataclass(frozen=True, slots=True)
class RowEvaluation:
    """``answers`` is None where none were asked for."""

    split: str
    num_examples: int
    perplexity: Perplexity
    answers: list[Answer] | None

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "split": self.split,
            "num_examples": self.num_examples,
            "loss": self.perplexity.loss,
            "perplexity": self.perplexity.perplexity,
            "num_tokens": self.perplexity.num_tokens,
        }
        if self.answers is not None:
            value["exact_match"] = sum(a.is_exact for a in self.answers) / len(self.answers)
            value["answers"] = [{**asdict(answer), "is_exact": answer.is_exact} for answer in self.answers]
        return value


def evaluate_rows(
    name: str,
    adapter: Path | None,
    settings: TrainSettings,
    *,
    exact_match: bool,
    limit: int | None,
    console: Console,
) -> RowEvaluation:
    """Raises MlxserveError for data, model or adapter that do not do."""
    prepared = prepare_model(name, console=console)
    if prepared.kind != "folder":
        raise UsageError(f"{name}: a scripted model has no perplexity")
    tokenizer = load_tokenizer(prepared.path)
    template = load_chat_template(prepared.path, tokenizer)
    split, examples, _ = load_measured(data_request(settings), tokenizer, template)
    examples = examples[:limit]
    with console.status(f"Measuring {len(examples)} rows"):
        perplexity = _perplexity(prepared.path, adapter, examples, settings.max_length)
    answers = None
    if exact_match:
        with console.status(f"Answering {len(examples)} rows"):
            answers = asyncio.run(_answers(prepared.path, prepared.id, adapter, examples))
    return RowEvaluation(split, len(examples), perplexity, answers)


def _perplexity(folder: Path, adapter: Path | None, examples: list[Example], max_length: int) -> Perplexity:
    model = load_training_model(folder)
    if adapter is not None:
        attach_adapter(model.module, read_adapter(adapter))
    model.start()
    result = measure_perplexity(model, examples, max_length)
    del model
    mx.clear_cache()
    return result


async def _answers(
    folder: Path, model_id: str, adapter: Path | None, examples: list[Example]
) -> list[Answer]:
    model = open_folder(folder, model_id, EngineConfig())
    try:
        chosen = model if adapter is None else load_adapter(model, "evaluated", adapter)
        return await answer_all(chosen, examples)
    finally:
        await model.close()
