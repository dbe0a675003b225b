"""One request inside the engine: its tokens, its pages and how far it has been computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from mlxserve.engine.prefix_cache import Node
from mlxserve.types import GenerationRequest


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler. Positions count from 0.

    ``token_ids`` are the prompt and the generated tokens that have been read back. ``num_computed``
    counts the positions whose keys and values are written, or will be by a step that is launched.
    ``num_pending`` counts sampled tokens of the launched step that are not read back yet, and
    ``pending_slot`` is the place of the (one) pending token in that step's samples.
    ``pages`` cover at least ``num_computed`` positions; the first ``num_cached_pages`` of them are
    full and in the prefix cache, ending at ``node``.
    """

    request: GenerationRequest
    arrival: int
    seed: int
    prefill_delay_s: float = 0.0
    decode_delay_s: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    pending_slot: int | None = None
    is_uncertain: bool = False
    """Launched with draft tokens: how many were accepted is not known before the step is read."""
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    num_cached_pages: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    not_before: float = 0.0
    """The row takes no part in a step before this time (seconds of the engine's clock)."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens that have been read back."""
        return len(self.token_ids) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens that exist, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        return self.length - self.num_computed

    @property
    def num_known_computed(self) -> int:
        """Computed positions whose token is known, so that they can be cached."""
        return min(self.num_computed, len(self.token_ids))

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens the request may sample."""
        return self.request.max_tokens - self.num_generated - self.num_pending

    def forget_pending(self) -> None:
        """The step in flight was lost: what it sampled is sampled again."""
        self.num_pending = 0
        self.pending_slot = None
        self.is_uncertain = False
