"""The mlx-lm model that a config describes: built without weights, to know its names and shapes.

Only mlx-lm's own model files are used. Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelLoadError, UnsupportedModelError

_HELPER_MODULES = frozenset(
    {
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    }
)
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_nextn_predict_layers")
_MAX_DEPTH = 4096


def known_model_types() -> list[str]:
    """The values of ``model_type`` that mlx-lm has a file or an alias for."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING

    files = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    return sorted((files - _HELPER_MODULES) | set(MODEL_REMAPPING))


def build_model(config: dict[str, Any], source: Path) -> Any:
    """An mlx-lm model of random, unevaluated parameters.

    Raises UnsupportedModelError for an unknown ``model_type`` and ModelLoadError for a config that
    the architecture cannot be built from.
    """
    model_class, args_class = _classes(config, source)
    _check_depth(config, source)
    try:
        return model_class(args_class.from_dict(config))
    except Exception as error:
        # mlx-lm computes with the values of a config as they come: anything may go wrong there.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelLoadError(
            f"{source}: config.json does not describe a {config['model_type']} model: {reason}"
        ) from error


def _check_depth(config: dict[str, Any], source: Path) -> None:
    """A wrong number of layers would be built, one after the other, until the memory ends."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        for key in _DEPTHS:
            depth = place.get(key)
            if isinstance(depth, int | float) and not 0 <= depth <= _MAX_DEPTH:
                raise ModelLoadError(
                    f"{source}: config.json has {key} {str(depth)[:20]}, at most {_MAX_DEPTH} are read"
                )


def config_fields(config: dict[str, Any], source: Path) -> frozenset[str]:
    """The fields of config.json that mlx-lm's architecture reads; it ignores all others in silence."""
    return frozenset(inspect.signature(_classes(config, source)[1]).parameters)


def check_model_type(config: dict[str, Any], source: Path) -> None:
    """Raises UnsupportedModelError unless mlx-lm has the architecture and no foreign code is asked for."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelLoadError(f"{source}: config.json has no model_type")
    if "model_file" in config:
        raise UnsupportedModelError(
            f"{source}: config.json wants to run its own code ({config['model_file']!r}), which is never done"
        )
    if model_type not in known_model_types():
        raise UnsupportedModelError(_unknown_type(model_type, config, source))


def _classes(config: dict[str, Any], source: Path) -> tuple[Any, Any]:
    check_model_type(config, source)
    from mlx_lm.utils import _get_classes

    try:
        classes: tuple[Any, Any] = _get_classes(config)
    except ValueError as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    except SystemExit:
        # A file of mlx-lm ends the process when a package that it needs is missing.
        model_type = config["model_type"]
        raise UnsupportedModelError(
            f"{source}: model_type {model_type!r} is not supported: mlx-lm needs one more package for it"
        ) from None
    return classes


def _unknown_type(model_type: str, config: dict[str, Any], source: Path) -> str:
    known = known_model_types()
    near = difflib.get_close_matches(model_type, known, n=5, cutoff=0.65)
    hint = f"near it: {', '.join(near)}" if near else f"known are {', '.join(known)}"
    code = ""
    if config.get("auto_map"):
        code = "; the checkpoint's own code (auto_map) is never run"
    return f"{source}: model_type {model_type[:100]!r} is not supported ({hint}){code}"
