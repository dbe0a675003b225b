"""Types that cross module borders: plain, frozen, free of mlx and of any API dialect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mlxserve.errors import MlxserveError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row picks its tokens. Filters run in this order: ``logit_bias``, ``top_k``, ``top_p``,
    ``min_p`` on the untempered distribution, then ``temperature``, then the draw.

    ``temperature`` 0 is greedy (the lowest id wins a tie). With ``seed`` None the engine picks one;
    token i of a row depends on its logits, its seed and i alone, never on the batch.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. ``max_tokens`` is at least 1 and counts the end token.

    ``stop_token_ids`` end the sequence; the ending id is reported but is no text. Stop strings are
    the caller's work (the engine knows no text): it aborts the stream at the match.
    ``script_key`` is the text that a scripted model matches its replies against; others ignore it.
    ``adapter_id`` is that of an adapter which the engine has loaded; None is the model alone.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    script_key: str = ""
    adapter_id: int | None = None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one engine step gave one request.

    ``token_ids`` holds the new tokens, several after a speculative step, none in some terminal
    events. Exactly one output of a request has a ``finish_reason``, and it is the last one. When it
    is "stop", the last of ``token_ids`` is the end token: it counts as generated and is no text.
    ``error`` is set exactly when ``finish_reason`` is "error".
    ``num_cached_tokens`` counts the prompt tokens that came from the prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: MlxserveError | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for ``/health`` and the dashboard. Pages are KV pages; ``pool_limit_pages`` is the
    number that the memory budget allows, ``pool_pages`` the number that exist now."""

    is_alive: bool
    num_running: int
    num_waiting: int
    pool_pages: int
    pool_limit_pages: int
    pool_free_pages: int
    cached_pages: int
