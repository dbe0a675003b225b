"""The proof of a conversion: the result against its source, on a text in the public domain.

The source's weights are put as floats into mlx-lm's model, without any folder, and its log-probabilities go
to a temporary file; then the result is loaded. The two are never in memory together.
"""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from mlxserve.engine.scoring import (
    Divergence,
    PagedScorer,
    PlainScorer,
    Scorer,
    StoredLogits,
    open_scored,
    shipped_text,
    tokens_of,
)
from mlxserve.engine.windows import DEFAULT_CONTEXT, Window, make_windows
from mlxserve.errors import ConversionError, UnsupportedModelError
from mlxserve.models.architectures import build_model
from mlxserve.models.loader import context_length, load_built, plain_built
from mlxserve.text.tokenizer import load_tokenizer
from mlxserve_convert.options import CheckMode, PlannedTensor
from mlxserve_convert.plan import Plan

MAX_TOKENS = 512
_MAX_FILE_BYTES = 256 << 20
"""Of the source's log-probabilities: a vocabulary of 262,144 is compared at 255 positions."""
_BASE_BYTES = 300 << 20
"""The process, a chunk of logits and the activations."""
_WEIGHT_SHARE = 1.1
"""Memory that loading takes, of the weights' bytes: a layer is held twice."""
_FREE_SHARE = 0.5

KL_BOUNDS = ((16.0, 0.02), (8.0, 0.05), (6.0, 0.1), (5.0, 0.3), (4.0, 1.0), (3.0, 4.0), (0.0, 6.0))
"""Least mean bits of the matrices' numbers, and the mean divergence in nats that is still accepted: two to
thirty times that of a model of 135 million weights, the smaller the worse (docs/decisions.md)."""
_FLOAT_BITS = 16
_CHANCE = 4
"""A source whose perplexity is over this part of its vocabulary does not know the text (random weights, say).
What it guesses changes with the least rounding, so its result is measured and not judged."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A result against its source. ``bound`` is what ``divergence.mean_kl`` was held against, None where the
    source does not know the text itself."""

    divergence: Divergence
    bound: float | None
    context: int

    @property
    def is_good(self) -> bool:
        return self.bound is None or self.divergence.mean_kl <= self.bound

    @property
    def bound_text(self) -> str:
        return (
            "no bound: the source does not know the text" if self.bound is None else f"bound {self.bound:g}"
        )

    def sentence(self) -> str:
        found = self.divergence
        return (
            f"perplexity {found.perplexity_b:.3f}, of the source {found.perplexity_a:.3f}; "
            f"KL {found.mean_kl:.5f} nats a token ({self.bound_text}), the same likeliest token at "
            f"{found.same_top:.1%} of {found.num_tokens} positions"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """``proof`` None where nothing was compared; ``sentence`` then says why."""

    proof: Proof | None
    sentence: str


def compare_with_source(
    plan: Plan,
    tensors: Sequence[PlannedTensor],
    folder: Path,
    *,
    mode: CheckMode,
    memory_limit: int | None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Comparison:
    """Compares the written ``folder`` with the source that ``plan`` was made of, if memory allows.

    Raises ConversionError when they differ by more than the bound and ``mode`` is not "force".
    """
    if all(tensor.is_exact for tensor in tensors):
        return Comparison(None, "every tensor is exact, so there is nothing to compare")
    if not (folder / "tokenizer.json").is_file():
        return Comparison(None, "not compared with the source: there is no tokenizer.json")
    source_bytes = sum(target.weight.num_bytes for target in plan.targets)
    needed = int(_WEIGHT_SHARE * max(source_bytes, plan.num_bytes)) + _BASE_BYTES
    limit = memory_limit if memory_limit is not None else int(psutil.virtual_memory().available * _FREE_SHARE)
    if needed > limit:
        whose = "--memory-limit is" if memory_limit is not None else "half of the free memory is"
        return Comparison(
            None,
            f"not compared with the source: that takes {needed / 1e9:.1f} GB, {whose} {limit / 1e9:.1f} GB",
        )
    vocab_size = int(_vocab_size(plan))
    context = min(DEFAULT_CONTEXT, context_length(plan.config) or DEFAULT_CONTEXT)
    windows = _windows(folder, context, vocab_size)
    num_bytes = StoredLogits.num_bytes(sum(len(window.targets) for window in windows), vocab_size)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        return Comparison(
            None,
            f"not compared with the source: that takes {num_bytes / 1e9:.2f} GB on the disk, "
            f"{free / 1e9:.2f} GB are free",
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        stored = StoredLogits(file)
        on_phase("reading the text with the source")
        stored.write(_source_scorer(plan, folder), windows)
        gc.collect()
        mx.clear_cache()
        on_phase("reading the text with the result")
        divergence = stored.compare(open_scored(folder).scorer, windows)
    gc.collect()
    mx.clear_cache()
    is_known = divergence.perplexity_a * _CHANCE <= vocab_size
    return _judged(Proof(divergence, kl_bound(tensors) if is_known else None, context), mode)


def _judged(proof: Proof, mode: CheckMode) -> Comparison:
    sentence = proof.sentence()
    if not math.isfinite(proof.divergence.mean_kl):
        raise ConversionError(f"the result or its source gives NaN on a text, nothing was kept: {sentence}")
    if proof.is_good:
        return Comparison(proof, sentence)
    if mode == "force":
        return Comparison(proof, f"kept although it is too far from the source: {sentence}")
    raise ConversionError(
        f"the result is too far from the source, nothing was kept: {sentence}; more --bits or a --recipe "
        "help, --force-result keeps it"
    )


def kl_bound(tensors: Sequence[PlannedTensor]) -> float:
    """The bound for the mean bits of a result's matrices, scales not counted."""
    matrices = [tensor for tensor in tensors if tensor.is_matrix]
    num_bits = sum((tensor.bits or _FLOAT_BITS) * tensor.num_elements for tensor in matrices)
    bits = num_bits / max(sum(tensor.num_elements for tensor in matrices), 1) if matrices else _FLOAT_BITS
    return next(bound for least, bound in KL_BOUNDS if bits >= least)


def _vocab_size(plan: Plan) -> int:
    """Rows of the largest matrix among embedding and head."""
    names = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "embeddings.weight", "embedding.weight")
    sizes = [target.weight.shape[0] for target in plan.targets if target.name.endswith(names)]
    if sizes:
        return max(sizes)
    nested = plan.config.get("text_config")
    size = plan.config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return size if isinstance(size, int) and size > 0 else MAX_TOKENS


def _windows(folder: Path, context: int, vocab_size: int) -> list[Window]:
    num_tokens = min(MAX_TOKENS, _MAX_FILE_BYTES // StoredLogits.num_bytes(1, vocab_size))
    prefix, token_ids = tokens_of(load_tokenizer(folder), shipped_text())
    fitting = [token for token in token_ids if token < vocab_size]
    return make_windows(prefix, fitting[: num_tokens + 1], context, max(1, context // 2))


def _source_scorer(plan: Plan, path: Path) -> Scorer:
    config = {key: value for key, value in plan.config.items() if key != "quantization"}

    def build() -> Any:
        module = build_model(config, path)
        module.load_weights([(target.name, _floats(target.weight)) for target in plan.targets])
        return module.eval()

    try:
        return PagedScorer(load_built(build, config))
    except UnsupportedModelError:
        return PlainScorer(plain_built(build))


def _floats(weight: Any) -> mx.array:
    value: mx.array = weight.value()
    mx.eval(value)
    weight.release()
    return value
