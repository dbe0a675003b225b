"""Rope settings of a config, brought into the fields that an architecture of mlx-lm reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlxserve.errors import UnsupportedModelError


def settle_rope(config: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """``config`` with ``rope_parameters`` (transformers 5) spelt as ``rope_theta`` and ``rope_scaling``
    where the architecture, whose config fields are ``fields``, knows the old names alone: it would use
    its default base in silence. Raises UnsupportedModelError where the old names cannot hold them.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or not parameters:
        return config
    if "rope_parameters" in fields or "rope_theta" not in fields:
        return config
    model_type = config["model_type"]
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError(
            "config.json has rope_parameters for each kind of layer, "
            f"which mlx-lm's {model_type} does not read"
        )
    settled = dict(config)
    if "rope_theta" in parameters:
        settled.setdefault("rope_theta", parameters["rope_theta"])
    kind = parameters.get("rope_type", "default")
    if kind != "default" and config.get("rope_scaling") is None:
        if "rope_scaling" not in fields:
            raise UnsupportedModelError(
                f"config.json scales its rope ({kind}), which mlx-lm's {model_type} does not read"
            )
        settled["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return settled
