"""What a conversion is asked for, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxserve.errors import UsageError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
DEFAULT_BITS = 4
DEFAULT_GROUP_SIZE = 64

Progress = Callable[[int, int, str], None]
"""Called with the bytes of the source done so far, their total, and the tensor at hand."""

VerifyMode = Literal["auto", "never"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """``bits`` None: a quantized source is imported exactly, a float source becomes 4-bit.
    ``dtype`` None: the source's. ``verify`` "auto" runs a few tokens through the result, unless it is
    too large for this machine's memory. Raises UsageError on an impossible value.
    """

    bits: int | None = None
    group_size: int | None = None
    dtype: str | None = None
    force: bool = False
    dry_run: bool = False
    verify: VerifyMode = "auto"

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in BITS:
            raise UsageError(f"--bits {self.bits} is not possible, only: {_listed(BITS)}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise UsageError(f"--group-size {self.group_size} is not possible, only: {_listed(GROUP_SIZES)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype} is not possible, only: {', '.join(DTYPES)}")


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One parameter of the output. ``bits`` and ``group_size`` are None for one that stays as floats;
    ``is_matrix`` tells whether it belongs to a module that could be quantized at all."""

    name: str
    shape: tuple[int, ...]
    source_type: str
    bits: int | None
    group_size: int | None
    is_matrix: bool

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was written, or with ``is_dry_run`` what would be. ``num_bytes`` counts tensors alone.
    ``verified`` says how the result was checked, or why it was not."""

    source: Path
    output: Path
    source_format: str
    model_type: str
    tensors: tuple[PlannedTensor, ...]
    num_bytes: int
    warnings: tuple[str, ...]
    verified: str
    is_dry_run: bool

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """The real figure: scales, biases and unquantized parameters count."""
        return self.num_bytes * 8 / max(self.num_parameters, 1)

    @property
    def num_quantized(self) -> int:
        return sum(tensor.bits is not None for tensor in self.tensors)

    @property
    def unquantized_matrices(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors if tensor.is_matrix and tensor.bits is None)
