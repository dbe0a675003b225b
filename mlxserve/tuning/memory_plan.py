"""What a training step will take, known before it starts: an estimate from shapes alone, in bytes.

Kept for the backward pass, each value float32: of each trained layer and token its normed inputs, queries,
keys, values, attention output, the gate, up and product of the feed-forward, and both residuals; or, when
activations are recomputed, one residual a layer and one layer's worth of the rest. Weights are as loaded;
gradients and optimizer take a float32 each (AdamW two) a trained parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT = 4
_WORKSPACE_SHARE = 1.15
"""Temporaries of products and of the loss, of what is counted by shape."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of one decoder layer: values a token of hidden state, queries, keys with values, and feed-forward."""

    hidden: int
    queries: int
    keys_values: int
    feed_forward: int

    @property
    def kept(self) -> int:
        """Values a token that the backward pass needs."""
        return 6 * self.hidden + 2 * self.queries + self.keys_values + 3 * self.feed_forward


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``available`` is what the machine has left for training."""

    weights: int
    trained: int
    optimizer: int
    activations: int
    recomputed_activations: int
    available: int

    def total(self, *, recomputes: bool) -> int:
        kept = self.recomputed_activations if recomputes else self.activations
        return int(self.weights + self.trained + self.optimizer + kept * _WORKSPACE_SHARE)

    def recomputes(self, choice: str) -> bool:
        """Whether activations are recomputed: on, off, or auto where they do not fit otherwise."""
        if choice != "auto":
            return choice == "on"
        return self.total(recomputes=False) > self.available

    def refusal(self, choice: str) -> str | None:
        """Why training cannot start, and what would help; None when it fits."""
        needed = self.total(recomputes=self.recomputes(choice))
        if needed <= self.available:
            return None
        helps = ["a smaller --batch-size with more --accumulate", "a shorter --max-length"]
        if choice == "off":
            helps.insert(0, "--grad-checkpoint on")
        if self.trained > self.weights // 4:
            helps.append("type lora instead of full")
        return (
            f"training needs about {needed / 1e9:.1f} GB, {self.available / 1e9:.1f} GB are free: try "
            + ", ".join(helps)
        )


def plan_memory(
    *,
    weights: int,
    num_trained: int,
    optimizer_states: int,
    shapes: list[LayerShape],
    num_tokens: int,
    available: int,
) -> MemoryPlan:
    """``shapes`` are those of the layers that gradients pass through, ``num_tokens`` the positions of the
    largest batch, ``optimizer_states`` the arrays that the optimizer keeps for each trained parameter."""
    kept = sum(shape.kept for shape in shapes)
    widest = max((shape.kept for shape in shapes), default=0)
    residuals = sum(shape.hidden for shape in shapes)
    return MemoryPlan(
        weights=weights,
        trained=2 * num_trained * _FLOAT,
        optimizer=optimizer_states * num_trained * _FLOAT,
        activations=kept * num_tokens * _FLOAT,
        recomputed_activations=(residuals + 2 * widest) * num_tokens * _FLOAT,
        available=available,
    )
