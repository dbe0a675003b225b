"""Rope scaling of GGUF files in the terms of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxserve.errors import ConversionError

if TYPE_CHECKING:
    from mlxserve_convert.gguf_models import ConfigReader

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
ROPE_TENSORS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
"""Tensors that become settings of the config."""


def rope_scaling(reader: ConfigReader, theta: float, rotated: int) -> dict[str, Any] | None:
    """``rope_scaling`` for a base and so many rotated columns a head, None where nothing is scaled. Raises
    ConversionError for a rule that is unknown, or that mlx-lm's architecture does not read."""
    scaling = _scaling(reader, theta, rotated)
    known = reader.architecture.rope_kinds
    if scaling is not None and scaling["type"] not in known:
        raise reader.fail(
            "rope.scaling.type",
            f"{scaling['type']!r} is not supported in {reader.architecture.name} files, only: "
            f"{', '.join(sorted(known)) or 'none'}",
        )
    return scaling


def _scaling(reader: ConfigReader, theta: float, rotated: int) -> dict[str, Any] | None:
    kind = reader.get("rope.scaling.type", "none")
    if LONG_FACTORS in reader.tensors:
        return _longrope(reader, rotated)
    if ROPE_FACTORS in reader.tensors:
        if kind not in ("none", "llama3"):
            raise reader.fail(
                "rope.scaling.type", f"{str(kind)[:40]!r} together with {ROPE_FACTORS} is not supported"
            )
        return _llama3_of(reader, theta, rotated)
    factor = reader.get("rope.scaling.factor", reader.get("rope.scale_linear", 1.0))
    if factor != 0:
        for key in ("rope.scale_linear", "rope.scaling.factor"):
            if reader.get(key) is not None:
                factor = reader.number(key)
    if kind == "none" and reader.get("rope.scaling.type") is None and factor not in (0, 1.0):
        kind = "linear"
    if kind == "none" or factor in (0, 1.0):
        return None
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": shortest_float(factor)}
    if kind == "yarn":
        return _yarn(reader, shortest_float(factor))
    raise reader.fail(
        "rope.scaling.type",
        f"{str(kind)[:40]!r} is not supported, only none, linear, yarn, longrope and llama3",
    )


def _yarn(reader: ConfigReader, factor: float) -> dict[str, Any]:
    if reader.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise reader.fail("rope.scaling.attn_factor", "an attention factor of its own is not supported")
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": reader.integer("rope.scaling.original_context_length"),
        "beta_fast": reader.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": reader.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(reader: ConfigReader, rotated: int) -> dict[str, Any]:
    original = reader.integer("rope.scaling.original_context_length")
    scale = reader.integer("context_length") / original
    expected = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    found = reader.get("rope.scaling.attn_factor", expected)
    if not math.isclose(found, expected, rel_tol=1e-4):
        raise reader.fail("rope.scaling.attn_factor", f"expected {expected:.6g}, found {found:.6g}")
    reader.warnings.append(
        f"mlx-lm uses the factors for long texts at every length, the original does so beyond {original} "
        "tokens alone"
    )
    return {
        "type": "longrope",
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "long_factor": _factors(reader, LONG_FACTORS, rotated),
        "short_factor": _factors(reader, SHORT_FACTORS, rotated),
    }


def _factors(reader: ConfigReader, name: str, rotated: int) -> list[float]:
    tensor = reader.tensors.get(name)
    if tensor is None:
        raise ConversionError(f"{reader.path}: tensor {name!r} is missing")
    if tensor.type_name != "F32" or tensor.shape != (rotated // 2,):
        raise ConversionError(
            f"{reader.path}: {name} should be F32 of shape ({rotated // 2},), found {tensor.type_name} of "
            f"shape {tensor.shape}"
        )
    return [shortest_float(value) for value in reader.data(name).view(np.float32)]


def _llama3_of(reader: ConfigReader, theta: float, rotated: int) -> dict[str, Any]:
    scaling = fit_llama3_scaling(_factors(reader, ROPE_FACTORS, rotated), theta)
    if scaling is None:
        raise ConversionError(f"{reader.path}: {ROPE_FACTORS} follows no known rule (llama3 was tried)")
    return scaling


def shortest_float(value: float) -> float:
    """The shortest decimal that names the same float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def llama3_factors(scaling: Mapping[str, Any], theta: float, count: int) -> list[float]:
    """How much slower each of ``count`` frequencies turns under Llama 3's rule."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    factors = []
    for index in range(count):
        turns = context / (2 * math.pi * theta ** (index / count))
        if turns < low:
            factors.append(float(factor))
        elif turns > high:
            factors.append(1.0)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def fit_llama3_scaling(factors: list[float], theta: float) -> dict[str, Any] | None:
    """The Llama 3 parameters that give these factors, None when none do."""
    for scaling in (_llama3(max(factors), 4.0, 8192), _fit_smooth_part(factors, theta)):
        if scaling is None:
            continue
        expected = llama3_factors(scaling, theta, len(factors))
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            return scaling
    return None


def _llama3(factor: float, high: float, context: int) -> dict[str, Any]:
    return {
        "type": "llama3",
        "rope_type": "llama3",
        "factor": shortest_float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _fit_smooth_part(factors: list[float], theta: float) -> dict[str, Any] | None:
    """Between the two limits, the smoothing is linear in the turns per token: two unknowns, with the
    lower limit set to 1 (the rule depends on the ratios of its parameters only)."""
    factor = max(factors)
    points = [
        (1 / (2 * math.pi * theta ** (index / len(factors))), (1 / value - 1 / factor) / (1 - 1 / factor))
        for index, value in enumerate(factors)
        if 1 < value < factor
    ]
    if len(points) < 2:
        return None
    slope, offset = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    if offset >= 0 or slope <= 0:
        return None
    high = 1 - 1 / float(offset)
    return _llama3(factor, round(high, 4), round(float(slope) * (high - 1)))
