"""Measures an engine from inside one thread: prefill and decode rates, and what bounds them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.config import DEFAULT_PAGE_SIZE, EngineConfig
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.models.loader import LoadedModel
from mlxserve.types import GenerationRequest, SamplingParams
from mlxserve_kernels import ops

_SEED = 7
_READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What one run does: ``streams`` sequences of ``prompt_tokens``, then ``tokens`` each."""

    prompt_tokens: int
    tokens: int
    streams: int


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """``prefill_tok_s`` counts prompt tokens until the last stream has its first token,
    ``decode_tok_s`` the tokens of all streams from then on. ``bytes_per_token`` are weights and KV that
    one decoded token must read; ``bandwidth_fraction`` is their rate over the machine's read rate."""

    streams: int
    prefill_tok_s: float
    decode_tok_s: float
    bytes_per_token: int
    bandwidth_fraction: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def read_bandwidth(num_threads: int) -> float:
    """Bytes a second that ``num_threads`` threads read from memory together (best of five)."""
    arrays = [np.ones(_READ_BYTES // num_threads // 8, dtype=np.int64) for _ in range(num_threads)]
    rates = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.max, arrays))
            rates.append(sum(array.nbytes for array in arrays) / (time.perf_counter() - started))
    return max(rates)


def measure(model: LoadedModel, shape: DecodeShape, *, read_rate: float) -> DecodeRun:
    """One run on a fresh engine."""
    num_tokens = shape.streams * (shape.prompt_tokens + shape.tokens + DEFAULT_PAGE_SIZE)
    core = _core(model, streams=shape.streams, num_tokens=num_tokens, prefix_cache=False)
    prompts = random_prompts(shape, model.vocab_size)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        core.add(GenerationRequest(str(index), prompt, shape.tokens, SamplingParams(temperature=0)))
    counts = dict.fromkeys(map(str, range(shape.streams)), 0)
    prefilled = decoding = None
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise output.error
            counts[output.request_id] += len(output.token_ids)
        if prefilled is None and all(counts.values()):
            prefilled, decoding = time.perf_counter(), sum(counts.values())
    ended = time.perf_counter()
    assert prefilled is not None
    assert decoding is not None
    decode_tok_s = (sum(counts.values()) - decoding) / max(ended - prefilled, 1e-9)
    context = shape.prompt_tokens + shape.tokens // 2
    kv_bytes = context * sum(spec.page_bytes(1) for spec in model.layers)
    num_bytes = decode_weight_bytes(model) // shape.streams + kv_bytes
    return DecodeRun(
        streams=shape.streams,
        prefill_tok_s=shape.streams * shape.prompt_tokens / (prefilled - started),
        decode_tok_s=decode_tok_s,
        bytes_per_token=num_bytes,
        bandwidth_fraction=decode_tok_s * num_bytes / read_rate,
    )


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


def _core(model: LoadedModel, *, streams: int, num_tokens: int, prefix_cache: bool) -> EngineCore:
    """An engine with pages for ``num_tokens``."""
    config = EngineConfig(
        max_running=streams, prefix_cache=prefix_cache, kv_pages=-(-num_tokens // DEFAULT_PAGE_SIZE)
    )
    target = ModelTarget(model, config.page_size)
    return EngineCore(target, config, is_pipelined=ops.supports_steps_in_flight())


def decode_weight_bytes(model: LoadedModel) -> int:
    """Weights that a decode step reads: all but an embedding table that is not also the head."""
    total = model.weight_bytes
    for name, module in model.module.named_modules():
        if name.endswith("embed_tokens") and not model.config.get("tie_word_embeddings", True):
            total -= sum(array.nbytes for array in module.values() if isinstance(array, mx.array))
    return total


def random_prompts(shape: DecodeShape, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of random ids, the same in every run."""
    rng = np.random.default_rng(_SEED)
    ids = rng.integers(3, vocab_size, size=(shape.streams, shape.prompt_tokens))
    return [tuple(row) for row in ids.tolist()]


def median_run(runs: list[DecodeRun]) -> DecodeRun:
    """The median of each figure over runs of one shape."""
    fields = [run.as_dict() for run in runs]
    medians: dict[str, Any] = {key: statistics.median(run[key] for run in fields) for key in fields[0]}
    return DecodeRun(**(medians | {"streams": runs[0].streams, "bytes_per_token": runs[0].bytes_per_token}))


def load_stock_float32(folder: Path) -> nn.Module:
    """The model as mlx-lm itself loads it, with float32 activations."""
    from mlx_lm.utils import load_model

    module, _ = load_model(folder)
    module.set_dtype(mx.float32)
    mx.eval(module.parameters())
    return module


def mlx_lm_runner(folder: Path) -> Callable[[DecodeShape], tuple[float, float]]:
    """Stock mlx-lm on the same folder with float32 activations: a function from a shape (one stream) to
    (prefill tok/s, decode tok/s)."""
    from mlx_lm.models.cache import make_prompt_cache

    module = load_stock_float32(folder)
    vocab_size = int(module.args.vocab_size)

    def run(shape: DecodeShape) -> tuple[float, float]:
        assert shape.streams == 1
        caches = make_prompt_cache(module)
        started = time.perf_counter()
        logits = module(mx.array(random_prompts(shape, vocab_size)), caches)
        token = mx.argmax(logits[:, -1], axis=-1)
        mx.eval(token)
        prefilled = time.perf_counter()
        for _ in range(shape.tokens - 1):
            token = mx.argmax(module(token[:, None], caches)[:, -1], axis=-1)
            mx.eval(token)
        ended = time.perf_counter()
        return shape.prompt_tokens / (prefilled - started), (shape.tokens - 1) / (ended - prefilled)

    return run
