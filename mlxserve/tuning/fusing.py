"""``lora fuse``: writes the base with an adapter in it, and proves that the result acts like both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlxserve.errors import ConversionError, MlxserveError
from mlxserve.models.adapter_folder import WEIGHTS, AdapterFolder, read_adapter
from mlxserve.text.folder_tokenizer import load_tokenizer
from mlxserve.tuning.attach import attach_adapter
from mlxserve.tuning.fuse import CLOSE_LOST, MAX_LOST, FuseBits, FusedLayer, fused_plan
from mlxserve.tuning.training_model import load_training_model
from mlxserve_convert.checkpoint import identity_of
from mlxserve_convert.convert import open_checkpoint
from mlxserve_convert.layouts import quantization_config
from mlxserve_convert.options import ConvertOptions, OnProgress
from mlxserve_convert.output_folder import OutputFolder, write_json
from mlxserve_convert.plan import Plan, make_plan
from mlxserve_convert.streaming import StreamedOutput, memory_limit

MAX_LEFT_OUT = 0.1
"""Of the change's effect, measured as the divergence of predictions, that may be lost by fusing."""
SURE_DIVERGENCE = 1e-3
"""Nats a token below which two models act alike, whatever the size of the change."""
_PROBE_TEXT = (
    "The harbour was quiet when the first boat came in. Two men carried the nets ashore, a third counted "
    "the baskets, and nobody spoke of the storm. def add(a, b):\n    return a + b\n\nQuestion: what is 12 "
    "times 12? Answer: 144. La mer est calme ce matin. List: apples, pears, plums; total 3.50 EUR."
)


@dataclass(frozen=True, slots=True)
class Fused:
    """``divergence`` is the mean KL of the fused model's predictions from base plus adapter, in nats a token,
    ``effect`` that of the base alone. None: not measured."""

    output: Path
    layers: tuple[FusedLayer, ...]
    num_bytes: int
    divergence: float | None
    effect: float | None


def fuse_adapter(
    base: Path,
    adapter_path: Path,
    output: Path,
    *,
    bits: FuseBits,
    force: bool = False,
    check: bool = True,
    on_progress: OnProgress | None = None,
) -> Fused:
    """Writes ``output``. Raises ConversionError, and leaves nothing, when the result does not act like base
    plus adapter; UsageError for an adapter that does not fit."""
    adapter = read_adapter(adapter_path)
    with open_checkpoint(base) as checkpoint:
        # A float base stays what it is; "keeps" would make no difference, the default would quantize.
        is_quantized = any(weight.is_quantized for weight in checkpoint.weights.values())
        options = ConvertOptions(dequantize=bits == "floats" or not is_quantized)
        # Layers that each lose little may lose too much together: then ``auto`` allows them less.
        limits = (MAX_LOST, CLOSE_LOST) if bits == "auto" and is_quantized and check else (MAX_LOST,)
        for limit in limits:
            plan, layers = fused_plan(checkpoint, make_plan(checkpoint, options), adapter, bits, limit)
            plan = _with_config(plan)
            purpose = f"fuse {checkpoint.identity} {identity_of([adapter.path / WEIGHTS])} {bits} {limit}"
            folder = OutputFolder(output, purpose=purpose, force=force)
            folder.check(plan.num_bytes)
            try:
                with folder:
                    StreamedOutput(plan, folder.path, memory_limit(None), None).write(on_progress)
                    write_json(folder.path / "config.json", plan.config)
                    checkpoint.write_texts(folder.path)
                    divergence, effect = _proof(base, adapter, folder.path) if check else (None, None)
            except _NotAlikeError:
                if limit == limits[-1]:
                    raise
                continue
            return Fused(output, layers, plan.num_bytes, divergence, effect)
    raise AssertionError("unreachable: the last limit returns or raises")


class _NotAlikeError(ConversionError):
    """The fused model does not act like base plus adapter."""


def _with_config(plan: Plan) -> Plan:
    config = {
        key: value for key, value in plan.config.items() if key not in ("quantization", "quantization_config")
    }
    quantization = quantization_config({t.module: t.layout for t in plan.targets if t.is_matrix})
    if quantization is not None:
        config["quantization"] = quantization
    return replace(plan, config=config)


def _proof(base: Path, adapter: AdapterFolder, fused: Path) -> tuple[float, float]:
    """Compares predictions on a short text, one model in memory at a time."""
    ids = load_tokenizer(base).encode(_PROBE_TEXT)
    plain = _log_probabilities(base, ids)
    both = _log_probabilities(base, ids, lambda module: attach_adapter(module, adapter))
    result = _log_probabilities(fused, ids)
    divergence, effect = _divergence(both, result), _divergence(both, plain)
    if not divergence <= max(SURE_DIVERGENCE, MAX_LEFT_OUT * effect):
        raise _NotAlikeError(
            f"the fused model does not act like base plus adapter: they differ by {divergence:.4f} nats a "
            f"token, the adapter's whole effect is {effect:.4f} (limit {MAX_LEFT_OUT:.0%} of it): nothing "
            "was kept; use --dequantize"
        )
    return divergence, effect


def _log_probabilities(
    folder: Path, ids: list[int], change: Callable[[nn.Module], None] = lambda module: None
) -> mx.array:
    model = load_training_model(folder)
    change(model.module)
    model.module.eval()
    logits = model.logits(mx.array([ids], dtype=mx.int32))[0].astype(mx.float32)
    result = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(result)
    if not bool(mx.all(mx.isfinite(result)).item()):
        raise MlxserveError(f"{folder}: its predictions are NaN or infinite")
    mx.clear_cache()
    return result


def _divergence(expected: mx.array, found: mx.array) -> float:
    """Mean over tokens of KL(expected || found), of log-probabilities [T, V]."""
    value = mx.mean(mx.sum(mx.exp(expected) * (expected - found), axis=-1))
    return max(float(value.item()), 0.0)  # type: ignore[arg-type]
