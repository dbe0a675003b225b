"""clang and the linker from the `ziglang` wheel, and the commands that turn Metal into a shared object.

One dialect serves both ends: clang's C++ for OpenCL has Metal's address spaces, so the compiler refuses what
Metal would refuse, and on x86-64 the spaces share one flat memory, so that -fsanitize=thread instruments
every access.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from metal_on_host.errors import MetalHostError, MetalSourceError
from metal_on_host.rewrite import AUTHOR_FILES

_TO_BFLOAT = re.compile(r"to '(?:bfloat|bfloat16_t|__bf16)'")
HERE = Path(__file__).parent
SHIM = HERE / "shim"
RUNTIME = HERE / "runtime"

_TARGET = ("-target", "x86_64-linux-gnu")
_DIALECT = (
    *_TARGET,
    "-x",
    "cl",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-nostdinc",
    "-cl-single-precision-constant",
    "-Xclang",
    "-cl-ext=+all",
)
_INSTRUMENT = (
    "-O1",
    "-march=x86-64-v3",
    "-fPIC",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-gline-tables-only",
    "-fsanitize=thread,array-bounds,integer-divide-by-zero",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-atomics=0",
)


@cache
def zig() -> Path:
    """The zig executable of the `ziglang` wheel. Raises MetalHostError where it is not installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise MetalHostError(
            "metal_on_host needs the compiler of the `ziglang` wheel: pip install 'mlxserve[test]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "zig"


def run_zig(tool: str, arguments: Sequence[str], *, stdin: str = "") -> str:
    """Runs `zig TOOL ARGUMENTS`; returns its output and warnings. Raises MetalSourceError with its words."""
    command = [str(zig()), tool, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        noise = (": warning: ", "In file included from ")
        words = "\n".join(line for line in done.stderr.splitlines() if not any(n in line for n in noise))
        raise MetalSourceError(words.strip() or f"zig {tool} ended with {done.returncode}")
    return done.stdout + done.stderr


def preprocess(source: str, include_dirs: Sequence[Path]) -> str:
    includes = [flag for folder in include_dirs for flag in ("-I", str(folder))]
    shim = ["-isystem", str(SHIM), "-include", str(SHIM / "prelude.h")]
    return run_zig("clang", [*_DIALECT, *shim, *includes, "-E", "-o", "-", "-"], stdin=source)


def compile_kernel(preamble: str, source: str, shared_object: Path) -> None:
    """Compiles rewritten source, behind a preamble that many sources share, to an instrumented shared object.

    The object is put in place by a rename; the preamble is kept precompiled in the same folder.
    """
    flags = ["-Wno-everything", "-Wimplicit-float-conversion", "-fno-caret-diagnostics"]
    if preamble:
        flags += ["-include-pch", str(_precompiled(preamble, shared_object.parent))]
    with tempfile.TemporaryDirectory(dir=shared_object.parent) as folder:
        unit, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        command = [*_DIALECT, *_INSTRUMENT, *flags, "-c", "-o", str(unit), "-"]
        _refuse_bfloat_conversions(run_zig("clang", command, stdin=source))
        run_zig("ld.lld", ["-shared", "--build-id=none", "-o", str(linked), str(unit)])
        os.replace(linked, shared_object)


def _precompiled(preamble: str, folder: Path) -> Path:
    # The folder is part of the name: a precompiled header names its source by path.
    digest = hashlib.sha256(f"{fingerprint()} {folder.resolve()} {preamble}".encode()).hexdigest()[:32]
    header, out = folder / f"preamble-{digest}.cl", folder / f"preamble-{digest}.pch"
    if out.exists():
        return out
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written, built = Path(scratch) / "preamble.cl", Path(scratch) / "preamble.pch"
        written.write_text(preamble)
        os.replace(written, header)
        emit = ["-Wno-everything", "-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp"]
        run_zig("clang", [*_DIALECT, *_INSTRUMENT, *emit, "-c", "-o", str(built), str(header)])
        os.replace(built, out)
    return out


def _refuse_bfloat_conversions(warnings: str) -> None:
    """Metal converts nothing to bfloat implicitly; clang does, with a warning."""
    for line in warnings.splitlines():
        if "implicit conversion" in line and any(f in line for f in AUTHOR_FILES) and _TO_BFLOAT.search(line):
            raise MetalSourceError(line.replace("warning:", "error: Metal needs a cast here:"))


def build_runtime(folder: Path) -> Path:
    """The runtime's shared object, compiled once for each content."""
    sources = sorted(RUNTIME.glob("*.cpp"))
    out = folder / f"runtime-{fingerprint()}.so"
    if out.exists():
        return out
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        units = []
        for source in sources:
            unit = Path(scratch) / (source.stem + ".o")
            flags = [
                "-std=c++20",
                "-O2",
                "-march=x86-64-v3",
                "-fPIC",
                "-ffreestanding",
                "-nostdinc",
                "-nostdinc++",
            ]
            flags += [
                "-fno-exceptions",
                "-fno-rtti",
                "-fno-stack-protector",
                "-fno-threadsafe-statics",
                "-Wall",
                "-Werror",
            ]
            run_zig("clang", [*_TARGET, "-x", "c++", *flags, "-c", "-o", str(unit), str(source)])
            units.append(str(unit))
        linked = Path(scratch) / "runtime.so"
        run_zig("ld.lld", ["-shared", "--build-id=none", "-o", str(linked), *units])
        os.replace(linked, out)
    return out


@cache
def fingerprint() -> str:
    """A hash of the compiler's version, shim, runtime and translation: part of every cache key."""
    digest = hashlib.sha256(version("ziglang").encode())
    translation = [HERE / f"{name}.py" for name in ("entries", "library", "rewrite", "tokens", "toolchain")]
    for file in sorted([*SHIM.iterdir(), *RUNTIME.iterdir(), *translation]):
        if file.is_file():
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
