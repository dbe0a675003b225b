"""What each module's bits are worth, measured on the floats of a model that fits in memory.

A quantized weight W + D changes its module's outputs by D x. To second order the divergence of the model's
predictions grows by half the sum of (g D x) ** 2 over outputs, where g are the gradients of the log
likelihood of tokens drawn from the model's own predictions: the diagonal of Fisher's information, as in
"Optimal Brain Surgeon" (Hassibi and Stork 1993) and K-FAC (Martens and Grosse 2015). Two passes over a short
text give x and g of every module; each way to quantize it is then one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.models.layers import KERNEL_CLASSES
from mlxserve_convert.rounding import quantized_rows
from mlxserve_convert.weights import Layout
from mlxserve_kernels import ops

NUM_TOKENS = 512
_SEQUENCE = 256
_MIN_SHARE = 0.05
"""Of the mean importance, which every column has: a short text does not reach all of them."""


def calibration_text() -> str:
    """A page of prose, dialogue, code, lists, letters and other languages, written for this."""
    return resources.files("mlxserve_convert").joinpath("calibration.txt").read_text("utf-8")


@dataclass(slots=True)
class _Use:
    """One call of a module: its arguments, and which of its functions it was."""

    path: str
    call: Callable[..., mx.array]
    args: tuple[Any, ...]
    gradient: mx.array | None = None


@dataclass(slots=True)
class _Recorder:
    """``probes`` are added to the outputs, in the order of the calls: their gradients are those of the
    outputs."""

    probes: list[mx.array] | None = None
    uses: list[_Use] = field(default_factory=list)
    outputs: list[mx.array] = field(default_factory=list)

    def record(self, path: str, call: Callable[..., mx.array], args: tuple[Any, ...]) -> mx.array:
        y = call(*args)
        if self.probes is not None:
            y = y + self.probes[len(self.outputs)]
        self.uses.append(_Use(path, call, args))
        self.outputs.append(y)
        return y


@contextmanager
def _recording(modules: Mapping[str, nn.Module]) -> Iterator[_Recorder]:
    """Calls of these modules are recorded inside; they change their class for that long."""
    recorder = _Recorder()
    classes = {path: type(module) for path, module in modules.items()}
    for path, module in modules.items():
        module.__class__ = _recorded_class(classes[path], path, recorder)
    try:
        yield recorder
    finally:
        for path, module in modules.items():
            module.__class__ = classes[path]


def _recorded_class(kind: Any, path: str, recorder: _Recorder) -> Any:
    class Recorded(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            return recorder.record(path, lambda *given: kind.__call__(self, *given, **kwargs), args)

        def as_linear(self, x: mx.array) -> mx.array:
            return recorder.record(path, lambda given: kind.as_linear(self, given), (x,))

    return Recorded


@dataclass(slots=True)
class Sensitivity:
    """Of one module: how it was called, and the importance of its columns (float32 [K], mean 1)."""

    module: nn.Module
    uses: list[_Use]
    importance: mx.array

    def cost(self, weight: mx.array, num_tokens: int) -> float:
        """Nats a token that predictions are expected to lose with this weight, float32."""
        original = self.module.weight
        bias = self.module.get("bias")
        self.module.weight = weight - original
        if bias is not None:
            self.module.bias = mx.zeros_like(bias)
        try:
            total = mx.array(0.0)
            for use in self.uses:
                assert use.gradient is not None
                total = total + mx.square(use.gradient * use.call(*use.args)).sum()
            nats: float = 0.5 * np.array(total).item() / num_tokens
            return nats
        finally:
            self.module.weight = original
            if bias is not None:
                self.module.bias = bias


def measure(model: Any, modules: Mapping[str, nn.Module], token_ids: Sequence[int]) -> dict[str, Sensitivity]:
    """Of the modules that are called at all. ``model`` is mlx-lm's, evaluated, with float32 parameters; its
    layers are put on our kernels."""
    _use_kernels(model)
    found: dict[str, Sensitivity] = {}
    for start in range(0, len(token_ids), _SEQUENCE):
        tokens = mx.array([list(token_ids[start : start + _SEQUENCE])])
        for use in _uses(model, modules, tokens, mx.random.key(start)):
            if use.path not in found:
                found[use.path] = Sensitivity(modules[use.path], [], mx.zeros(1))
            found[use.path].uses.append(use)
    for sensitivity in found.values():
        sensitivity.importance = _importance(sensitivity)
    return found


def _use_kernels(model: Any) -> None:
    """For single layers only: kernels of whole blocks would pass by the calls that are recorded."""
    for _, module in model.named_modules():
        replacement = KERNEL_CLASSES.get(type(module))
        if replacement is not None:
            module.__class__ = replacement
            if issubclass(replacement, nn.Embedding):
                object.__setattr__(module, "activation_dtype", mx.float32)


def _uses(model: Any, modules: Mapping[str, nn.Module], tokens: mx.array, key: mx.array) -> list[_Use]:
    with _recording(modules) as recorder:
        logits = model(tokens).astype(mx.float32)
        drawn = mx.random.categorical(logits, key=key)
        mx.eval(drawn)
        probes = [mx.zeros(output.shape, output.dtype) for output in recorder.outputs]

        def loss(given: list[mx.array]) -> tuple[mx.array, list[Any]]:
            recorder.probes, recorder.uses, recorder.outputs = given, [], []
            predicted = model(tokens).astype(mx.float32)
            total = nn.losses.cross_entropy(predicted, drawn, reduction="sum")
            return total, [use.args for use in recorder.uses]

        (_, args), gradients = mx.value_and_grad(loss)(probes)
        mx.eval(args, gradients)
        uses = recorder.uses
    for use, held, gradient in zip(uses, args, gradients, strict=True):
        use.args, use.gradient = held, gradient
    return uses


def _importance(sensitivity: Sensitivity) -> mx.array:
    """Mean squares of what each column meets, weighed by the gradients beyond it."""
    columns = sensitivity.module.weight.shape[-1]
    total = mx.zeros(columns)
    for use in sensitivity.uses:
        x, gradient = use.args[0], use.gradient
        assert gradient is not None
        if not mx.issubdtype(x.dtype, mx.floating):
            continue
        weights = mx.square(gradient).sum(-1, keepdims=True)
        squares = mx.square(x)
        if weights.ndim != squares.ndim or weights.shape[:-1] != squares.shape[:-1]:
            # Experts: rows of x are used several times, or are sorted by expert.
            weights = mx.mean(weights)
        total = total + (squares * weights).reshape(-1, columns).sum(0)
    mean = total.mean()
    if not (mean > 0).item():
        return mx.ones(columns)
    return total / mean + _MIN_SHARE


def rounded(weight: mx.array, layout: Layout, importance: mx.array) -> mx.array:
    """A float32 weight as it will be read back from the quantized file, float32. ``layout`` is affine."""
    rows = weight.reshape(-1, weight.shape[-1]).astype(layout.scale_dtype)
    packed = quantized_rows(rows, layout, importance)
    ids = mx.arange(rows.shape[0], dtype=mx.int32)
    values = ops.embed_rows(
        ids, packed.words, packed.scales, packed.biases, group_size=layout.group_size, bits=layout.bits
    )
    return values.reshape(weight.shape)
