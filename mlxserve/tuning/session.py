"""A whole training run: model, data, trainer, samples and report, in the order in which they can fail."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import msgspec
import psutil
from mlx.utils import tree_flatten

from mlxserve.errors import MlxserveError, UsageError
from mlxserve.models.adapter_folder import WEIGHTS
from mlxserve.text.chat_template import ChatTemplate, load_chat_template
from mlxserve.text.folder_tokenizer import FolderTokenizer, load_tokenizer
from mlxserve.tuning.batches import Batches, evaluation_batches
from mlxserve.tuning.checkpoints import Checkpoints, Saved
from mlxserve.tuning.dataset import DataRequest, Dataset, DataSummary, TrainingDataError, load_dataset
from mlxserve.tuning.lora_layers import add_low_rank, layer_kinds, load_adapter_weights
from mlxserve.tuning.memory_plan import LayerShape, MemoryPlan, plan_memory
from mlxserve.tuning.metrics import MetricsFile
from mlxserve.tuning.report import write_report
from mlxserve.tuning.rows import FieldNames
from mlxserve.tuning.sampling import prompt_ids, sample_text
from mlxserve.tuning.settings import MAY_CHANGE, TrainSettings, check_same
from mlxserve.tuning.targets import chosen_layers
from mlxserve.tuning.trainer import EvalReport, Outcome, StepReport, Trainer
from mlxserve.tuning.training_model import TrainingModel, load_training_model

_OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}
_MEMORY_SHARE = 0.9
_SAMPLE_TOKENS = 64
_MAX_SAMPLE_PROMPTS = 3


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """``resume`` is the output folder of a run (or its adapters.safetensors), which then goes on in
    ``output``. ``prompts`` are answered before and after; None: the first of the validation data."""

    folder: Path
    name: str
    output: Path
    settings: TrainSettings
    resume: Path | None = None
    prompts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is known before the first step."""

    num_steps: int
    first_step: int
    num_trained_parameters: int
    num_parameters: int
    num_layers: int
    recomputes: bool
    memory: MemoryPlan


class Watcher(Protocol):
    """Who watches a run from outside."""

    def on_data(self, summary: DataSummary) -> None: ...

    def on_plan(self, plan: RunPlan) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_eval(self, report: EvalReport) -> None: ...

    def on_save(self, step: int) -> None: ...

    def on_sample(self, step: int, prompt: str, text: str) -> None: ...


def train(request: TrainRequest, watcher: Watcher, should_stop: Callable[[], bool]) -> Outcome:
    """Runs to the end, to an early stop, or until ``should_stop``; what was reached is saved in each case.

    Raises MlxserveError, before any step and with nothing written, for settings, data, model or memory that
    do not do.
    """
    settings = request.settings
    _check_output(request.output)
    checkpoints = Checkpoints(request.output)
    saved = _saved(request, checkpoints)
    tokenizer = load_tokenizer(request.folder)
    template = load_chat_template(request.folder, tokenizer)
    try:
        dataset = load_dataset(data_request(settings), tokenizer, template)
    except TrainingDataError as error:
        watcher.on_data(error.summary)
        raise
    watcher.on_data(dataset.summary)
    batches = Batches(
        dataset.train,
        batch_size=settings.batch_size,
        max_length=settings.max_length,
        pack=settings.pack,
        seed=settings.seed,
    )
    valid = evaluation_batches(
        dataset.valid,
        batch_size=settings.batch_size,
        max_length=settings.max_length,
        pack=settings.pack,
        limit=settings.eval_batches,
        seed=settings.seed,
    )
    num_steps, is_new_stage = _stage(settings, batches, saved)
    if saved is not None:
        batches.seek(saved.progress["progress"]["data"])
    model = load_training_model(request.folder)
    paths = prepare_model(model, settings)
    if saved is not None:
        load_adapter_weights(model.module, saved.weights, str(request.resume))
    model.start()
    if settings.pack and not model.can_pack:
        raise UsageError("this architecture cannot train on packed rows: use --no-pack")
    plan = _run_plan(model, settings, batches, num_steps, saved)
    refusal = plan.memory.refusal(settings.grad_checkpoint)
    if refusal is not None:
        raise MlxserveError(refusal)
    if plan.recomputes:
        model.recompute_activations()
    watcher.on_plan(plan)
    config = adapter_config(request, model, paths)
    with contextlib.ExitStack() as stack:
        stack.enter_context(checkpoints.hold())
        if saved is None:
            # Another run may have come first.
            _saved(request, checkpoints)
        after = None if saved is None else int(saved.progress["progress"]["step"])
        metrics = MetricsFile(request.output, after_step=after)
        stack.callback(metrics.close)
        listener = _Listener(watcher, metrics)
        trainer = Trainer(
            model.module,
            model.loss,
            settings,
            num_steps,
            batches,
            valid,
            checkpoints,
            config,
            listener,
            should_stop,
        )
        if saved is not None and request.resume is not None:
            trainer.resume(saved, str(request.resume), is_new_stage=is_new_stage)
            checkpoints.adopt_best(_run_folder(request.resume))
        prompts = _prompts(request, dataset, tokenizer, template)
        if saved is None:
            _sample_all(model, tokenizer, prompts, 0, listener)
        outcome = trainer.run()
        if outcome.reason != "interrupted":
            _sample_all(model, tokenizer, prompts, outcome.step, listener)
    write_report(request.output, f"{request.name}, {settings.type}", _facts(request, plan, outcome, dataset))
    return outcome


def prepare_model(model: TrainingModel, settings: TrainSettings) -> tuple[str, ...]:
    """Makes the parameters trainable that the settings name, and nothing else; returns their layers."""
    module = model.module
    num_layers = len(module.layers)
    paths = chosen_layers(layer_kinds(module), settings.targets, num_layers, settings.layers)
    if settings.type == "full":
        module.freeze()
        modules = dict(module.named_modules())
        quantized = [path for path in paths if hasattr(modules[path], "bits")]
        if quantized:
            raise UsageError(
                f"type full cannot train {quantized[0]}, which is quantized: dequantize the model first "
                "(mlxserve convert --dequantize) or use lora"
            )
        for path in paths:
            modules[path].unfreeze()
        return paths
    add_low_rank(
        module,
        paths,
        rank=settings.rank,
        scale=settings.scale,
        dropout=settings.dropout,
        is_dora=settings.type == "dora",
        seed=settings.seed,
    )
    return paths


def adapter_config(request: TrainRequest, model: TrainingModel, paths: tuple[str, ...]) -> dict[str, Any]:
    """adapter_config.json in mlx-lm's form. ``keys`` are paths within a layer, or from the model on."""
    settings = request.settings
    keys = sorted(
        {path.split(".layers.", 1)[-1].split(".", 1)[-1] if ".layers." in path else path for path in paths}
    )
    num_layers = len(model.module.layers) if settings.layers in (None, -1) else settings.layers
    return {
        "model": request.name,
        "fine_tune_type": settings.type,
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": settings.rank,
            "scale": settings.scale,
            "dropout": settings.dropout,
            "keys": keys,
        },
        "settings": msgspec.to_builtins(settings),
    }


def data_request(settings: TrainSettings, *, valid_share: float | None = None) -> DataRequest:
    """What the settings ask for. ``valid_share`` overrides theirs."""
    if settings.data is None:
        raise UsageError("--data is missing: a folder, a file or a hub data set to train on")
    return DataRequest(
        data=settings.data,
        fields=FieldNames(
            messages=settings.messages_field,
            prompt=settings.prompt_field,
            completion=settings.completion_field,
            text=settings.text_field,
            tools=settings.tools_field,
        ),
        mask=settings.mask,
        max_length=settings.max_length,
        long_rows=settings.long_rows,
        valid_share=settings.valid_share if valid_share is None else valid_share,
        seed=settings.seed,
        skip_bad=settings.skip_bad,
    )


def _check_output(output: Path) -> None:
    """Raises UsageError for a place where no folder can be written."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"{output}: cannot be written: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"{output}: cannot be written: no permission in {place}")


def _saved(request: TrainRequest, checkpoints: Checkpoints) -> Saved | None:
    """The save to go on from. A new run never overwrites another one."""
    if request.resume is None:
        if checkpoints.has_state or (request.output / WEIGHTS).exists():
            raise UsageError(
                f"{request.output}: holds a run already; go on with it by --resume {request.output}, or "
                "choose another --output"
            )
        return None
    place = request.resume
    if not place.exists():
        raise UsageError(f"{place}: no such run to resume")
    folder = _run_folder(place)
    if folder.resolve() != request.output.resolve() and checkpoints.has_state:
        raise UsageError(
            f"{request.output}: holds another run than the one to resume, choose another --output"
        )
    return Checkpoints(folder).load()


def _run_folder(place: Path) -> Path:
    return place if place.is_dir() else place.parent


def _stage(settings: TrainSettings, batches: Batches, saved: Saved | None) -> tuple[int, bool]:
    """The optimizer steps of this stage, and whether it is a new one after a finished one.

    An unfinished run goes on to the end that it had. A finished one goes on for ``iters`` more steps.
    """
    wanted = settings.iters or batches.num_steps(settings.epochs, settings.accumulate)
    if saved is None:
        return wanted, False
    progress = saved.progress["progress"]
    last = int(progress["first_step"]) + int(saved.progress["num_steps"])
    if int(progress["step"]) >= last:
        check_same(saved.progress["settings"], settings, ignore=frozenset({"iters", "epochs"}))
        return wanted, True
    check_same(saved.progress["settings"], settings, ignore=frozenset())
    return int(saved.progress["num_steps"]), False


def _run_plan(
    model: TrainingModel, settings: TrainSettings, batches: Batches, num_steps: int, saved: Saved | None
) -> RunPlan:
    module = model.module
    trained = sum(value.size for _, value in tree_flatten(module.trainable_parameters()))
    whole = sum(_num_elements(part) for _, part in module.named_modules())
    weights = sum(value.nbytes for _, value in tree_flatten(module.parameters()))
    num_layers = len(module.layers)
    first = 0 if settings.layers in (None, -1) else num_layers - (settings.layers or 0)
    shapes = [_layer_shape(layer) for layer in module.layers[first:]]
    memory = plan_memory(
        weights=weights,
        num_trained=trained,
        optimizer_states=_OPTIMIZER_STATES[settings.optimizer],
        shapes=shapes,
        num_tokens=batches.max_positions,
        available=int(psutil.virtual_memory().available * _MEMORY_SHARE) + weights,
    )
    return RunPlan(
        num_steps=num_steps,
        first_step=0 if saved is None else int(saved.progress["progress"]["step"]),
        num_trained_parameters=trained,
        num_parameters=whole,
        num_layers=num_layers - first,
        recomputes=memory.recomputes(settings.grad_checkpoint),
        memory=memory,
    )


def _layer_shape(layer: nn.Module) -> LayerShape:
    """From the sizes of a decoder layer's linear parts; experts count once for each that a token visits."""
    sizes = {
        path.rsplit(".", 1)[-1]: _outputs(module)
        for path, module in layer.named_modules()
        if _outputs(module)
    }
    hidden = sizes.get("o_proj") or sizes.get("down_proj") or max(sizes.values(), default=0)
    queries = sizes.get("q_proj") or sizes.get("qkv_proj") or hidden
    keys_values = sizes.get("k_proj", 0) + sizes.get("v_proj", 0)
    visited = getattr(getattr(layer, "mlp", None), "top_k", 1)
    feed_forward = (sizes.get("up_proj") or sizes.get("gate_up_proj", 0) // 2 or 4 * hidden) * visited
    return LayerShape(hidden, queries, keys_values, feed_forward)


def _num_elements(module: nn.Module) -> int:
    """Of a module's own parameters; quantized weights count as what they stand for."""
    own = {name: value for name, value in module.items() if isinstance(value, mx.array)}
    if "scales" not in own:
        return sum(value.size for value in own.values())
    words = own["weight"]
    packed = words.size * 32 // module.bits
    return packed + sum(own[name].size for name in own if name not in ("weight", "scales", "biases"))


def _outputs(module: Any) -> int:
    weight = module.get("weight") if isinstance(module, nn.Module) else None
    return int(weight.shape[-2]) if isinstance(weight, mx.array) and weight.ndim >= 2 else 0


class _Listener:
    """Writes metrics and tells the watcher."""

    def __init__(self, watcher: Watcher, metrics: MetricsFile) -> None:
        self._watcher = watcher
        self._metrics = metrics

    def on_step(self, report: StepReport) -> None:
        self._metrics.add_step(report)
        self._watcher.on_step(report)

    def on_eval(self, report: EvalReport) -> None:
        self._metrics.add_eval(report)
        self._watcher.on_eval(report)

    def on_save(self, step: int) -> None:
        self._watcher.on_save(step)

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        self._metrics.add_sample(step, prompt, text)
        self._watcher.on_sample(step, prompt, text)


def _prompts(
    request: TrainRequest, dataset: Dataset, tokenizer: FolderTokenizer, template: ChatTemplate | None
) -> list[tuple[str, tuple[int, ...]]]:
    """What is answered before and after, as text and tokens: given prompts, or beginnings of rows."""
    if request.prompts is not None:
        return [(prompt, prompt_ids(tokenizer, template, prompt)) for prompt in request.prompts]
    found = []
    for example in (dataset.valid or dataset.train)[:_MAX_SAMPLE_PROMPTS]:
        first = next((i for i, is_trained in enumerate(example.is_trained) if is_trained), 0)
        ids = example.token_ids[: max(first, 1)]
        found.append((tokenizer.decode(list(ids)), ids))
    return found


def _sample_all(
    model: TrainingModel,
    tokenizer: FolderTokenizer,
    prompts: list[tuple[str, tuple[int, ...]]],
    step: int,
    listener: _Listener,
) -> None:
    for prompt, ids in prompts:
        text = sample_text(model, tokenizer, ids, max_tokens=_SAMPLE_TOKENS)
        listener.on_sample(step, prompt, text)


def _facts(request: TrainRequest, plan: RunPlan, outcome: Outcome, dataset: Dataset) -> dict[str, Any]:
    settings = request.settings
    facts: dict[str, Any] = {
        "model": request.name,
        "type": settings.type,
        "trained parameters": f"{plan.num_trained_parameters:,} of {plan.num_parameters:,}",
        "examples": f"{len(dataset.train)} train, {len(dataset.valid)} valid",
        "steps": f"{outcome.step} ({outcome.reason})",
        "last loss": "none" if outcome.last_loss is None else f"{outcome.last_loss:.4f}",
    }
    if outcome.best_loss is not None:
        facts["best validation loss"] = f"{outcome.best_loss:.4f} at step {outcome.best_step}"
    shown = msgspec.to_builtins(settings)
    return facts | {
        name: value for name, value in shown.items() if value is not None and name not in MAY_CHANGE
    }
