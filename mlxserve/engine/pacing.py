"""How much prefill may share a step with decodes, so that live streams keep their pace."""

from __future__ import annotations

STEP_TARGET_S = 0.25
"""A step that decodes should not take longer than this because of prefill."""

MIN_PREFILL_TOKENS = 32
_WEIGHT = 0.3


class PrefillPacer:
    """Learns the rate of prefill from the steps that were read back."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._rate: float | None = None
        self._last: float | None = None

    @property
    def prefill_budget(self) -> int:
        """Prefill tokens that fit the target time of one step."""
        if self._rate is None:
            return min(self._max_tokens, 4 * MIN_PREFILL_TOKENS)
        return max(MIN_PREFILL_TOKENS, min(self._max_tokens, int(self._rate * STEP_TARGET_S)))

    def observe(self, num_prefill_tokens: int, num_tokens: int, now: float) -> None:
        """A step was read back at ``now`` (seconds); the time since the last one was its cost."""
        last, self._last = self._last, now
        if last is None or now <= last or 2 * num_prefill_tokens < num_tokens:
            return
        rate = num_tokens / (now - last)
        self._rate = rate if self._rate is None else (1 - _WEIGHT) * self._rate + _WEIGHT * rate

    def rest(self) -> None:
        """The engine was idle: the time to the next step is no cost."""
        self._last = None
