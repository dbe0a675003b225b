"""The models of one server, by the name that requests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import InvalidRequestError, ModelNotFoundError, UsageError


class ModelRegistry:
    """Models, and adapters beside their bases, which may come and go. Belongs to the event loop; raises
    UsageError when two models have one id."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.id: model for model in models}
        self._reserved: set[str] = set()
        if len(self._models) != len(models):
            raise UsageError(f"two models have the same name: {', '.join(model.id for model in models)}")

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def engines(self) -> list[AsyncEngine]:
        """Of all models, each once."""
        return [model.engine for model in self if model.parent is None]

    def get(self, name: str | None) -> ServedModel:
        """The model of this name. None is the only model, where there is exactly one."""
        if name is None:
            return self.base(None)
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(f"no model {name!r}; served here: {self._names}")
        return model

    def base(self, name: str | None) -> ServedModel:
        """A model that is no adapter. None is the only one, where there is exactly one."""
        if name is not None:
            model = self.get(name)
            if model.parent is not None:
                raise InvalidRequestError(f"{name} is an adapter of {model.parent}", param="model")
            return model
        bases = [model for model in self._models.values() if model.parent is None]
        if len(bases) == 1:
            return bases[0]
        raise InvalidRequestError(
            f"model is required; served here: {self._names}",
            param="model",
            code="missing_required_parameter",
        )

    def reserve(self, model_id: str) -> None:
        """Keeps a name for a model that is being loaded. Raises InvalidRequestError for one that is taken."""
        if model_id in self._models or model_id in self._reserved:
            raise InvalidRequestError(f"{model_id} is served already; delete it first", param="name")
        self._reserved.add(model_id)

    def release(self, model_id: str) -> None:
        """Gives a reserved name back."""
        self._reserved.discard(model_id)

    def add(self, model: ServedModel) -> None:
        """Serves a model whose name was reserved."""
        self.release(model.id)
        self._models[model.id] = model

    def remove(self, model_id: str) -> None:
        """Serves a model no longer."""
        del self._models[model_id]

    @property
    def _names(self) -> str:
        return ", ".join(self._models) or "none"
