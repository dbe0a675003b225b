"""The training loop: batches in, parameters changed, reports and saves out.

One process trains one model, on the thread that owns mlx. Everything that decides the next step is in
``Progress``, the optimizer and mlx's random state, and all of it is saved: a run that goes on gives what it
would have given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxserve.errors import MlxserveError
from mlxserve.tuning.checkpoints import Checkpoints, Saved
from mlxserve.tuning.lora_layers import adapter_weights, load_adapter_weights
from mlxserve.tuning.settings import LearningRate, TrainSettings

_RANDOM = "random_state"
_CACHE_BYTES = 1 << 30
"""Of freed arrays that mlx may keep between steps."""

Loss = Callable[[nn.Module, Any], tuple[mx.array, mx.array]]
"""The summed loss of a batch and the sum of its tokens' weights, both scalars."""


class TrainingDivergedError(MlxserveError):
    """The loss is not a number any more."""

    code = "training_diverged"


class BatchSource(Protocol):
    """Batches without end, in an order that its position decides."""

    def next(self) -> Any:
        """The next batch."""

    def position(self) -> dict[str, Any]:
        """Plain JSON from which ``seek`` goes on."""

    def seek(self, position: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """Of one optimizer step. ``loss`` is the mean over its ``num_trained`` tokens; ``num_tokens`` also counts
    those that are masked, not padding. ``gradient_norm`` is that before clipping."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    num_trained: int
    num_tokens: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class EvalReport:
    step: int
    loss: float
    num_trained: int
    seconds: float
    is_best: bool


class Listener(Protocol):
    """Who watches a run."""

    def on_step(self, report: StepReport) -> None: ...

    def on_eval(self, report: EvalReport) -> None: ...

    def on_save(self, step: int) -> None: ...


@dataclass(slots=True)
class Progress:
    """Where a run is: ``step`` optimizer steps are done, this stage's schedule began at ``first_step``."""

    step: int = 0
    first_step: int = 0
    num_trained: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    num_worse: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``reason``: finished, early (no better evaluation for so long) or interrupted."""

    reason: str
    step: int
    last_loss: float | None
    best_loss: float | None
    best_step: int | None


class Trainer:
    """Trains ``model``'s trainable parameters.

    ``num_steps`` counts the optimizer steps of this stage. ``valid`` are the batches of an evaluation, none
    for no evaluation. ``config`` is written beside each save as adapter_config.json. ``should_stop`` is
    asked after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        settings: TrainSettings,
        num_steps: int,
        batches: BatchSource,
        valid: Sequence[Any],
        checkpoints: Checkpoints,
        config: dict[str, Any],
        listener: Listener,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self._settings = settings
        self._num_steps = num_steps
        self._batches = batches
        self._valid = valid
        self._checkpoints = checkpoints
        self._config = config
        self._listener = listener
        self._should_stop = should_stop
        self._loss = loss
        self._gradients = nn.value_and_grad(model, loss)
        self._rate = LearningRate(
            settings.learning_rate, settings.schedule, settings.warmup, settings.end_rate, num_steps
        )
        self._optimizer = make_optimizer(settings)
        self._optimizer.init(model.trainable_parameters())
        self.progress = Progress()
        mx.random.seed(settings.seed)

    def resume(self, saved: Saved, where: str, *, is_new_stage: bool) -> None:
        """Goes on from a save. A new stage starts its schedule where the last one ended."""
        load_adapter_weights(self.model, saved.weights, where)
        state = dict(saved.optimizer)
        _set_random_state(state.pop(_RANDOM))
        self._optimizer.state = tree_unflatten(list(state.items()))
        self.progress = msgspec.convert(saved.progress["progress"], Progress)
        if is_new_stage:
            self.progress.first_step = self.progress.step
        self._batches.seek(self.progress.data)

    def run(self) -> Outcome:
        settings = self._settings
        last = self.progress.first_step + self._num_steps
        loss: float | None = None
        reason = "finished"
        self.model.train()
        while self.progress.step < last:
            loss = self._step()
            step = self.progress.step
            if self._valid and (step % settings.eval_every == 0 or step == last):
                self._evaluate()
                if settings.patience is not None and self.progress.num_worse >= settings.patience:
                    reason = "early"
                    break
            if self._should_stop() and step < last:
                reason = "interrupted"
                break
            if step % settings.save_every == 0 and step < last:
                self.save()
        self.save()
        progress = self.progress
        return Outcome(reason, progress.step, loss, progress.best_loss, progress.best_step)

    def _step(self) -> float:
        """One optimizer step; the mean loss of its tokens."""
        settings, progress = self._settings, self.progress
        start = time.perf_counter()
        gradients: Any = None
        total, weight, num_tokens = 0.0, 0.0, 0
        for _ in range(settings.accumulate):
            batch = self._batches.next()
            (summed, weights), part = self._gradients(self.model, batch)
            gradients = part if gradients is None else tree_map(mx.add, gradients, part)
            mx.eval(summed, weights, gradients)
            total += _value(summed)
            weight += _value(weights)
            num_tokens += batch.num_tokens
        if not math.isfinite(total):
            raise TrainingDivergedError(
                f"the loss is {total} at step {progress.step + 1}: lower the learning rate "
                f"({settings.learning_rate}); the last save is kept"
            )
        gradients = tree_map(lambda gradient: gradient / weight, gradients)
        norm = _norm(gradients)
        if settings.clip is not None:
            factor = mx.minimum(1.0, settings.clip / mx.maximum(norm, 1e-12))
            gradients = tree_map(lambda gradient: gradient * factor, gradients)
        rate = self._rate.at(progress.step - progress.first_step)
        self._optimizer.learning_rate = rate
        self._optimizer.update(self.model, gradients)
        mx.eval(self.model.trainable_parameters(), self._optimizer.state, norm)
        if mx.get_cache_memory() > _CACHE_BYTES:
            mx.clear_cache()
        progress.step += 1
        progress.num_trained += int(weight)
        progress.data = self._batches.position()
        report = StepReport(
            step=progress.step,
            loss=total / weight,
            learning_rate=rate,
            gradient_norm=_value(norm),
            num_trained=int(weight),
            num_tokens=num_tokens,
            seconds=time.perf_counter() - start,
            peak_bytes=mx.get_peak_memory(),
        )
        self._listener.on_step(report)
        return report.loss

    def _evaluate(self) -> None:
        start = time.perf_counter()
        loss, weight = evaluate(self.model, self._loss, self._valid)
        progress = self.progress
        is_best = progress.best_loss is None or loss < progress.best_loss
        if is_best:
            progress.best_loss, progress.best_step, progress.num_worse = loss, progress.step, 0
            self._checkpoints.save_best(adapter_weights(self.model), self._config)
        else:
            progress.num_worse += 1
        seconds = time.perf_counter() - start
        self._listener.on_eval(EvalReport(progress.step, loss, weight, seconds, is_best))

    def save(self) -> None:
        state = dict(tree_flatten(self._optimizer.state))
        state[_RANDOM] = _random_state()[0]
        progress = {
            "progress": msgspec.to_builtins(self.progress),
            "settings": msgspec.to_builtins(self._settings),
            "num_steps": self._num_steps,
        }
        self._checkpoints.save(Saved(adapter_weights(self.model), state, progress), self._config)
        self._listener.on_save(self.progress.step)


def evaluate(model: nn.Module, loss: Loss, batches: Sequence[Any]) -> tuple[float, int]:
    """The mean loss over all trained tokens of some batches, without dropout, and how many these are."""
    model.eval()
    total, weight = 0.0, 0.0
    for batch in batches:
        summed, weights = loss(model, batch)
        mx.eval(summed, weights)
        total += _value(summed)
        weight += _value(weights)
    model.train()
    return total / max(weight, 1.0), int(weight)


def make_optimizer(settings: TrainSettings) -> Any:
    """AdamW (https://arxiv.org/abs/1711.05101, bias corrected) or plain SGD."""
    if settings.optimizer == "adamw":
        return optimizers.AdamW(
            settings.learning_rate,
            betas=list(settings.betas),
            weight_decay=settings.weight_decay,
            bias_correction=True,
        )
    return optimizers.SGD(
        settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def _value(scalar: mx.array) -> float:
    return float(np.array(scalar))


def _random_state() -> Any:
    return mx.random.state


def _set_random_state(key: mx.array) -> None:
    """mlx only takes a seed, whose two halves are the key."""
    high, low = np.array(key).tolist()
    mx.random.seed((high << 32) | low)


def _norm(gradients: Any) -> mx.array:
    squares = [mx.sum(mx.square(value.astype(mx.float32))) for _, value in tree_flatten(gradients)]
    return mx.sqrt(mx.sum(mx.stack(squares)))
