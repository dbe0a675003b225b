"""The one or several files of a GGUF model.

Split files are called ``NAME-00001-of-0000N.gguf``; each says in ``split.no`` (from 0) and ``split.count``
which part it is, the first has the metadata of the model. Any part opens all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.gguf_file import GGUFFile, GGUFTensor

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFParts:
    """The open files together: ``metadata`` of the first, ``tensors`` of all. ``path`` is the file that was
    asked for. Raises ConversionError for a part that is missing or that belongs to another model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[GGUFFile] = []
        try:
            self.files.append(GGUFFile(path))
            count = self.files[0].metadata.get("split.count", 0)
            if not isinstance(count, int):
                raise ConversionError(f"{path}: split.count: expected an integer, found {str(count)[:40]!r}")
            if count > 1:
                self._open_parts(count)
            self.metadata: dict[str, Any] = self.files[0].metadata
            self._owners = self._by_tensor()
        except BaseException:
            self.close()
            raise
        self.tensors: dict[str, GGUFTensor] = {
            name: tensor for file in self.files for name, tensor in file.tensors.items()
        }
        self._check_count()

    def _open_parts(self, count: int) -> None:
        match = _PART_NAME.fullmatch(self.path.name)
        if match is None or int(match[3]) != count:
            raise ConversionError(
                f"{self.path}: is one of {count} parts, but is not called NAME-00001-of-{count:05d}.gguf: "
                "the others cannot be found"
            )
        paths = [self.path.with_name(f"{match[1]}-{part:05d}-of-{count:05d}.gguf") for part in _parts(count)]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ConversionError(f"{self.path}: parts are missing: {', '.join(missing)}")
        given = self.files.pop()
        self.files = [given if path == self.path else GGUFFile(path) for path in paths]
        for number, file in enumerate(self.files):
            found = (file.metadata.get("split.no"), file.metadata.get("split.count"))
            if found != (number, count):
                raise ConversionError(
                    f"{file.path}: is part {found[0]} of {found[1]} by its metadata, expected part {number} "
                    f"of {count} (counted from 0)"
                )
        self._check_same(self.files[0].metadata)

    def _check_same(self, first: dict[str, Any]) -> None:
        """Whatever a part says of the model must be what the first says."""
        for file in self.files[1:]:
            for key, value in file.metadata.items():
                if key != "split.no" and first.get(key, value) != value:
                    raise ConversionError(
                        f"{file.path}: belongs to another model than {self.files[0].path.name}: {key} differs"
                    )

    def _by_tensor(self) -> dict[str, GGUFFile]:
        owners: dict[str, GGUFFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in owners:
                    raise ConversionError(
                        f"{file.path}: belongs to another model than {owners[name].path.name}: both hold "
                        f"tensor {name!r}"
                    )
                owners[name] = file
        return owners

    def _check_count(self) -> None:
        wanted = self.metadata.get("split.tensors.count")
        if len(self.files) > 1 and wanted is not None and wanted != len(self.tensors):
            self.close()
            raise ConversionError(
                f"{self.path}: the parts hold {len(self.tensors)} tensors together, split.tensors.count is "
                f"{wanted}: one belongs to another model"
            )

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self.files]

    def file_of(self, name: str) -> GGUFFile:
        return self._owners[name]

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._owners[name].data(name)

    def close(self) -> None:
        for file in self.files:
            file.close()


def _parts(count: int) -> Iterable[int]:
    return range(1, count + 1)
