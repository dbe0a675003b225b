"""The models of one server, by the name that requests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import InvalidRequestError, ModelNotFoundError, UsageError


class ModelRegistry:
    """Read-only after construction; raises UsageError when two models have one id."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.id: model for model in models}
        if len(self._models) != len(models):
            raise UsageError(f"two models have the same name: {', '.join(model.id for model in models)}")

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """The model of this name. None is the only model, where there is exactly one."""
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise InvalidRequestError(
                f"model is required; served here: {self._names}",
                param="model",
                code="missing_required_parameter",
            )
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(f"no model {name!r}; served here: {self._names}")
        return model

    @property
    def _names(self) -> str:
        return ", ".join(self._models) or "none"
