"""From a model's name to something that the engine opens: pulls and imports what is needed, once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mlxserve.errors import ModelLoadError
from mlxserve.hub import (
    BUILTIN_MODELS,
    ModelSource,
    Patterns,
    Pull,
    PullProgress,
    RepoReference,
    import_folder,
    parse_reference,
    pull_builtin,
    pull_repository,
    resolve,
)
from mlxserve.models.safetensors_file import read_tensors
from mlxserve_convert import ConvertOptions, convert
from mlxserve_convert import Progress as Written
from mlxserve_convert.options import OnProgress
from mlxserve_convert.output_folder import OutputBusyError
from mlxserve_convert.torch_file import has_torch_files

_BUSY_SECONDS = 0.5
"""Between looks at an import that another process is busy with."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """``path`` is an MLX folder, or the JSON file of a scripted model. ``id`` is its name for clients."""

    kind: Literal["folder", "scripted"]
    id: str
    path: Path


def prepare_model(name: str, *, console: Console) -> PreparedModel:
    """Resolves ``name``, downloads what is missing and imports a GGUF file into the store.

    Both happen once: a later call finds the result. Folders of floats are used as they are, a
    quantization that nobody asked for would change the model. Raises MlxserveError subclasses with
    one line; progress goes to ``console``.
    """
    source = resolve(name)
    if source.kind == "scripted":
        assert source.path is not None
        return PreparedModel("scripted", source.name, source.path)
    path = fetch(source, console=console)
    if source.kind in ("builtin", "gguf") or path.suffix == ".gguf":
        path = _imported(path, console=console)
    elif source.kind == "hub" and has_torch_files(path) and not any(path.glob("*.safetensors")):
        raise ModelLoadError(
            f"{source.name}: has PyTorch files only (pytorch_model*.bin), which are not run as they are; "
            f"convert it first: mlxserve convert {source.name}"
        )
    return PreparedModel("folder", source.name, path)


def fetch(source: ModelSource, *, console: Console) -> Path:
    """The file or folder of a source, downloaded if it is not here."""
    if source.path is not None:
        return source.path
    if source.kind == "builtin":
        model = BUILTIN_MODELS[source.name]
        with console.status(f"Downloading {model.name} ({model.num_bytes / 1e6:.0f} MB)"):
            return pull_builtin(model)
    reference = parse_reference(source.name)
    assert reference is not None
    return pull(reference, Patterns(), console=console).model_path


def pull(reference: RepoReference, patterns: Patterns, *, console: Console, offline: bool = False) -> Pull:
    """Pulls with a bar on ``console``, and checks the weights as they would be for loading."""
    with _byte_progress(console) as progress:
        task = progress.add_task(f"Pulling {reference}", total=None)

        def update(pulled: PullProgress) -> None:
            progress.update(task, completed=pulled.done_bytes, total=pulled.total_bytes)

        found = pull_repository(reference, patterns, offline=offline, on_pull=update)
    if not patterns.include:
        _check_pulled(found)
    return found


def _check_pulled(found: Pull) -> None:
    path = found.model_path
    if path.suffix == ".gguf":
        return
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{found.reference}: has no config.json, this is not a model that can be loaded")
    if any(name.endswith(".safetensors") for name in found.files):
        read_tensors(path)


def _imported(gguf: Path, *, console: Console) -> Path:
    folder = import_folder(gguf)
    while not folder.is_dir():
        try:
            with conversion_progress(console, f"Importing {gguf.name}") as on_progress:
                convert(gguf, folder, ConvertOptions(), on_progress)
        except OutputBusyError:
            with console.status(f"Another process imports {gguf.name}"):
                time.sleep(_BUSY_SECONDS)
    return folder


def _byte_progress(console: Console) -> Progress:
    """A bar of bytes with rate and time left; nothing where nobody looks."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def conversion_progress(console: Console, title: str) -> Iterator[OnProgress]:
    """A progress bar on ``console``, as the callback that ``convert`` takes."""
    with _byte_progress(console) as progress:
        task = progress.add_task(title, total=None)

        def update(written: Written) -> None:
            progress.update(task, completed=written.done_bytes, total=written.total_bytes)

        yield update
