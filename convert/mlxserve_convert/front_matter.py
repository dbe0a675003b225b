"""What a source says of itself, in the fields of a hub card's front matter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_front_matter(path: Path) -> dict[str, Any]:
    """The fields of a card's front matter; none if it has none, or one that is no YAML mapping."""
    if not path.is_file():
        return {}
    import yaml
    from huggingface_hub.repocard import metadata_load

    try:
        found = metadata_load(path)
    except (ValueError, OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def gguf_front_matter(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same from the ``general.*`` keys of a GGUF file."""
    found: dict[str, Any] = {}
    for field, key in (
        ("license", "general.license"),
        ("license_name", "general.license.name"),
        ("license_link", "general.license.link"),
        ("language", "general.languages"),
    ):
        if metadata.get(key):
            found[field] = metadata[key]
    for key in ("general.source.repo_url", "general.base_model.0.repo_url"):
        url = metadata.get(key)
        if isinstance(url, str) and url.startswith("https://huggingface.co/"):
            found["base_model"] = url.removeprefix("https://huggingface.co/").strip("/")
            break
    return found
