"""Which layers of a model are trained: by name or preset, in the last decoder layers or all."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from mlxserve.errors import UsageError
from mlxserve_convert.roles import layer_of, role_of

PRESETS: dict[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "dense"),
    "qv": ("q_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"),
}
"""Names of layers by preset. ``linear`` is every linear layer of a decoder layer but routers, ``experts``
those of experts; both follow from the kinds of the layers."""
_BY_KIND = ("linear", "experts")


def chosen_layers(
    kinds: Mapping[str, str], wanted: Sequence[str], num_layers: int, last: int | None
) -> tuple[str, ...]:
    """The paths to be trained, sorted.

    ``kinds`` has each layer that could be by its path in the model (``model.layers.3.mlp.up_proj``) with its
    kind: ``linear``, ``experts`` or ``embedding``. ``last`` counts decoder layers from the end; more than
    there are is an error, -1 and None are all. Raises UsageError for a name that no layer has.
    """
    if last is not None and last > num_layers:
        raise UsageError(f"layers is {last}, but the model has only {num_layers}")
    first = 0 if last is None or last == -1 else num_layers - last
    inside = {path: kind for path, kind in kinds.items() if (layer_of(path) or 0) >= first}
    chosen: set[str] = set()
    for name in wanted:
        found = {path for path, kind in inside.items() if _is_named(path, kind, name)}
        if not found:
            raise UsageError(_no_layer(name, inside))
        chosen |= found
    return tuple(sorted(chosen, key=_order))


def _order(path: str) -> tuple[int, str]:
    layer = layer_of(path)
    return (-1 if layer is None else layer, path)


def _is_named(path: str, kind: str, name: str) -> bool:
    leaf = path.rsplit(".", 1)[-1]
    is_inside = layer_of(path) is not None
    if name == "linear":
        return is_inside and kind in ("linear", "experts") and role_of(path) != "router"
    if name == "experts":
        return kind == "experts"
    if name in PRESETS:
        return is_inside and leaf in PRESETS[name]
    return path == name or path.endswith(f".{name}")


def _no_layer(name: str, kinds: Mapping[str, str]) -> str:
    leaves = sorted({path.rsplit(".", 1)[-1] for path in kinds})
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], leaves, n=1)
    hint = f", did you mean {near[0]!r}" if near else ""
    presets = ", ".join((*_BY_KIND, *PRESETS))
    return (
        f"target {name!r} matches no layer that is trained{hint}; this model has {', '.join(leaves)}; "
        f"presets: {presets}"
    )
