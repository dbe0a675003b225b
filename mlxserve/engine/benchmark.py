"""Measures an engine from inside one thread: prefill and decode rates, and what bounds them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.config import DEFAULT_PAGE_SIZE, EngineConfig
from mlxserve.engine.copied_context import CopiedContext
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.engine.step_profile import StepProfile, StepTimer, detokenize_ms
from mlxserve.engine.target import Target
from mlxserve.errors import UsageError
from mlxserve.models.loader import LoadedModel
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import GenerationRequest, SamplingParams
from mlxserve_kernels import ops

_SEED = 7


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What one run does: ``streams`` sequences of ``prompt_tokens``, then ``tokens`` each.
    ``is_context_copied``: the prompts' keys and values are copies (see ``CopiedContext``); ``kv_bits``: of
    the engine (see ``EngineConfig``)."""

    prompt_tokens: int
    tokens: int
    streams: int
    is_context_copied: bool = False
    kv_bits: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """``prefill_tok_s`` counts prompt tokens until the last stream has its first token (None for a copied
    context), ``decode_tok_s`` the tokens of all streams from then until the first stream ends.
    ``bytes_per_token`` are weights and KV that one decoded token must read; ``bandwidth_fraction`` is
    their rate over the machine's read rate."""

    prompt_tokens: int
    streams: int
    prefill_tok_s: float | None
    decode_tok_s: float
    bytes_per_token: int
    bandwidth_fraction: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(model: LoadedModel, shape: DecodeShape, *, read_rate: float) -> DecodeRun:
    """One run on a fresh engine. Its decode figure is of the steps in which all streams decode."""
    core = decode_core(model, shape)
    run = run_streams(core, shape, random_prompts(shape, model.vocab_size))
    drain(core, shape)
    decode_tok_s = run.num_decoded / max(run.ended - run.prefilled, 1e-9)
    context = shape.prompt_tokens + shape.tokens // 2
    kv_bytes = context * sum(replace(spec, kv_bits=shape.kv_bits).page_bytes(1) for spec in model.layers)
    num_bytes = decode_weight_bytes(model, shape.streams) // shape.streams + kv_bytes
    prefill_tok_s = shape.streams * shape.prompt_tokens / (run.prefilled - run.started)
    return DecodeRun(
        prompt_tokens=shape.prompt_tokens,
        streams=shape.streams,
        prefill_tok_s=None if shape.is_context_copied else prefill_tok_s,
        decode_tok_s=decode_tok_s,
        bytes_per_token=num_bytes,
        bandwidth_fraction=decode_tok_s * num_bytes / read_rate,
    )


def measure_profile(model: LoadedModel, shape: DecodeShape, tokenizer: Tokenizer | None) -> StepProfile:
    """Where the decode steps of one run on a fresh engine spend their time."""
    core = decode_core(model, shape)
    timer = StepTimer(core)
    with timer.attached():
        run = run_streams(core, shape, random_prompts(shape, model.vocab_size))
    drain(core, shape)
    text_ms = None if tokenizer is None else detokenize_ms(tokenizer, run.tokens[0])
    return timer.profile(max(run.num_decoded // shape.streams, 1), text_ms)


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """Times of the start, of the moment when the last stream had its first token, and of the end of the
    stream that ended first; how many tokens were decoded between the latter two; each stream's tokens."""

    started: float
    prefilled: float
    ended: float
    num_decoded: int
    tokens: list[list[int]]


def run_streams(core: EngineCore, shape: DecodeShape, prompts: list[tuple[int, ...]]) -> StreamsRun:
    """Runs all streams until one ends: with fewer streams the rest would be another measurement."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(shape.streams)}
    started = time.perf_counter()
    for name, prompt in zip(tokens, prompts, strict=True):
        core.add(GenerationRequest(name, prompt, shape.tokens, SamplingParams(temperature=0)))
    prefilled = ended = None
    num_first = 0
    while ended is None:
        for output in core.step():
            if output.error is not None:
                raise output.error
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended = time.perf_counter()
        if prefilled is None and all(tokens.values()):
            prefilled, num_first = time.perf_counter(), _count(tokens)
    num_decoded = _count(tokens) - num_first
    if prefilled is None or num_decoded < 1:
        raise UsageError(
            f"{shape.tokens} new tokens are too few for {shape.streams} streams of {shape.prompt_tokens} "
            "prompt tokens: the first one ends before the last one has begun"
        )
    return StreamsRun(started, prefilled, ended, num_decoded, list(tokens.values()))


def _count(tokens: dict[str, list[int]]) -> int:
    return sum(map(len, tokens.values()))


def drain(core: EngineCore, shape: DecodeShape) -> None:
    """End what ``run_streams`` left running, so that it takes no time from what is measured next."""
    for index in range(shape.streams):
        core.abort(str(index))
    while core.has_work:
        core.step()


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Seconds to the first token of a long conversation, cold, and of its next turn."""

    cold_s: float
    next_turn_s: float
    num_cached_tokens: int


def measure_prefix(model: LoadedModel, *, history_tokens: int, new_tokens: int) -> PrefixRun:
    """A conversation of ``history_tokens`` cold, then its next turn with ``new_tokens`` more."""
    num_tokens = history_tokens + new_tokens + 2 * DEFAULT_PAGE_SIZE
    core = _core(model, streams=1, num_tokens=num_tokens, prefix_cache=True)
    (history,) = random_prompts(DecodeShape(history_tokens + new_tokens, 1, 1), model.vocab_size)
    times, cached = [], 0
    for name, prompt in (("cold", history[:history_tokens]), ("next", history)):
        started = time.perf_counter()
        core.add(GenerationRequest(name, prompt, 1, SamplingParams(temperature=0)))
        while core.has_work:
            for output in core.step():
                cached = output.num_cached_tokens
        times.append(time.perf_counter() - started)
    return PrefixRun(times[0], times[1], cached)


def decode_core(model: LoadedModel, shape: DecodeShape) -> EngineCore:
    """A fresh engine that holds one run of ``shape``."""
    num_tokens = shape.streams * (shape.prompt_tokens + shape.tokens + DEFAULT_PAGE_SIZE)
    return _core(
        model,
        streams=shape.streams,
        num_tokens=num_tokens,
        prefix_cache=False,
        is_context_copied=shape.is_context_copied,
        kv_bits=shape.kv_bits,
    )


def _core(
    model: LoadedModel,
    *,
    streams: int,
    num_tokens: int,
    prefix_cache: bool,
    is_context_copied: bool = False,
    kv_bits: int | None = None,
) -> EngineCore:
    """An engine with pages for ``num_tokens``."""
    config = EngineConfig(
        max_running=streams,
        prefix_cache=prefix_cache,
        kv_pages=-(-num_tokens // DEFAULT_PAGE_SIZE),
        kv_bits=kv_bits,
    )
    target: Target = ModelTarget(model, config.page_size, config.kv_bits)
    if is_context_copied:
        target = CopiedContext(target, config.page_size)
    return EngineCore(target, config, is_pipelined=ops.supports_steps_in_flight())


def decode_weight_bytes(model: LoadedModel, streams: int = 1) -> int:
    """Weights that a decode step of so many rows reads: all but an embedding table that is not also the
    head, and of experts those that as many rows choose on average, if at random."""
    total = float(model.weight_bytes)
    for name, module in model.module.named_modules():
        num_bytes = sum(array.nbytes for array in module.values() if isinstance(array, mx.array))
        if name.endswith("embed_tokens") and not model.config.get("tie_word_embeddings", True):
            total -= num_bytes
        elif ".switch_mlp." in name:
            chosen = model.config.get("num_experts_per_tok", 0) / _num_experts(model.config)
            total -= num_bytes * (1 - chosen) ** streams
    return int(total)


def _num_experts(config: dict[str, Any]) -> int:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            return int(config[key])
    raise AssertionError("a model with experts does not state their number")


def random_prompts(shape: DecodeShape, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of random ids, the same in every run."""
    rng = np.random.default_rng(_SEED)
    ids = rng.integers(3, vocab_size, size=(shape.streams, shape.prompt_tokens))
    return [tuple(row) for row in ids.tolist()]


def median_run(runs: list[DecodeRun]) -> DecodeRun:
    """The median of each measured figure over runs of one shape."""
    prefills = [run.prefill_tok_s for run in runs if run.prefill_tok_s is not None]
    return replace(
        runs[0],
        prefill_tok_s=statistics.median(prefills) if prefills else None,
        decode_tok_s=statistics.median(run.decode_tok_s for run in runs),
        bandwidth_fraction=statistics.median(run.bandwidth_fraction for run in runs),
    )


def load_stock_float32(folder: Path) -> nn.Module:
    """The model as mlx-lm itself loads it, with float32 activations."""
    from mlx_lm.utils import load_model

    module, _ = load_model(folder)
    module.set_dtype(mx.float32)
    mx.eval(module.parameters())
    return module


@dataclass(frozen=True, slots=True)
class StockRun:
    """What one stream of stock mlx-lm gave."""

    prefill_tok_s: float
    decode_tok_s: float
    token_ids: list[int]


def mlx_lm_runner(folder: Path) -> Callable[[tuple[int, ...], int], StockRun]:
    """Stock mlx-lm on the same folder with float32 activations: a function from a prompt and a number of new
    tokens (at least 2)."""
    from mlx_lm.models.cache import make_prompt_cache

    module = load_stock_float32(folder)

    def run(prompt: tuple[int, ...], num_tokens: int) -> StockRun:
        caches = make_prompt_cache(module)
        started = time.perf_counter()
        tokens = [mx.argmax(module(mx.array([prompt]), caches)[:, -1], axis=-1)]
        mx.eval(tokens[0])
        prefilled = time.perf_counter()
        for _ in range(num_tokens - 1):
            tokens.append(mx.argmax(module(tokens[-1][:, None], caches)[:, -1], axis=-1))
            mx.eval(tokens[-1])
        ended = time.perf_counter()
        return StockRun(
            len(prompt) / (prefilled - started),
            (num_tokens - 1) / (ended - prefilled),
            np.array(mx.concatenate(tokens)).tolist(),
        )

    return run
