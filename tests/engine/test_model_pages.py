"""The pools that a stack holds: written in place, all of them, and in the order in which work is started."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import pytest

from mlxserve.models.loader import LoadedModel, load_model
from mlxserve.models.paged import ModelPages, PagedCaches, PagedMetadata
from mlxserve_kernels import ops

from .test_fused import NUM_LAYERS, PAGE, new_pages, random_tokens, tiny

pytestmark = pytest.mark.skipif(ops.implementation() == "reference", reason="the C++ extension is not in use")

LONG = 400
"""Tokens of a step that is still in flight when the next thing is built."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny(tmp_path_factory.mktemp("model"), "llama", bits=4, context=2 * LONG))


def chunk(start: int, length: int, table: list[int]) -> PagedMetadata:
    at = range(start, start + length)
    slots = [table[position // PAGE] * PAGE + position % PAGE for position in at]
    arrays = (list(at), slots, [table], [0, length], [start + length])
    return PagedMetadata(*(mx.array(values, dtype=mx.int32) for values in arrays))


def start(model: LoadedModel, pages: ModelPages, tokens: list[int], at: int, table: list[int]) -> mx.array:
    """A step that is started, not waited for."""
    logits = model.logits(mx.array(tokens, dtype=mx.int32), pages, chunk(at, len(tokens), table), None)
    mx.async_eval(logits)
    return logits


def addresses(pages: ModelPages) -> list[tuple[int, int]]:
    return [
        tuple(np.array(pool, copy=False).ctypes.data for pool in (layer.keys, layer.values))  # type: ignore[misc]
        for layer in pages
    ]


def contents(pages: ModelPages, page: int) -> list[np.ndarray]:
    """Keys and values of all layers in a page."""
    return [np.array(pool[page]) for layer in pages for pool in (layer.keys, layer.values)]


def test_all_pools_are_written_in_place(model: LoadedModel) -> None:
    pages = new_pages(model, 2 * LONG // PAGE)
    before = addresses(pages)
    tokens, table = random_tokens(LONG + 3), list(range(LONG // PAGE + 1))
    steps = [start(model, pages, tokens[:LONG], 0, table)]
    steps += [start(model, pages, [token], LONG + i, table) for i, token in enumerate(tokens[LONG:])]
    mx.eval(steps)
    assert addresses(pages) == before
    for pool in contents(pages, table[-1]):
        assert np.abs(pool).max() > 0
    for pool in contents(pages, table[-1] + 1):
        assert np.abs(pool).max() == 0


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_reader_started_after_a_step_sees_what_it_wrote(model: LoadedModel, layer: int) -> None:
    """Every layer's pools, also those that the step does not hand on."""
    tokens, table = random_tokens(LONG), list(range(LONG // PAGE))
    done = new_pages(model, LONG // PAGE)
    mx.eval(start(model, done, tokens, 0, table))
    for name in ("keys", "values"):
        pages = new_pages(model, LONG // PAGE)
        step = start(model, pages, tokens, 0, table)
        read = getattr(pages[layer], name) * 1.0
        np.testing.assert_array_equal(np.array(read), np.array(getattr(done[layer], name)))
        mx.eval(step)


def test_copies_between_steps_in_flight(model: LoadedModel) -> None:
    """A step, a copy of what it writes, and a step that reads the copy and overwrites the source."""
    tokens, other = random_tokens(LONG), random_tokens(LONG, seed=9)
    num_pages = LONG // PAGE
    table, copied = list(range(num_pages)), list(range(num_pages, 2 * num_pages))
    expected = new_pages(model, num_pages + 1)
    mx.eval(start(model, expected, tokens, 0, [*table, num_pages]))
    want = np.array(start(model, expected, [5], LONG, [*table, num_pages]))

    pages = new_pages(model, 2 * num_pages + 1)
    first = start(model, pages, tokens, 0, table)
    pages.copy(list(zip(table, copied, strict=True)))
    last = start(model, pages, [5], LONG, [*copied, 2 * num_pages])
    overwritten = start(model, pages, other, 0, table)
    mx.eval(first, last, overwritten)
    np.testing.assert_array_equal(np.array(last), want)
    for ours, theirs in zip(contents(pages, copied[3]), contents(expected, table[3]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(contents(pages, table[3])[0], contents(pages, copied[3])[0])


def test_pools_grow(model: LoadedModel) -> None:
    pages = new_pages(model, 3)
    tokens = random_tokens(20)
    mx.eval(start(model, pages, tokens[:16], 0, [0, 1, 2]))
    before = contents(pages, 1)
    pages.resize(40)
    for ours, theirs in zip(contents(pages, 1), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    grown = np.array(start(model, pages, tokens[16:], 16, [0, 1, 39]))
    whole = new_pages(model, 3)
    np.testing.assert_array_equal(grown, np.array(start(model, whole, tokens, 0, [0, 1, 2]))[16:])


def test_pools_that_were_replaced_are_not_kept(model: LoadedModel) -> None:
    """Their addresses are counted, few of which have memory behind them."""
    pages = new_pages(model, 1 << 15)
    num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in pages)
    assert num_bytes > 100 << 20
    mx.eval(start(model, pages, [1, 2, 3], 0, [7]))
    before = psutil.Process().memory_info().vms
    pages.resize(8)
    assert before - psutil.Process().memory_info().vms > num_bytes // 2


def test_one_set_of_pools_serves_one_stack_after_the_other(tmp_path: Path) -> None:
    """What is held belongs to a stack: another model on the same pages holds them anew."""
    folder = tiny(tmp_path, "llama", bits=4)
    one, two = load_model(folder), load_model(folder)
    pages, tokens = new_pages(one), random_tokens(12)
    mx.eval(start(one, pages, tokens[:8], 0, [0, 1]))
    continued = np.array(start(two, pages, tokens[8:], 8, [0, 1]))
    np.testing.assert_array_equal(continued, np.array(start(one, new_pages(one), tokens, 0, [0, 1]))[8:])


def test_a_stack_wants_the_pools_of_its_layers(model: LoadedModel) -> None:
    assert model.stacked is not None
    stack, pages = model.stacked._stack, new_pages(model)
    keys, values = [layer.keys for layer in pages], [layer.values for layer in pages]
    with pytest.raises(ValueError, match="StackPools: 3 layers need as many pools, got 2 and 3"):
        stack.hold(keys[:2], values)
    square = [mx.zeros((24, 2, 16, 16))] * NUM_LAYERS
    with pytest.raises(ValueError, match="StackPools: k_pool and v_pool must be two buffers"):
        stack.hold(square, square)
    with pytest.raises(
        ValueError, match="StackPools: a layer has 2 kv heads of 16 and 16, its pools 1 of 16"
    ):
        stack.hold([key[:, :1] for key in keys], [value[:, :1] for value in values])
    held, at = stack.hold(keys, values), chunk(0, 1, [0])
    indices = (at.positions, at.slot_mapping, at.block_tables, at.q_starts, at.kv_lens)
    with pytest.raises(ValueError, match="decoder_stack: order is no handle of "):
        stack(held, mx.zeros((1, 64)), *indices, mx.zeros((1,)))


def test_blocks_that_are_not_fused_hold_nothing(tmp_path: Path) -> None:
    model = load_model(tiny(tmp_path, "llama"), fuse=False)
    pages = new_pages(model)
    tokens = mx.array([1, 2, 3], dtype=mx.int32)
    mx.eval(model.forward(tokens, PagedCaches(pages, chunk(0, 3, [0]), None)))
    assert not pages._held
    assert len(pages) == len(pages[:]) == NUM_LAYERS
