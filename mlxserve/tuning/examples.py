"""One example of the training data, as tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """``is_trained[i]`` says whether predicting token i from those before it counts in the loss; it is False
    for the first token, which nothing predicts. ``place`` is "file:line", or "file:row" of a parquet file."""

    token_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]
    place: str

    @property
    def num_trained(self) -> int:
        return sum(self.is_trained)

    @property
    def num_inputs(self) -> int:
        """Positions of a forward: each token but the last predicts the one after it."""
        return len(self.token_ids) - 1
