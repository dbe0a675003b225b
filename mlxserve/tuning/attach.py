"""An adapter beside the layers of a model in memory, as training has them: for samples and proofs."""

from __future__ import annotations

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.errors import UsageError
from mlxserve.models.adapter_folder import AdapterFolder
from mlxserve.tuning.lora_layers import add_low_rank, layer_kinds


def attach_adapter(module: nn.Module, adapter: AdapterFolder) -> None:
    """Changes a model by an adapter of any type. Raises UsageError, naming the layer, for one that does not
    fit."""
    if adapter.type == "full":
        _put(module, adapter)
        return
    kinds = layer_kinds(module)
    paths = sorted({name.rpartition(".")[0] for name in adapter.weights})
    for path in paths:
        if path not in kinds:
            raise UsageError(f"{adapter.path}: changes {path}, which the model does not have")
    ranks = {path: _rank(adapter, path) for path in paths}
    for rank in sorted(set(ranks.values())):
        add_low_rank(
            module,
            [path for path in paths if ranks[path] == rank],
            rank=rank,
            scale=adapter.scale,
            dropout=0.0,
            is_dora=adapter.type == "dora",
            seed=0,
        )
    _put(module, adapter)


def _rank(adapter: AdapterFolder, path: str) -> int:
    b = adapter.weights.get(f"{path}.lora_b")
    if b is None:
        raise UsageError(f"{adapter.path}: {path} has no lora_b")
    return int(b.shape[-1] if b.ndim == 3 else b.shape[0])


def _put(module: nn.Module, adapter: AdapterFolder) -> None:
    shapes = {name: tuple(value.shape) for name, value in tree_flatten(module.parameters())}
    for name, value in adapter.weights.items():
        if shapes.get(name) != tuple(value.shape):
            raise UsageError(
                f"{adapter.path}: {name} has shape {tuple(value.shape)}, the model's is {shapes.get(name)}"
            )
    module.load_weights(list(adapter.weights.items()), strict=False)
