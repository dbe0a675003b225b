"""Decoder layers op by op, as they run with Metal kernels, here on the CPU's: the tests of fused layers once
more, and both beside each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.models.fused import fused_parts
from mlxserve.models.loader import load_model
from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import REFERENCE, using
from mlxserve_kernels.op_stack import OpStack
from tests.engine import test_adapters, test_fused, test_stacked
from tests.engine.driving import generate, greedy
from tests.engine.test_fused import FAMILIES, assert_close, in_chunks, random_tokens, tiny


@pytest.fixture(autouse=True)
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSERVE_DECODER", "ops")


test_is_unfused_is_stock = test_fused.test_fused_is_unfused_is_stock
test_every_format = test_fused.test_every_format_is_fused
test_bits_are_the_same_beside_others = test_fused.test_bits_are_the_same_beside_other_sequences
test_steps_in_flight_see_their_own_pages = test_fused.test_steps_in_flight_see_their_own_pages
test_one_stack_gives_the_bits_of_the_loop = test_stacked.test_one_stack_gives_the_bits_of_the_loop
test_each_row_has_its_own_adapter = test_adapters.test_each_row_has_its_own
test_slots_may_change_different_layers = test_adapters.test_slots_may_change_different_layers
test_narrow_adapters = test_adapters.test_narrow_adapters
test_adapters_that_cannot_be = test_adapters.test_what_cannot_be_changed_is_named
test_wrong_adapters = test_adapters.test_wrong_adapters_of_a_stack


@pytest.mark.parametrize("family", FAMILIES)
def test_is_what_the_extension_computes(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ops.implementation().startswith("cpu"):
        pytest.skip("the C++ extension is not in use")
    folder, tokens = tiny(tmp_path, family, bits=4), random_tokens(30)
    by_ops = load_model(folder)
    assert any(isinstance(part.stack, OpStack) for part in fused_parts(by_ops.module).values())
    monkeypatch.setenv("MLXSERVE_DECODER", "fused")
    fused = load_model(folder)
    assert by_ops.num_fused_layers == fused.num_fused_layers
    chunks, pages = (20, 1, 5, 4), (5, 2, 9, 0)
    assert_close(in_chunks(by_ops, tokens, chunks, pages), in_chunks(fused, tokens, chunks, pages))


@pytest.mark.parametrize(("family", "bits"), [("llama-windowed", 8), ("gemma2", None), ("qwen2_moe", 4)])
def test_bits_of_a_row_depend_on_itself_alone(family: str, bits: int | None, tmp_path: Path) -> None:
    if not ops.implementation().startswith("cpu"):
        pytest.skip("the C++ extension is not in use")
    model, tokens = load_model(tiny(tmp_path, family, bits=bits)), random_tokens(60)
    whole = in_chunks(model, tokens, [60], range(8))
    for chunks in ([1] * 60, [7, 40, 1, 12]):
        np.testing.assert_array_equal(in_chunks(model, tokens, chunks, range(8)), whole)


@pytest.mark.parametrize(("family", "bits"), [("llama-biased", None), ("llama-biased", 6), ("phi3", 6)])
def test_queries_keys_and_values_are_one_product(family: str, bits: int | None, tmp_path: Path) -> None:
    """Their layers keep their arrays, on the memory of the whole one."""
    folder = tiny(tmp_path, family, bits=bits)
    model = load_model(folder)
    (stack,) = (part.stack for part in fused_parts(model.module).values() if part.stack is not None)
    assert isinstance(stack, OpStack)
    for layer, block in zip(stack._layers, model.module.layers, strict=True):
        assert layer.qkv is not None
        assert layer.qkv.num_outputs == 64 + 32 + 32
        if family == "phi3":
            continue
        address = np.asarray(layer.qkv.w).ctypes.data
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = block.self_attn[name].weight
            assert np.asarray(weight).ctypes.data == address
            address += weight.nbytes
    tokens = random_tokens(20)
    expected = in_chunks(load_model(folder, fuse=False), tokens, (12, 1, 7), range(3))
    assert_close(in_chunks(model, tokens, (12, 1, 7), range(3)), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "phi3"])
def test_with_mlxs_own_ops(family: str, tmp_path: Path) -> None:
    folder, tokens = tiny(tmp_path, family, bits=4), random_tokens(20)
    expected = in_chunks(load_model(folder), tokens, (12, 1, 7), range(3))
    with using(REFERENCE):
        model = load_model(folder)
        assert model.num_fused_layers == test_fused.NUM_LAYERS
        assert_close(in_chunks(model, tokens, (12, 1, 7), range(3)), expected)


def test_the_engine_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, "llama", bits=4)
    prompts = [random_tokens(21, seed) for seed in range(3)]
    results = []
    for kind in ("ops", "blocks"):
        monkeypatch.setenv("MLXSERVE_DECODER", kind)
        config = EngineConfig(max_running=3, page_size=8, max_step_tokens=16, kv_pages=24)
        target = ModelTarget(load_model(folder), config.page_size)
        core = EngineCore(target, config, is_pipelined=ops.supports_steps_in_flight())
        requests = [greedy(str(index), prompt) for index, prompt in enumerate(prompts)]
        results.append(generate(core, *requests))
    assert results[0] == results[1]
    assert all(len(tokens) == 12 for tokens in results[0])
