"""From a model's name on the command line to a running engine: shared by serve, chat and generate."""

from __future__ import annotations

import dataclasses

from rich.console import Console

from mlxserve.cli.model_source import PreparedModel, prepare_model
from mlxserve.cli.process import end_process
from mlxserve.config import EngineConfig
from mlxserve.engine.served_model import ServedModel, open_folder, open_scripted
from mlxserve.errors import UsageError
from mlxserve_kernels import dispatch


def open_model(name: str, config: EngineConfig, *, console: Console) -> ServedModel:
    """Resolve, pull, import and load ``name``; blocks until its engine is ready."""
    return load_model(prepare_model(name, console=console), config, console=console)


def load_model(
    source: PreparedModel, config: EngineConfig, *, console: Console, max_context: int | None = None
) -> ServedModel:
    """Load a model that is on this machine; blocks until its engine is ready.

    ``max_context`` lowers the context length. Raises UsageError when the model supports less. A signal
    during the load ends the process: the engine's thread may be deep in a load that nothing can stop.
    """
    _check_kernels()
    try:
        with console.status(f"Loading {source.id}"):
            model = _open(source, config)
    except KeyboardInterrupt:
        end_process(130)
    except SystemExit:
        end_process(0)
    if max_context is None:
        return model
    if max_context > model.context_length:
        raise UsageError(
            f"--max-context {max_context} is more than {model.id} supports: {model.context_length} tokens"
        )
    return dataclasses.replace(model, context_length=max_context)


def _check_kernels() -> None:
    """The kernels read their own variables, below our exception tree; ask before a thread does."""
    try:
        dispatch.decoder_kind()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _open(source: PreparedModel, config: EngineConfig) -> ServedModel:
    if source.kind == "scripted":
        return open_scripted(source.path, config)
    return open_folder(source.path, source.id, config)
