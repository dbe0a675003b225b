"""A model that is one stack gives the bits that mlx-lm's own code around its blocks gives; models that are
not one take that code."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.models import loader, stacked
from mlxserve.models.loader import LoadedModel, load_model
from mlxserve.models.paged import ModelPages, PagedCaches, PagedMetadata
from mlxserve_kernels import ops

from .test_fused import FAMILIES, NUM_LAYERS, PAGE, new_pages, random_tokens, tiny

# The first token of each run, its tokens, and its pages.
RUNS = ((0, 9, (3, 1)), (0, 1, (7,)), (0, 14, (4, 0)))


@pytest.fixture(autouse=True)
def cpu_kernels() -> None:
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")


def metadata_of(*runs: tuple[int, int, Sequence[int]]) -> PagedMetadata:
    positions, slots, starts, lens = [], [], [0], []
    width = max(len(pages) for _, _, pages in runs)
    for start, length, pages in runs:
        at = range(start, start + length)
        positions += at
        slots += [pages[p // PAGE] * PAGE + p % PAGE for p in at]
        starts.append(len(positions))
        lens.append(start + length)
    tables = [[*pages, *[0] * (width - len(pages))] for _, _, pages in runs]
    return PagedMetadata(
        *(mx.array(each, dtype=mx.int32) for each in (positions, slots, tables, starts, lens))
    )


def both_ways(model: LoadedModel, rows: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a step of several runs, and of one more token of each, as one stack and by mlx-lm's loop."""
    sampled = None if rows is None else mx.array(rows, dtype=mx.int32)
    results: list[list[np.ndarray]] = [[], []]
    for steps in (RUNS, tuple((length, 1, pages) for _, length, pages in RUNS)):
        metadata = metadata_of(*steps)
        tokens = mx.array(random_tokens(metadata.positions.size), dtype=mx.int32)
        if steps is RUNS:
            ours, plain = new_pages(model), new_pages(model)
        chosen = sampled if steps is RUNS else None
        results[0].append(np.array(model.logits(tokens, ours, metadata, chosen)))
        results[1].append(np.array(model.forward(tokens, PagedCaches(plain, metadata, chosen))))
    return np.concatenate(results[0]), np.concatenate(results[1])


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_stack_gives_the_bits_of_the_loop(family: str, bits: int | None, tmp_path: Path) -> None:
    model = load_model(tiny(tmp_path, family, bits=bits))
    assert model.stacked is not None
    assert model.num_fused_layers == NUM_LAYERS
    for rows in (None, [8, 9, 23], [0]):
        ours, plain = both_ways(model, rows)
        assert ours.shape == (3 + (24 if rows is None else len(rows)), model.vocab_size)
        np.testing.assert_array_equal(ours, plain)


def test_an_untied_head(tmp_path: Path) -> None:
    model = load_model(tiny(tmp_path, "llama", tied=False))
    assert "lm_head" in model.module and model.stacked is not None
    np.testing.assert_array_equal(*both_ways(model, [8, 23]))


@pytest.mark.parametrize("reason", ["not fused", "file not known", "experts outside", "two stacks"])
def test_others_take_mlx_lms_code(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, "qwen3_moe", bits=4)
    whole = load_model(folder)
    expected = both_ways(whole, [8, 23])[0]
    if reason == "file not known":
        monkeypatch.delitem(stacked._ENDS, "qwen3_moe")
    elif reason == "experts outside":
        monkeypatch.setattr("mlxserve.models.fused._experts", lambda block, family: {})
    elif reason == "two stacks":
        end_of_stack = loader.fuse_blocks.__globals__["_end_of_stack"]
        monkeypatch.setattr(
            "mlxserve.models.fused._end_of_stack", lambda layers, at: min(end_of_stack(layers, at), at + 2)
        )
    model = load_model(folder, fuse=reason != "not fused")
    assert model.stacked is None
    assert model.num_fused_layers == (0 if reason == "not fused" else NUM_LAYERS)
    ours, plain = both_ways(model, [8, 23])
    np.testing.assert_array_equal(ours, plain)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_wrong_ends_are_noticed_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny(tmp_path, "granite")
    expected = both_ways(load_model(folder), None)[0]
    monkeypatch.setitem(stacked._ENDS, "granite", stacked._PLAIN)
    with caplog.at_level(logging.WARNING, loader.__name__):
        model = load_model(folder)
    assert "'granite' runs unfused: its logits on pages differ by" in caplog.text
    assert (model.stacked, model.num_fused_layers) == (None, 0)
    np.testing.assert_allclose(both_ways(model, None)[0], expected, rtol=1e-4, atol=1e-4)


def test_all_rows_by_name_are_all_rows(tmp_path: Path) -> None:
    """``None`` and the list of all rows are the same rows."""
    model = load_model(tiny(tmp_path, "qwen3"))
    metadata = metadata_of(*RUNS)
    tokens = mx.array(random_tokens(24), dtype=mx.int32)

    def logits(call: Any, rows: mx.array | None, pages: ModelPages) -> np.ndarray:
        return np.array(call(tokens, pages, metadata, rows))

    expected = logits(model.logits, None, new_pages(model))
    np.testing.assert_array_equal(logits(model.logits, mx.arange(24), new_pages(model)), expected)
