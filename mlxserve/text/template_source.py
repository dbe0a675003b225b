"""Where a model folder keeps its chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import ModelLoadError
from mlxserve.json_file import read_json_object


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """``tools_source`` is set where the model publishes a second template for requests with tools."""

    path: Path
    source: str
    tools_source: str | None = None


def find_template_source(folder: Path) -> TemplateSource | None:
    """In this order: ``chat_template.jinja``, ``chat_template.json``, ``tokenizer_config.json``, whose
    ``chat_template`` is a text or a list of named ones ("default", and "tool_use" for tools).

    Raises ModelLoadError, naming the file, for one that cannot be read.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return TemplateSource(path, path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        value = read_json_object(path).get("chat_template")
        if isinstance(value, str):
            return TemplateSource(path, value)
        if value is not None:
            return _named(path, value)
    return None


def _named(path: Path, value: object) -> TemplateSource:
    templates: dict[str, str] = {}
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not all(
            isinstance(item.get(key), str) for key in ("name", "template")
        ):
            raise ModelLoadError(f"{path}: chat_template must be a string or a list of named templates")
        templates[item["name"]] = item["template"]
    if "default" not in templates:
        names = json.dumps(sorted(templates))
        raise ModelLoadError(f'{path}: chat_template has no template named "default", only {names}')
    return TemplateSource(path, templates["default"], templates.get("tool_use"))
