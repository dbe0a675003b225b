"""What all decoders share: numbers of a few bits in words, and scales of any granularity."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import ConversionError
from mlxserve_convert.methods.affine import affine_layout
from mlxserve_convert.methods.method import (
    ScaleGrid,
    exponents_of_two,
    fields,
    fields_between,
    fields_between_rows,
)
from mlxserve_convert.weights import Leaf
from tests.convert.quantized import bits_in_words


def numbers_of(bits: int, rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, (rows, columns))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 150), st.integers(0, 99), st.data())
def test_numbers_of_any_width_across_words(
    bits: int, rows: int, columns: int, seed: int, data: st.DataObject
) -> None:
    numbers = numbers_of(bits, rows, columns, seed)
    words = bits_in_words(numbers, bits)
    found = fields(mx.array(words.view(np.uint32)), bits, columns)
    assert np.array_equal(np.array(found), numbers)
    start = data.draw(st.integers(0, columns - 1))
    stop = data.draw(st.integers(start + 1, columns))
    part = np.array(fields_between(Leaf(mx.array(words), "int32"), bits, start, stop))
    assert np.array_equal(part, numbers[:, start:stop])
    turned = Leaf(mx.array(np.ascontiguousarray(words.T)), "int32")
    assert np.array_equal(np.array(fields_between_rows(turned, bits, start, stop)), numbers[:, start:stop].T)


def grid(
    scale: np.ndarray,
    shape: tuple[int, ...],
    block: tuple[int, int] | None = None,
    group: int | None = None,
) -> ScaleGrid:
    blocks = [(5, 5), *([block] if block else []), *([(1, group)] if group else [])]
    return ScaleGrid(Leaf(mx.array(scale), "float32"), shape, "here", "x_scale", blocks)


@pytest.mark.parametrize(
    ("scale_shape", "shape", "block", "group", "group_size"),
    [
        ((), (6, 8), None, None, 8),
        ((1,), (6, 8), (2, 2), None, 8),
        ((1, 1), (6, 8), None, None, 8),
        ((6,), (6, 8), None, None, 8),
        ((6, 1), (6, 8), (4, 4), None, 8),
        ((6, 2), (6, 8), None, 4, 4),
        ((6, 3), (6, 8), None, 3, 3),
        ((3, 2), (6, 8), (2, 4), None, 4),
        ((2, 3), (6, 8), (4, 3), None, 3),
        ((2,), (2, 6, 8), None, None, 8),
        ((2, 1, 1), (2, 6, 8), None, None, 8),
        ((2, 6), (2, 6, 8), None, None, 8),
        ((2, 6, 1), (2, 6, 8), None, None, 8),
        ((2, 3, 2), (2, 6, 8), (2, 4), None, 4),
        ((1,), (2, 6, 8), None, None, 8),
        ((1,), (3, 1, 8), None, None, 8),
    ],
)
def test_scales_of_any_granularity(
    scale_shape: tuple[int, ...],
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
    group: int | None,
    group_size: int,
) -> None:
    scale = np.arange(1, np.prod(scale_shape, dtype=int) + 1, dtype=np.float32).reshape(scale_shape)
    found = grid(scale, shape, block, group)
    assert found.group_size == group_size
    *outer, rows, columns = shape
    expected = np.zeros(shape, np.float32)
    for at in np.ndindex(*shape):
        row, column = at[-2:]
        if scale.size == 1:
            expected[at] = scale.reshape(())
        elif scale.size == np.prod(outer, dtype=int) and outer:
            expected[at] = scale.reshape(-1)[at[0]]
        elif scale.ndim == len(outer) + 1:
            expected[at] = scale[at[:-1]]
        else:
            height, width = scale.shape[-2:]
            step = block if block and -(-rows // block[0]) == height else (rows // height, group_size)
            expected[at] = scale[(*at[:-2], row // step[0], column // (columns if width == 1 else step[1]))]
    flat = expected.reshape(-1, columns)
    for start, stop in [(0, len(flat)), (1, 2), (2, min(5, len(flat))), (len(flat) - 1, len(flat))]:
        values = np.repeat(np.array(found.rows(start, stop)), group_size, axis=1)[:, :columns]
        assert np.array_equal(values, flat[start:stop])


@pytest.mark.parametrize(
    ("scale_shape", "block"),
    [
        ((6, 4), None),
        ((3, 2), None),
        ((5, 1), None),
        ((4, 3), None),
        ((3, 3), (2, 4)),
        ((7,), None),
        ((6, 8, 1), None),
    ],
)
def test_scales_that_fit_nothing(scale_shape: tuple[int, ...], block: tuple[int, int] | None) -> None:
    with pytest.raises(ConversionError, match=r"here: tensor 'x_scale' of shape .* does not fit"):
        grid(np.ones(scale_shape, np.float32), (6, 8), block)


def test_exponents_of_two() -> None:
    found = np.array(exponents_of_two(mx.array(np.arange(256, dtype=np.uint8))))
    assert np.array_equal(found[:255], 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(found[255])


def test_layouts_of_groups() -> None:
    sizes = {32: 32, 64: 64, 128: 128, 256: 128, 96: 32, 4096: 128, 48: None, 16: None}
    for group_size, expected in sizes.items():
        layout = affine_layout(4, group_size, group_size * 2)
        assert (None if layout is None else layout.group_size) == expected
    assert affine_layout(7, 32, 64) is None
    assert affine_layout(4, 64, 96) is None
