"""Which files of a repository are fetched: those that a model is loaded or converted from, never code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mlxserve.errors import ModelLoadError, ModelNotFoundError
from mlxserve.hub.reference import RepoReference

_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl")
_TEMPLATES = "additional_chat_templates/*.jinja"
_SAFETENSORS, _BIN, _GGUF = "model*.safetensors", "pytorch_model*.bin", "*.gguf"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Patterns:
    """Shell patterns on paths inside the repository. No ``include``: what a model needs."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


def choose_files(reference: RepoReference, names: Sequence[str], patterns: Patterns) -> tuple[str, ...]:
    """The files to fetch, in order.

    By default these are the texts at the top and one kind of weights: safetensors, else PyTorch's, else the
    only GGUF file (all parts of it). Folders of a repository hold the same weights for other programs.
    Raises ModelNotFoundError for a file or pattern that matches nothing, ModelLoadError if there are no
    weights or several GGUF files, by name.
    """
    if reference.file is not None:
        return _gguf_parts(reference, names)
    kept = [name for name in names if not _matches(name, patterns.exclude)]
    if patterns.include:
        chosen = tuple(sorted(name for name in kept if _matches(name, patterns.include)))
        if not chosen:
            raise ModelNotFoundError(f"{reference}: no file matches {', '.join(patterns.include)}")
        return chosen
    top = [name for name in kept if "/" not in name]
    texts = [name for name in top if _matches(name, _TEXTS)]
    texts += [name for name in kept if fnmatchcase(name, _TEMPLATES)]
    for pattern in (_SAFETENSORS, _BIN):
        weights = [name for name in top if fnmatchcase(name, pattern)]
        if weights:
            return tuple(sorted(texts + weights))
    return _only_gguf(reference, kept)


def gguf_of(names: Sequence[str]) -> str | None:
    """The GGUF file that a choice is about: the first part of a split one. None for other formats, or for
    more than one."""
    models = _gguf_models(names)
    return next(iter(models.values()))[0] if len(models) == 1 and len(_ggufs(names)) == len(names) else None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _ggufs(names: Sequence[str]) -> list[str]:
    # A vision projector goes with a model, it is none.
    return [n for n in names if n.endswith(".gguf") and not PurePosixPath(n).name.startswith("mmproj")]


def _gguf_models(names: Sequence[str]) -> dict[str, list[str]]:
    """The files of each GGUF model, parts in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(_ggufs(names)):
        split = _SPLIT.fullmatch(name)
        models.setdefault(name if split is None else f"{split['stem']}/{split['count']}", []).append(name)
    return models


def _only_gguf(reference: RepoReference, names: Sequence[str]) -> tuple[str, ...]:
    models = _gguf_models(names)
    if not models:
        raise ModelLoadError(f"{reference}: holds no model ({_SAFETENSORS}, {_BIN} or {_GGUF})")
    firsts = [parts[0] for parts in models.values()]
    if len(firsts) > 1:
        more = f" and {len(firsts) - _SHOWN} more" if len(firsts) > _SHOWN else ""
        raise ModelLoadError(
            f"{reference}: holds {len(firsts)} GGUF models, choose one as {reference}:FILE.gguf: "
            f"{', '.join(firsts[:_SHOWN])}{more}"
        )
    return _all_parts(reference, firsts[0], names)


def _gguf_parts(reference: RepoReference, names: Sequence[str]) -> tuple[str, ...]:
    file = reference.file
    assert file is not None
    if file not in names:
        found = _ggufs(names)
        listed = ", ".join(found[:_SHOWN]) if found else "none"
        raise ModelNotFoundError(f"{reference}: no such file in the repository; its GGUF files: {listed}")
    return _all_parts(reference, file, names)


def _all_parts(reference: RepoReference, file: str, names: Sequence[str]) -> tuple[str, ...]:
    split = _SPLIT.fullmatch(file)
    if split is None:
        return (file,)
    count = int(split["count"])
    parts = tuple(f"{split['stem']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1))
    missing = [part for part in parts if part not in names]
    if missing:
        raise ModelLoadError(f"{reference}: {len(missing)} of {count} parts are missing, first {missing[0]}")
    return parts
