"""What a conversion is asked for, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mlxserve.errors import UsageError

if TYPE_CHECKING:
    from mlxserve_convert.check import Proof

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32")
DEFAULT_BITS = 4
DEFAULT_GROUP_SIZE = 64
DEFAULT_TARGET_BPW = 4.5
RECIPES = ("default", "uniform", "mixed", "experts-low", "auto")
Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
MODES: dict[Mode, tuple[int, int] | None] = {
    "affine": None,
    "mxfp4": (4, 32),
    "mxfp8": (8, 32),
    "nvfp4": (4, 16),
}
"""Bits and group size of each mode that has no choice of them."""

CheckMode = Literal["auto", "never", "force"]
LOST_FORMATS = ("auto", "float", "8bit")


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of the result: written so far (those of an earlier, interrupted run included), and in all."""

    done_bytes: int
    total_bytes: int
    tensor: str


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """``bits``, ``mode`` and ``recipe`` None: a quantized source keeps its layouts, a float source becomes
    affine 4-bit. ``dtype`` None: the source's. ``dequantize``: everything becomes floats. ``target_bpw``
    (None: 4.5) is what ``recipe`` "auto" may take, in bits a parameter. ``memory_limit``
    bounds the anonymous memory in bytes (None: a quarter of the machine's). ``check`` "auto" compares the
    result with the source where both fit, "force" keeps the result even if they differ too much.
    ``lost_formats``: what becomes, in an import, of quantized formats that MLX has no layout for: "float" is
    exact, "8bit" small, "auto" exact while the result stays under 1.5 times the size of the source.
    Raises UsageError on an impossible value or pair of values.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None
    recipe: str | None = None
    target_bpw: float | None = None
    dtype: str | None = None
    dequantize: bool = False
    lost_formats: str = "auto"
    force: bool = False
    dry_run: bool = False
    check: CheckMode = "auto"
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise UsageError(f"--mode {self.mode} is not possible, only: {', '.join(MODES)}")
        if self.bits is not None and self.bits not in BITS:
            raise UsageError(f"--bits {self.bits} is not possible, only: {_listed(BITS)}")
        fixed = MODES[self.mode or "affine"]
        if fixed is not None:
            self._check_fixed(*fixed)
        elif self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise UsageError(f"--group-size {self.group_size} is not possible, only: {_listed(GROUP_SIZES)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype} is not possible, only: {', '.join(DTYPES)}")
        if self.lost_formats not in LOST_FORMATS:
            raise UsageError(
                f"--lost-formats {self.lost_formats} is not possible, only: {', '.join(LOST_FORMATS)}"
            )
        if self.lost_formats != "auto" and (self.dequantize or self.wants_quantization):
            raise UsageError(
                "--lost-formats is for imports in the source's own formats: --bits, --group-size, --mode, "
                "--recipe and --dequantize do not go with it"
            )
        self._check_recipe()
        if self.dequantize and self.wants_quantization:
            raise UsageError(
                "--dequantize makes floats: --bits, --group-size, --mode and --recipe do not go with it"
            )

    def _check_recipe(self) -> None:
        if self.recipe is not None and self.recipe not in RECIPES:
            raise UsageError(f"--recipe {self.recipe} is not possible, only: {', '.join(RECIPES)}")
        if self.recipe not in (None, "uniform") and self.mode not in (None, "affine"):
            raise UsageError(f"--recipe {self.recipe} is for --mode affine, not {self.mode}")
        if self.recipe == "auto" and (self.bits is not None or self.group_size is not None):
            raise UsageError(
                "--recipe auto chooses bits and groups: --bits and --group-size do not go with it, "
                "--target-bpw says the size"
            )
        if self.target_bpw is None:
            return
        if self.recipe != "auto":
            raise UsageError("--target-bpw is for --recipe auto")
        if not 2 <= self.target_bpw <= 16:
            raise UsageError(f"--target-bpw {self.target_bpw:g} is not possible, only: 2 to 16")

    def _check_fixed(self, bits: int, group_size: int) -> None:
        if self.bits not in (None, bits):
            raise UsageError(f"--bits {self.bits} is not possible with --mode {self.mode}, only: {bits}")
        if self.group_size not in (None, group_size):
            raise UsageError(
                f"--group-size {self.group_size} is not possible with --mode {self.mode}, only: {group_size}"
            )

    @property
    def wants_quantization(self) -> bool:
        """Whether anything says how matrices are to be quantized."""
        return any(value is not None for value in (self.bits, self.group_size, self.mode, self.recipe))


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One parameter of the output. ``mode``, ``bits`` and ``group_size`` are None for one that stays as
    floats, of ``dtype``; ``is_matrix`` tells whether it belongs to a module that could be quantized at all,
    ``is_exact`` whether each of its values is that of the source."""

    name: str
    shape: tuple[int, ...]
    source_type: str
    dtype: str
    mode: str | None
    bits: int | None
    group_size: int | None
    num_bytes: int
    is_matrix: bool
    is_exact: bool

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was written, or with ``is_dry_run`` what would be. ``num_bytes`` counts tensors alone.
    ``verified`` says how the result was checked, or why it was not. ``num_resumed`` counts the tensors that
    an interrupted run had written already. ``proof`` is None where the result was not compared."""

    source: Path
    output: Path
    source_format: str
    model_type: str
    tensors: tuple[PlannedTensor, ...]
    warnings: tuple[str, ...]
    verified: str
    is_dry_run: bool
    num_resumed: int = 0
    proof: Proof | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

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

    @property
    def inexact_tensors(self) -> tuple[PlannedTensor, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.is_exact)
