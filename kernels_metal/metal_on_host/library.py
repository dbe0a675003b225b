"""Compiles a Metal source and launches its kernels: the layer under metal_kernel, and the way to run kernels
that bring their own signatures (MLX's own, from the headers of its wheel)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_on_host import machine, toolchain
from metal_on_host.entries import Entry, Kernel, Parameter
from metal_on_host.errors import MetalSourceError
from metal_on_host.machine import Argument, Loaded, Settings, Target, Triple
from metal_on_host.report import Report
from metal_on_host.rewrite import rewrite


@cache
def mlx_include() -> Path:
    """The folder of MLX's headers, in the installed wheel."""
    return Path(str(mx.__file__)).parent / "include"


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlxserve" / "metal_on_host"


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled source: `entries` by host name."""

    loaded: Loaded
    entries: Mapping[str, Entry]

    def entry(self, name: str) -> Entry:
        """Raises MetalSourceError with the names there are."""
        if name not in self.entries:
            raise MetalSourceError(f"no kernel {name!r}; there are {', '.join(sorted(self.entries))}")
        return self.entries[name]

    def launch(
        self,
        name: str,
        arguments: Sequence[Argument | None],
        grid: Triple,
        threadgroup: Triple,
        settings: Settings,
        *,
        label: str | None = None,
    ) -> Report:
        """Runs kernel `name` over `grid` threads; `arguments[i]` is bound to buffer i.

        `label` names the kernel in reports where `name` is an instance's long one.
        """
        target = Target(label or name, name, self.loaded, self.entry(name).symbol)
        return machine.launch(target, arguments, grid, threadgroup, settings)


_NAME_IT = "\nHere, not in Metal: a method qualified `thread` needs a named object, not a temporary."

_libraries: dict[str, Library] = {}


def compile_library(
    source: str,
    *,
    include_dirs: Sequence[Path] = (),
    function_constants: Mapping[str, bool | int | float] | None = None,
    cache_dir: Path | None = None,
) -> Library:
    """Compiles Metal source text, or finds it compiled: by content, in this process and in the cache folder.

    Raises MetalSourceError with the compiler's words.
    """
    constants = dict(function_constants or {})
    text = json.dumps(
        [source, [str(d) for d in include_dirs], constants, version("mlx"), toolchain.fingerprint()]
    )
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    folder = cache_dir or default_cache_dir()
    known = _libraries.get(f"{folder}/{key}")
    if known is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    shared_object, description = folder / f"{key}.so", folder / f"{key}.json"
    if not (shared_object.exists() and description.exists()):
        entries = _compile(source, include_dirs, constants, shared_object)
        _write(description, json.dumps([_describe(entry) for entry in entries]))
    entries = [_undescribe(item) for item in json.loads(description.read_text())]
    library = Library(machine.load(shared_object), {entry.host_name: entry for entry in entries})
    _libraries[f"{folder}/{key}"] = library
    return library


def _compile(
    source: str,
    include_dirs: Sequence[Path],
    constants: Mapping[str, bool | int | float],
    shared_object: Path,
) -> list[Entry]:
    try:
        rewritten = rewrite(toolchain.preprocess(source, include_dirs), constants)
        toolchain.compile_kernel(rewritten.preamble, rewritten.text, shared_object)
    except MetalSourceError as error:
        hint = _NAME_IT if "in default address space, but method expects" in str(error) else ""
        raise MetalSourceError(f"{error}{hint}") from None
    return rewritten.entries


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _describe(entry: Entry) -> dict[str, Any]:
    kernel = entry.kernel
    return {
        "host_name": entry.host_name,
        "expression": entry.expression,
        "symbol": entry.symbol,
        "kernel": kernel.name,
        "template": kernel.template,
        "parameters": [[p.name, p.type, p.index, p.attribute] for p in kernel.parameters],
    }


def _undescribe(item: dict[str, Any]) -> Entry:
    parameters = tuple(Parameter(*p) for p in item["parameters"])
    kernel = Kernel(item["kernel"], item["template"], parameters)
    return Entry(item["host_name"], kernel, item["expression"], item["symbol"])
