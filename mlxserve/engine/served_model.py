"""A model as the server and the commands see it: names, limits, text tools and a running engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.config import EngineConfig
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.model_target import ModelTarget
from mlxserve.engine.scripted_target import ScriptedTarget
from mlxserve.errors import ModelLoadError
from mlxserve.json_file import read_json_object
from mlxserve.models.loader import context_length, load_model, read_config
from mlxserve.text.chat_template import ChatTemplate, load_chat_template
from mlxserve.text.scripted import load_scripted
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer
from mlxserve.text.tool_parser import detect_tool_format
from mlxserve.types import SamplingParams

_UNSTATED_CONTEXT = 4096
"""Context window of a config that states none."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``context_length`` is what is enforced: the trained window or less, and never more than the KV
    memory holds. ``default_sampling`` is the checkpoint's own advice (generation_config.json). An adapter is
    a model with the engine of its base, whose id is ``parent``.
    """

    id: str
    created: int
    context_length: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_format: str | None
    default_sampling: SamplingParams
    engine: AsyncEngine
    adapter_id: int | None = None
    parent: str | None = None

    async def close(self) -> None:
        """End the engine; streams end as aborted. Idempotent."""
        await self.engine.close()


def open_folder(folder: Path, model_id: str, config: EngineConfig) -> ServedModel:
    """Load an MLX model folder and start its engine; blocks until it is ready.

    Raises ModelLoadError, or UnsupportedModelError for an architecture that is not served yet.
    """
    model_config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer)
    default_sampling = read_default_sampling(folder)
    engine = AsyncEngine(
        lambda: ModelTarget(load_model(folder), config.page_size, config.kv_bits), config, name=model_id
    )
    trained = context_length(model_config) or _UNSTATED_CONTEXT
    return ServedModel(
        id=model_id,
        created=int(time.time()),
        context_length=min(trained, engine.max_sequence_tokens),
        tokenizer=tokenizer,
        template=template,
        tool_format=None if template is None else detect_tool_format(template.source),
        default_sampling=default_sampling,
        engine=engine,
    )


def open_scripted(path: Path, config: EngineConfig) -> ServedModel:
    """Start an engine on a scripted model; UsageError when the script is wrong."""
    spec = load_scripted(path)
    engine = AsyncEngine(lambda: ScriptedTarget(spec, config.page_size), config, name=spec.id)
    return ServedModel(
        id=spec.id,
        created=int(time.time()),
        context_length=min(spec.context_length, engine.max_sequence_tokens),
        tokenizer=spec.tokenizer,
        template=spec.template,
        tool_format=spec.tool_format,
        default_sampling=SamplingParams(),
        engine=engine,
    )


def read_default_sampling(folder: Path) -> SamplingParams:
    """Sampling advice of generation_config.json; neutral values where it gives none."""
    path = folder / "generation_config.json"
    advice = read_json_object(path)
    if advice.get("do_sample") is False:
        return SamplingParams()
    return SamplingParams(
        temperature=_number(path, advice, "temperature", 1.0),
        top_k=int(_number(path, advice, "top_k", 0)) or None,
        top_p=_number(path, advice, "top_p", 1.0),
        min_p=_number(path, advice, "min_p", 0.0),
    )


def _number(path: Path, advice: dict[str, Any], key: str, default: float) -> float:
    value = advice.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ModelLoadError(f"{path}: {key} must be a number of at least 0, got {value!r}")
    return float(value)
