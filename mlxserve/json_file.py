"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelLoadError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file.

    Raises ModelLoadError, naming the file, for anything but a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value
