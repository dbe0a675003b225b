"""Which Metal kernels run on this Mac: those that its self-test has found right and faster than MLX's own.

The test runs once for a chip, a version of the system, of MLX and of our kernels; its verdicts are kept in
``metal_kernels.json`` in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from mlxserve.config import home_dir
from mlxserve_kernels import dispatch
from mlxserve_kernels.self_test import Verdict, run_self_test
from mlxserve_kernels.self_test_cases import KERNELS

logger = logging.getLogger(__name__)

_FILE = "metal_kernels.json"
_settled: Sequence[Verdict] | None = None
"""What this process has said and goes by."""

SelfTest = Callable[[], Sequence[Verdict]]


@dataclass(frozen=True, slots=True)
class Machine:
    """What verdicts depend on. ``kernels`` is a digest of our sources."""

    chip: str
    system: str
    mlx: str
    kernels: str


def this_machine() -> Machine:
    system = platform.mac_ver()[0] or platform.release()
    return Machine(str(mx.device_info()["device_name"]), system, version("mlx"), _digest())


@cache
def _digest() -> str:
    found = hashlib.sha256()
    for folder in ("metal", "metal_kernels", "ops"):
        texts = {
            f.name: f.read_bytes()
            for f in files("mlxserve_kernels").joinpath(folder).iterdir()
            if f.is_file()
        }
        for name in sorted(texts):
            found.update(name.encode() + b"\0" + texts[name])
    return found.hexdigest()[:16]


def settle() -> Sequence[Verdict] | None:
    """Where Metal kernels are what runs, let those run that have passed; the test is made when there is none
    for this machine. Returns the verdicts, or None where nothing was to settle. One line is logged for each
    kernel that failed.
    """
    if dispatch.selection().name != "metal":
        return None
    if _settled is not None:
        return _settled
    verdicts: Sequence[Verdict] | None = read_verdicts(this_machine())
    if verdicts is None:
        logger.warning("Trying the Metal kernels on this Mac, once; this takes about a minute.")
        verdicts = test_again(run_self_test)
    apply(verdicts)
    return verdicts


def test_again(self_test: SelfTest) -> Sequence[Verdict]:
    """Run the test and keep its verdicts."""
    verdicts = self_test()
    write_verdicts(this_machine(), verdicts)
    return verdicts


def apply(verdicts: Sequence[Verdict]) -> None:
    """Let the kernels run that passed, in this process from now on; one line for each that is broken."""
    global _settled
    for verdict in verdicts:
        if verdict.status in ("wrong", "failed"):
            logger.warning(
                "The Metal kernel %s is not used, MLX's own is: %s (mlxserve doctor)",
                verdict.kernel,
                verdict.detail,
            )
    proven = frozenset(verdict.kernel for verdict in verdicts if verdict.is_used)
    dispatch.use(replace(dispatch.selection(), proven=proven))
    _settled = verdicts


def read_verdicts(machine: Machine) -> list[Verdict] | None:
    """Those of an earlier test on this machine; None where there is none, or its file is damaged, which is
    said in one line."""
    path = home_dir() / _FILE
    try:
        stored = json.loads(path.read_bytes())
        if stored["machine"] != asdict(machine):
            return None
        verdicts = [Verdict(**fields) for fields in stored["verdicts"]]
        if [verdict.kernel for verdict in verdicts] != list(KERNELS):
            raise ValueError("it lists other kernels")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is not used: %s", path, " ".join(str(error).split()) or type(error).__name__)
        return None
    return verdicts


def write_verdicts(machine: Machine, verdicts: Sequence[Verdict]) -> None:
    """Replace the file as a whole. A folder that cannot be written costs a test at each start, and a line."""
    path = home_dir() / _FILE
    content = {"machine": asdict(machine), "verdicts": [verdict.as_dict() for verdict in verdicts]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_FILE)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)
