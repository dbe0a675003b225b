"""Logits of a whole text, in bounded memory, and what follows from them: perplexity and KL divergence.

Perplexity is exp of the mean negative log-probability of the tokens that count (``windows``). The divergence
of B from A is KL(A || B) = sum over the vocabulary of p_A (log p_A - log p_B), in nats, for each position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.engine.windows import Window, make_windows
from mlxserve.errors import ModelLoadError, UnsupportedModelError, UsageError
from mlxserve.models.loader import (
    LoadedModel,
    context_length,
    load_model,
    load_plain,
    read_config,
)
from mlxserve.models.paged import ModelPages, PagedMetadata
from mlxserve.text.tokenizer import FolderTokenizer, load_tokenizer

_PAGE_SIZE = 32
_LOGIT_BYTES = 64 << 20
"""Of one chunk's logits in float32; a vocabulary of 262,144 gives chunks of 64 tokens."""
_MAX_ROWS = 256

Floats = np.ndarray[Any, np.dtype[np.float64]]
OnTokens = Callable[[int], None]
"""Told how many tokens count so far."""


def shipped_text() -> str:
    """The opening of Michael Faraday's "The Chemical History of a Candle" (1861), in the public domain."""
    return resources.files("mlxserve.engine").joinpath("data/candle.txt").read_text(encoding="utf-8")


class Scorer(Protocol):
    """Gives logits of windows."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, window: Window) -> Iterator[mx.array]:
        """Float32 [R, V] for each next R rows from ``window.first_row`` on. One chunk is alive at a time."""
        ...


class PagedScorer:
    """A model on the engine's own path."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._pages = ModelPages(model.layers, _PAGE_SIZE)
        self._num_pages = 0
        self.vocab_size = model.vocab_size

    def logits(self, window: Window) -> Iterator[mx.array]:
        num_pages = -(-len(window.token_ids) // _PAGE_SIZE)
        if num_pages > self._num_pages:
            self._pages.resize(num_pages)
            self._num_pages = num_pages
        tables = mx.array([list(range(self._num_pages))], dtype=mx.int32)
        for start, stop in _chunks(window, self.vocab_size):
            positions = mx.arange(start, stop, dtype=mx.int32)
            metadata = PagedMetadata(
                positions=positions,
                slot_mapping=positions,
                block_tables=tables,
                q_starts=mx.array([0, stop - start], dtype=mx.int32),
                kv_lens=mx.array([stop], dtype=mx.int32),
            )
            ids = mx.array(window.token_ids[start:stop], dtype=mx.int32)
            is_wanted = stop > window.first_row
            # Rows that nobody wants still have to write their keys: the last one goes to the head.
            first = max(window.first_row - start, 0) if is_wanted else stop - start - 1
            rows = mx.arange(first, stop - start, dtype=mx.int32)
            logits = self._model.logits(ids, self._pages, metadata, rows).astype(mx.float32)
            mx.eval(logits)
            if is_wanted:
                yield logits


class PlainScorer:
    """A model that the engine does not serve yet, on mlx-lm's own path and our kernels."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.vocab_size = int(self._run((0,), self._caches()).shape[-1])

    def _caches(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self._module)
        return caches

    def _run(self, token_ids: Sequence[int], caches: list[Any]) -> mx.array:
        logits: mx.array = self._module(mx.array([list(token_ids)], dtype=mx.int32), caches)[0]
        return logits

    def logits(self, window: Window) -> Iterator[mx.array]:
        caches = self._caches()
        for start, stop in _chunks(window, self.vocab_size):
            logits = self._run(window.token_ids[start:stop], caches)
            logits = logits[max(window.first_row - start, 0) :].astype(mx.float32)
            mx.eval(logits, [cache.state for cache in caches])
            if stop > window.first_row:
                yield logits


def _chunks(window: Window, vocab_size: int) -> Iterator[tuple[int, int]]:
    step = max(1, min(_MAX_ROWS, _LOGIT_BYTES // (4 * vocab_size)))
    edges = [*range(0, len(window.token_ids), step), len(window.token_ids)]
    return itertools.pairwise(edges)


@dataclass(frozen=True, slots=True)
class ScoredModel:
    """A folder that is ready to score texts."""

    scorer: Scorer
    tokenizer: FolderTokenizer
    context_length: int | None


def open_scored(folder: Path) -> ScoredModel:
    """Loads a model folder. Raises ModelLoadError (UnsupportedModelError)."""
    tokenizer = load_tokenizer(folder)
    scorer: Scorer
    try:
        scorer = PagedScorer(load_model(folder))
    except UnsupportedModelError:
        scorer = PlainScorer(load_plain(folder))
    return ScoredModel(scorer, tokenizer, context_length(read_config(folder)))


def text_windows(
    model: ScoredModel, text: str, *, context: int, stride: int, max_tokens: int | None
) -> list[Window]:
    """The windows of a text in the model's tokens. Raises UsageError where ``make_windows`` does and for a
    context that is longer than the model's."""
    limit = model.context_length
    if limit is not None and context > limit:
        raise UsageError(f"--context {context} is more than the model supports: {limit} tokens")
    prefix, token_ids = tokens_of(model.tokenizer, text)
    if max(token_ids, default=0) >= model.scorer.vocab_size:
        raise ModelLoadError(
            f"the tokenizer has ids up to {max(token_ids)}, the model only {model.scorer.vocab_size}"
        )
    return make_windows(prefix, token_ids[:max_tokens], context, stride)


def tokens_of(tokenizer: FolderTokenizer, text: str) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text, and the text's own tokens."""
    prefix = tokenizer.encode("a")
    bare = tokenizer.encode("a", add_special_tokens=False)
    num_before = next((i for i in range(len(prefix)) if prefix[i : i + len(bare)] == bare), 0)
    return prefix[:num_before], tokenizer.encode(text, add_special_tokens=False)


def log_probabilities(logits: mx.array) -> mx.array:
    """Of every token: float32 [R, V]."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def target_log_probabilities(
    scorer: Scorer, windows: Sequence[Window], on_tokens: OnTokens | None = None
) -> Floats:
    """The log-probability of each token that counts, in order."""
    found: list[Floats] = []
    for _, targets, logits in _scored(scorer, windows, on_tokens):
        own = mx.take_along_axis(logits, mx.array(list(targets))[:, None], axis=-1)
        found.append(np.array(own - mx.logsumexp(logits, axis=-1, keepdims=True), dtype=np.float64)[:, 0])
    return np.concatenate(found)


def _scored(
    scorer: Scorer, windows: Sequence[Window], on_tokens: OnTokens | None
) -> Iterator[tuple[int, Sequence[int], mx.array]]:
    """The number of tokens before, targets [R] and logits [R, V]."""
    done = 0
    for window in windows:
        at = 0
        for logits in scorer.logits(window):
            targets = window.targets[at : at + logits.shape[0]]
            yield done, targets, logits
            at += len(targets)
            done += len(targets)
            if on_tokens is not None:
                on_tokens(done)


def perplexity(log_probabilities_of_targets: Floats) -> float:
    """Infinite when a token has no probability at all; NaN for a model that gives NaN."""
    mean = -float(log_probabilities_of_targets.mean())
    return math.exp(mean) if mean < 700 or math.isnan(mean) else math.inf


class StoredLogits:
    """A model's log-probabilities of all tokens, float32 in a file, to compare another model with later:
    the two need not be in memory together."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._vocab_size = 0
        self.targets: Floats = np.zeros(0)
        """Log-probabilities of the tokens that count."""

    @staticmethod
    def num_bytes(num_tokens: int, vocab_size: int) -> int:
        return 4 * num_tokens * vocab_size

    def write(self, scorer: Scorer, windows: Sequence[Window], on_tokens: OnTokens | None = None) -> None:
        self._vocab_size = scorer.vocab_size
        own: list[Floats] = []
        for _, targets, logits in _scored(scorer, windows, on_tokens):
            values = np.array(log_probabilities(logits), dtype=np.float32)
            self._file.write(values.tobytes())
            own.append(values[np.arange(len(targets)), list(targets)].astype(np.float64))
        self._file.flush()
        self.targets = np.concatenate(own)

    def compare(
        self, scorer: Scorer, windows: Sequence[Window], on_tokens: OnTokens | None = None
    ) -> Divergence:
        """The other model on the same windows. Raises UsageError for another size of vocabulary."""
        if scorer.vocab_size != self._vocab_size:
            raise UsageError(
                f"the models have vocabularies of {self._vocab_size} and {scorer.vocab_size} tokens, which "
                "cannot be compared"
            )
        row_bytes = 4 * self._vocab_size
        divergences: list[Floats] = []
        own: list[Floats] = []
        num_same = 0
        for done, targets, logits in _scored(scorer, windows, on_tokens):
            self._file.seek(done * row_bytes)
            raw = self._file.read(len(targets) * row_bytes)
            first = mx.array(np.frombuffer(raw, np.float32).reshape(len(targets), -1))
            second = log_probabilities(logits)
            # A token without probability adds nothing: 0 (-inf - x) would be NaN.
            terms = mx.where(mx.isneginf(first), 0.0, mx.exp(first) * (first - second))
            divergences.append(np.array(terms.sum(axis=-1), dtype=np.float64))
            own.append(
                np.array(second, dtype=np.float32)[np.arange(len(targets)), list(targets)].astype(float)
            )
            is_same = np.array(mx.argmax(first, axis=-1) == mx.argmax(second, axis=-1))
            num_same += int(np.count_nonzero(is_same))
        return _divergence(np.concatenate(divergences), num_same, self.targets, np.concatenate(own))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of a model B from a model A, over ``num_tokens`` positions; nats. ``same_top`` is the share of
    positions where both have the same likeliest token."""

    num_tokens: int
    mean_kl: float
    max_kl: float
    p99_kl: float
    same_top: float
    perplexity_a: float
    perplexity_b: float


def _divergence(kl: Floats, num_same: int, first: Floats, second: Floats) -> Divergence:
    # Rounding may bring the divergence of equal rows a little under zero.
    kl = np.maximum(kl, 0.0)
    return Divergence(
        num_tokens=kl.size,
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        p99_kl=float(np.percentile(kl, 99)),
        same_top=num_same / kl.size,
        perplexity_a=perplexity(first),
        perplexity_b=perplexity(second),
    )
