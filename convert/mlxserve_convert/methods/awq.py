"""AWQ in AutoAWQ's "gemm" layout, 4 bits.

``qweight`` [in, out / 8] int32 and ``qzeros`` [groups, out / 8] are packed along the output: a word holds the
outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight from the lowest bits on. ``scales`` [groups, out]. Without
``qzeros`` the zero point is 8 (https://github.com/casper-hansen/AutoAWQ, WQLinear_GEMM).
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlxserve.errors import ConversionError
from mlxserve_convert.methods.affine import AffineWeight
from mlxserve_convert.methods.method import Method, Settings, check_type, decoded_modules, part, refused
from mlxserve_convert.weights import Weight

_BITS = 4
_PER_WORD = 32 // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its eight outputs lies."""
_PARTS = ("qweight", "qzeros", "scales")


class AwqWeight(AffineWeight):
    def __init__(self, qweight: Weight, qzeros: Weight | None, scales: Weight, group_size: int) -> None:
        shape = (qweight.shape[1] * _PER_WORD, qweight.shape[0])
        super().__init__(shape, _BITS, group_size, "awq 4-bit")
        self._qweight, self._qzeros, self._scales = qweight, qzeros, scales

    def words(self, start: int, stop: int) -> mx.array:
        first, last = start // _PER_WORD, -(-stop // _PER_WORD)
        source = self._qweight.read_columns(0, self.num_columns, first, last).view(mx.uint32)
        # Eight inputs of eight outputs are a square of numbers, of which the other axis is packed.
        squares = source.reshape(self.num_columns // _PER_WORD, _PER_WORD, last - first)
        outputs = []
        for place in _PLACES:
            packed = (squares[:, 0] >> (place * _BITS)) & 15
            for index in range(1, _PER_WORD):
                packed = packed | (((squares[:, index] >> (place * _BITS)) & 15) << (index * _BITS))
            outputs.append(packed)
        words = mx.stack(outputs).transpose(2, 0, 1).reshape(-1, self.num_columns // _PER_WORD)
        return words[start - first * _PER_WORD :][: stop - start]

    def scales(self, start: int, stop: int) -> mx.array:
        columns = self._scales.read_columns(0, self._scales.num_rows, start, stop)
        return mx.contiguous(columns.astype(mx.float32).T)

    def zeros(self, start: int, stop: int) -> mx.array:
        if self._qzeros is None:
            return mx.array(8.0)
        first, last = start // _PER_WORD, -(-stop // _PER_WORD)
        words = self._qzeros.read_columns(0, self._qzeros.num_rows, first, last).view(mx.uint32)
        shifts = mx.array([place * _BITS for place in _PLACES], mx.uint32)
        numbers = ((words[..., None] >> shifts) & 15).reshape(words.shape[0], -1)
        return numbers.astype(mx.float32).T[start - first * _PER_WORD :][: stop - start]

    def prefetch(self, start: int, stop: int) -> None:
        # Some columns of every row: all pages are touched, once.
        if start == 0 or stop == self.num_rows:
            self._qweight.prefetch(0, self._qweight.num_rows)


def _check(settings: Settings, where: str) -> None:
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise refused(settings, where, "only: gemm", version)
    bits = settings.get("bits", settings.get("w_bit", _BITS))
    if bits != _BITS:
        raise refused(settings, where, f"bits {bits!r}, only: {_BITS}", version)


def _decode(weights: Mapping[str, Weight], settings: Settings, where: str) -> dict[str, Weight]:
    return decoded_modules(weights, _PARTS, lambda module: _matrix(weights, module, settings, where))


def _matrix(weights: Mapping[str, Weight], module: str, settings: Settings, where: str) -> AwqWeight:
    qweight = part(weights, f"{module}.qweight", where)
    scales = part(weights, f"{module}.scales", where)
    qzeros = weights.get(f"{module}.qzeros")
    check_type(qweight, f"{module}.qweight", where, mx.int32, mx.uint32)
    if not _is_matrix(qweight.shape, scales.shape):
        raise ConversionError(
            f"{where}: {module} has qweight {qweight.shape} and scales {scales.shape}, no AWQ matrix"
        )
    if qzeros is not None or settings.get("zero_point") is True:
        qzeros = part(weights, f"{module}.qzeros", where, scales.shape[0], qweight.shape[1])
        check_type(qzeros, f"{module}.qzeros", where, mx.int32, mx.uint32)
    return AwqWeight(qweight, qzeros, scales, qweight.shape[0] // scales.shape[0])


def _is_matrix(qweight: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    if len(qweight) != 2 or len(scales) != 2 or 0 in qweight + scales:
        return False
    is_whole = qweight[0] % scales[0] == 0 and qweight[0] % _PER_WORD == 0
    return is_whole and scales[1] == qweight[1] * _PER_WORD


AWQ = Method(_check, _decode)
