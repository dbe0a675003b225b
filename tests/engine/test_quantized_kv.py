"""The engine on pages of 8- and 4-bit keys and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxserve import config as config_module
from mlxserve.config import EngineConfig
from mlxserve.engine.benchmark import DecodeShape, measure
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.errors import UsageError
from mlxserve.models.fused import unfuse_blocks
from mlxserve.models.loader import LoadedModel, load_model
from mlxserve.models.paged import ModelPages, PagedCaches, PagedMetadata
from mlxserve_kernels import ops, quantized_pages
from tests.engine.driving import greedy, run, tokens
from tests.tiny_models import TinyModel, write_tiny_model

PAGE = 16
LENGTH = 70
MODELS = {
    "llama": TinyModel(head_dim=32, layers=3),
    "gemma3_text": TinyModel(model_type="gemma3_text", head_dim=64, layers=3, sliding_window=8),
    "unfused": TinyModel(head_dim=32),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "model", MODELS[request.param])
    model = load_model(folder)
    if request.param == "unfused":
        unfuse_blocks(model.module)
    return model


def logits_of(model: LoadedModel, chunks: tuple[int, ...], kv_bits: int | None) -> np.ndarray:
    """Of one sequence that comes in chunks, on pages in any order."""
    pages = ModelPages((replace(spec, kv_bits=kv_bits) for spec in model.layers), PAGE)
    pages.resize(8)
    table = (5, 2, 7, 0, 3)
    token_ids = np.random.default_rng(3).integers(0, 96, LENGTH).astype(np.int32)
    results, start = [], 0
    for length in chunks:
        positions = np.arange(start, start + length, dtype=np.int32)
        slots = np.take(table, positions // PAGE) * PAGE + positions % PAGE
        metadata = PagedMetadata(
            positions=mx.array(positions),
            slot_mapping=mx.array(slots.astype(np.int32)),
            block_tables=mx.array([table], dtype=mx.int32),
            q_starts=mx.array([0, length], dtype=mx.int32),
            kv_lens=mx.array([start + length], dtype=mx.int32),
        )
        caches = PagedCaches(pages, metadata, mx.arange(length))
        logits = model.forward(mx.array(token_ids[start : start + length]), caches)
        results.append(np.array(logits.astype(mx.float32)))
        start += length
    return np.concatenate(results)


@pytest.mark.parametrize(("kv_bits", "limit"), [(8, 0.1), (4, 0.8)])
def test_logits_are_close_to_those_of_float_pages(model: LoadedModel, kv_bits: int, limit: float) -> None:
    want = logits_of(model, (LENGTH,), None)
    got = logits_of(model, (LENGTH,), kv_bits)
    gap = np.abs(got - want).max() / np.abs(want).max()
    assert 0 < gap < limit


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_logits_do_not_depend_on_chunks(model: LoadedModel, kv_bits: int) -> None:
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")
    whole = logits_of(model, (LENGTH,), kv_bits)
    np.testing.assert_array_equal(logits_of(model, (3, 1, 40, 1, 25), kv_bits), whole)


def test_pages_shrink_and_the_engine_runs_on_them(model: LoadedModel) -> None:
    width = {spec.dtype.size for spec in model.layers}.pop()
    sizes = {}
    for kv_bits in (None, 8, 4):
        config = EngineConfig(page_size=PAGE, kv_pages=32, kv_bits=kv_bits)
        target = ModelTarget(model, PAGE, config.kv_bits)
        sizes[kv_bits] = target.page_bytes
        core = EngineCore(target, config, is_pipelined=ops.supports_steps_in_flight())
        prompt = list(range(40))
        alone = tokens(run(core, greedy("a", prompt, 12))["a"])
        again = run(core, greedy("b", prompt, 12), greedy("c", prompt[:30], 12))
        assert tokens(again["b"]) == alone
        core.check_integrity()
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in target._pages)
        assert held == target.page_bytes * target._pages[0].keys.shape[0] > 0
    assert sizes[8] * width * 8 == sizes[None] * 9
    assert sizes[4] * width * 4 == sizes[None] * 3


def test_bench_counts_the_bytes_of_quantized_pages(model: LoadedModel) -> None:
    runs = {
        bits: measure(model, DecodeShape(50, 8, 1, kv_bits=bits), read_rate=1e9).bytes_per_token
        for bits in (None, 8, 4)
    }
    kv = {bits: 54 * ModelTarget(model, PAGE, bits).page_bytes // PAGE for bits in runs}
    assert len({runs[bits] - kv[bits] for bits in runs}) == 1
    assert runs[None] > runs[8] > runs[4]


def test_heads_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "model", head_dim=16))
    message = "kv_bits 8 does not fit this model: quantized pools need a D that is a multiple of 32, got 16"
    with pytest.raises(UsageError, match=message):
        ModelTarget(model, PAGE, 8)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(UsageError, match=r"^kv_bits must be 8 or 4, not 6$"):
        EngineConfig(kv_bits=6)
    with pytest.raises(UsageError, match=r"^page_size must be a multiple of 16 with kv_bits, not 24$"):
        EngineConfig(kv_bits=8, page_size=24)
    EngineConfig(page_size=24)
    assert config_module.KV_BITS == quantized_pages.KV_BITS
    assert config_module.KV_PAGE_UNIT == quantized_pages.PAGE_UNIT
