"""Where a decode step's time goes on the engine thread. For benchmarks: it wraps the parts of one engine
from outside, and takes the wraps off again; nothing of it is there when the engine serves."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve.engine import runner
from mlxserve.engine.core import EngineCore
from mlxserve.text.tokenizer import Tokenizer

PARTS = {
    "schedule_ms": "scheduler: which tokens run",
    "inputs_ms": "index arrays of the step",
    "graph_ms": "graph of the forward",
    "sample_ms": "graph of the sampling",
    "launch_ms": "handing the graph to MLX (async_eval; waits when MLX is too far ahead)",
    "wait_ms": "waiting for the kernels",
    "commit_ms": "samples to the scheduler",
    "other_ms": "the rest of the step",
}
"""The parts of a step in order; together they are ``step_ms``."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Medians over the steps in which all streams decode, in milliseconds a step. ``host_ms`` is what Python
    and MLX's graph cost: the step without the waiting. ``detokenize_ms`` is the event loop's cost a token."""

    num_steps: int
    step_ms: float
    host_ms: float
    parts: dict[str, float]
    detokenize_ms: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.num_steps,
            "step_ms": self.step_ms,
            "host_ms": self.host_ms,
            **self.parts,
            "detokenize_ms": self.detokenize_ms,
        }


class StepTimer:
    """Times the steps of one core while ``attached``."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._now: defaultdict[str, float] = defaultdict(float)
        self._steps: list[dict[str, float]] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The core's parts are wrapped inside this, and MLX's two calls with them."""
        core: Any = self._core
        places: list[tuple[Any, str, str]] = [
            (core._scheduler, "schedule", "schedule_ms"),
            (core._scheduler, "commit", "commit_ms"),
            (core._target, "forward", "graph_ms"),
            (core._runner._arrays, "build", "inputs_ms"),
            (runner, "sample", "sample_ms"),
            (mx, "async_eval", "launch_ms"),
            (mx, "eval", "wait_ms"),
        ]
        before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
        step = core.step
        for owner, name, part in places:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        core.step = lambda: self._step(step)
        try:
            yield
        finally:
            del core.step
            for owner, name, own in before:
                if own is None:
                    # It was a method of the class.
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._now[part] += time.perf_counter() - started

        return timed

    def _step(self, step: Callable[[], Any]) -> Any:
        self._now.clear()
        started = time.perf_counter()
        outputs = step()
        whole = time.perf_counter() - started
        known = {part: self._now[part] for part in PARTS if part != "other_ms"}
        self._steps.append({**known, "other_ms": whole - sum(known.values()), "step_ms": whole})
        return outputs

    def profile(self, num_steps: int, detokenize_ms: float | None) -> StepProfile:
        """Of the last ``num_steps`` steps."""
        steps = self._steps[-num_steps:]
        waits = ("wait_ms",)
        host = [step["step_ms"] - sum(step[part] for part in waits) for step in steps]
        return StepProfile(
            num_steps=len(steps),
            step_ms=_median_ms([step["step_ms"] for step in steps]),
            host_ms=_median_ms(host),
            parts={part: _median_ms([step[part] for step in steps]) for part in PARTS},
            detokenize_ms=detokenize_ms,
        )


def detokenize_ms(tokenizer: Tokenizer, token_ids: list[int]) -> float:
    """Milliseconds that the detokenizer takes for one token, the median over ``token_ids``."""
    detokenizer = tokenizer.detokenizer()
    times = []
    for token in token_ids:
        started = time.perf_counter()
        detokenizer.push(token)
        times.append(time.perf_counter() - started)
    return _median_ms(times)


def _median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3
