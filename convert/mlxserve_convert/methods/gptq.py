"""GPTQ as AutoGPTQ and GPTQModel write it.

``qweight`` [in * bits / 32, out] int32 holds each output's integers one after the other along the input,
from the lowest bit on: transposed, these are MLX's words. ``qzeros`` [groups, out * bits / 32] is packed
along the output, ``scales`` [groups, out] is not. ``g_idx`` [in] names the group of each input; with
act-order the inputs of a group do not follow each other. Format "gptq" stores each zero point less one,
"gptq_v2" as it is (https://github.com/ModelCloud/GPTQModel).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.methods.affine import AffineWeight
from mlxserve_convert.methods.method import (
    Method,
    Settings,
    check_type,
    decoded_modules,
    fields_between,
    part,
    refused,
)
from mlxserve_convert.weights import Weight

_BITS = (2, 3, 4, 8)
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class GptqWeight(AffineWeight):
    """``zero_offset`` is what the stored zero points lack."""

    def __init__(
        self,
        qweight: Weight,
        qzeros: Weight,
        scales: Weight,
        bits: int,
        group_size: int,
        groups: np.ndarray[tuple[int], np.dtype[np.int64]] | None,
        zero_offset: int,
    ) -> None:
        shape = (qweight.shape[1], qweight.shape[0] * 32 // bits)
        order = "" if groups is None else " act-order"
        super().__init__(shape, bits, group_size, f"gptq {bits}-bit{order}", groups)
        self._qweight, self._qzeros, self._scales = qweight, qzeros, scales
        self._zero_offset = zero_offset

    def words(self, start: int, stop: int) -> mx.array:
        columns = self._qweight.read_columns(0, self._qweight.num_rows, start, stop)
        return mx.contiguous(columns.view(mx.uint32).T)

    def scales(self, start: int, stop: int) -> mx.array:
        columns = self._scales.read_columns(0, self._scales.num_rows, start, stop)
        return mx.contiguous(columns.astype(mx.float32).T)

    def zeros(self, start: int, stop: int) -> mx.array:
        stored = fields_between(self._qzeros, self.bits, start, stop)
        # A zero point of 0 less one wraps around in its field, and back here.
        mask = mx.array((1 << self.bits) - 1, mx.uint32)
        return ((stored + self._zero_offset) & mask).astype(mx.float32).T

    def prefetch(self, start: int, stop: int) -> None:
        # Some columns of every row: all pages are touched, once.
        if start == 0 or stop == self.num_rows:
            self._qweight.prefetch(0, self._qweight.num_rows)


def _check(settings: Settings, where: str) -> None:
    form = str(settings.get("checkpoint_format") or "gptq")
    if form not in _OFFSETS or settings.get("is_marlin_format"):
        form = form if form not in _OFFSETS else "marlin"
        raise refused(settings, where, f"only: {', '.join(_OFFSETS)}", form)
    bits = settings.get("bits")
    if bits not in _BITS:
        raise refused(settings, where, f"bits {bits!r}, only: {', '.join(map(str, _BITS))}", form)
    group_size = settings.get("group_size", -1)
    if not isinstance(group_size, int):
        raise refused(settings, where, f"group_size {group_size!r} is no number", form)


def _decode(weights: Mapping[str, Weight], settings: Settings, where: str) -> dict[str, Weight]:
    return decoded_modules(weights, _PARTS, lambda module: _matrix(weights, module, settings, where))


def _matrix(weights: Mapping[str, Weight], module: str, settings: Settings, where: str) -> GptqWeight:
    qweight, qzeros, scales = (part(weights, f"{module}.{kind}", where) for kind in _PARTS[:3])
    for kind, weight in zip(_PARTS[:2], (qweight, qzeros), strict=True):
        check_type(weight, f"{module}.{kind}", where, mx.int32, mx.uint32)
    if any(len(weight.shape) != 2 or 0 in weight.shape for weight in (qweight, qzeros, scales)):
        raise ConversionError(
            f"{where}: tensor '{module}.qweight' has shape {qweight.shape}, expected a matrix"
        )
    num_outputs = qweight.shape[1]
    # A module may have bits of its own ("dynamic"): the zero points tell.
    bits, rest = divmod(qzeros.shape[1] * 32, num_outputs)
    num_groups = scales.shape[0]
    if rest or bits not in _BITS or scales.shape[1] != num_outputs or qzeros.shape[0] != num_groups:
        raise ConversionError(
            f"{where}: {module} has qweight {qweight.shape}, qzeros {qzeros.shape} and scales "
            f"{scales.shape}, no GPTQ matrix"
        )
    num_inputs = qweight.shape[0] * 32 // bits
    group_size = _group_size(num_inputs, num_groups, settings.get("group_size", -1))
    groups = _order(weights, module, num_inputs, num_groups, group_size, settings, where)
    if group_size is None and groups is None:
        raise ConversionError(
            f"{where}: {module} has {num_groups} groups for {num_inputs} inputs, which do not divide"
        )
    offset = _OFFSETS[str(settings.get("checkpoint_format") or "gptq")]
    return GptqWeight(qweight, qzeros, scales, bits, group_size or num_inputs, groups, offset)


def _group_size(num_inputs: int, num_groups: int, wanted: int) -> int | None:
    if num_groups == 1:
        return num_inputs
    if wanted > 0 and -(-num_inputs // wanted) == num_groups:
        return wanted
    return num_inputs // num_groups if num_inputs % num_groups == 0 else None


def _order(
    weights: Mapping[str, Weight],
    module: str,
    num_inputs: int,
    num_groups: int,
    group_size: int | None,
    settings: Settings,
    where: str,
) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """The group of each input, None where they follow each other."""
    name = f"{module}.g_idx"
    if name not in weights:
        if settings.get("desc_act") and num_groups > 1:
            raise ConversionError(f"{where}: tensor {name!r} is missing, and desc_act says that it counts")
        return None
    index = np.array(part(weights, name, where, num_inputs).value()).astype(np.int64).reshape(-1)
    if index.size and not 0 <= index.min() <= index.max() < num_groups:
        raise ConversionError(f"{where}: tensor {name!r} names group {index.max()}, there are {num_groups}")
    is_plain = group_size is not None and np.array_equal(index, np.arange(num_inputs) // group_size)
    return None if is_plain else index


GPTQ = Method(_check, _decode)
