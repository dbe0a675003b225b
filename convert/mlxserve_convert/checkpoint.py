"""A source of any format, opened: its config, its tensors as weights, and the files that go along."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx

from mlxserve_convert.weights import Weight


@dataclass(slots=True)
class Checkpoint:
    """What a reader gives. Used as a context manager, it lets its files go at the end.

    ``config`` is a config.json without quantization. ``weights`` go by the names of the source, which
    mlx-lm's ``sanitize`` translates, or with ``are_names_final`` by those of the model's parameters;
    ``source_names`` has those of the source then, for messages.
    ``keeps_layouts``: without other wishes every tensor stays in the source's own format. ``is_mlx``: the
    source is what a conversion makes. ``float_dtype`` is that of the floats which quantized weights become
    without other wishes (None: what they are read as).
    ``num_source_bytes`` is the size of the source's tensors, where formats without a layout become floats as
    long as the result does not grow much beyond it (None: such formats become 8-bit).
    ``identity`` changes when any of the source's files does. ``card`` has what the source says of itself, in
    the fields of a hub card's front matter (license, base_model, ...).
    """

    path: Path
    source_format: str
    config: dict[str, Any]
    weights: dict[str, Weight]
    write_texts: Callable[[Path], None]
    identity: str
    are_names_final: bool = False
    source_names: Mapping[str, str] = field(default_factory=dict)
    keeps_layouts: bool = False
    is_mlx: bool = False
    float_dtype: mx.Dtype | None = None
    num_source_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)
    card: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def identity_of(files: Iterable[Path]) -> str:
    """A name for these files as they are now: their paths, sizes and times."""
    digest = hashlib.sha256()
    for file in sorted(files):
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()
