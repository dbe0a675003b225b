"""Rows of one forward have different adapters and none: each computes what mlx-lm computes with its
LoRALinear layers, and a row without adapter has the bits that it has alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_model as load_stock

from mlxserve.errors import UnsupportedModelError
from mlxserve.models.adapters import bind_adapters
from mlxserve.models.fused import fused_parts
from mlxserve.models.loader import LoadedModel, load_model
from mlxserve.models.paged import PagedCaches, PagedMetadata, RowAdapters
from mlxserve_kernels import ops
from mlxserve_kernels.adapters import LowRank, StackAdapters
from mlxserve_kernels.dispatch import extension, num_threads
from tests.engine.test_fused import (
    NUM_LAYERS,
    Run,
    assert_close,
    in_chunks,
    new_pages,
    random_tokens,
    step,
    tiny,
)

Adapter = Mapping[str, LowRank]

SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = (*SEPARATE, "qkv_proj", "gate_up_proj")


@pytest.fixture(autouse=True)
def cpu_kernels() -> None:
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")


def random_adapter(
    model: LoadedModel,
    stock: nn.Module,
    seed: int,
    rank: int,
    names: Sequence[str] = ALL,
    dtype: mx.Dtype = mx.float32,
) -> dict[str, LowRank]:
    """Changes about as large as the products, of those layers that the fused model can change."""
    key, changes = mx.random.key(seed), {}
    paths = {
        f"{block}.{path}" for block, part in fused_parts(model.module).items() for path in part.projections
    }
    for path, layer in stock.named_modules():
        if path not in paths or path.split(".")[-1] not in names:
            continue
        num_outputs, num_inputs = layer.weight.shape
        if isinstance(layer, nn.QuantizedLinear):
            num_inputs = num_inputs * 32 // layer.bits
        key, first, second = mx.random.split(key, 3)
        a = mx.random.normal((num_inputs, rank), key=first) / num_inputs**0.5
        b = mx.random.normal((rank, num_outputs), key=second) / rank**0.5
        changes[path] = LowRank(a.astype(dtype), b.astype(dtype), 0.5 + seed % 3)
    assert changes
    return changes


def stock_logits(folder: Path, tokens: Sequence[int], adapter: Adapter | None) -> np.ndarray:
    """mlx-lm's own logits, with LoRALinear layers in the places that the adapter changes."""
    stock, _ = load_stock(folder, strict=True)
    layers = dict(stock.named_modules())
    changed = []
    for path, change in (adapter or {}).items():
        lora = LoRALinear.from_base(layers[path], r=change.a.shape[1], scale=change.scale)
        lora.lora_a, lora.lora_b = change.a.astype(mx.float32), change.b.astype(mx.float32)
        changed.append((path, lora))
    stock.update_modules(tree_unflatten(changed))
    return np.array(stock(mx.array([tokens]), make_prompt_cache(stock))[0].astype(mx.float32))


def ints(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def rows_of(bound: Any, lengths_and_slots: Sequence[tuple[int, int]]) -> RowAdapters:
    slots = [slot for length, slot in lengths_and_slots for _ in range(length)]
    return RowAdapters(bound, mx.array(np.array(slots, dtype=np.int32)))


def chunked(
    model: LoadedModel, bound: Any, sequences: Sequence[tuple[Sequence[int], int]], chunks: Sequence[int]
) -> list[np.ndarray]:
    """Logits of sequences of equal length, each with its slot; a step has a chunk of each."""
    layers = new_pages(model)
    results: list[list[np.ndarray]] = [[] for _ in sequences]
    start = 0
    for length in chunks:
        runs = [
            Run(tokens[start : start + length], start, range(4 * at, 4 * at + 4))
            for at, (tokens, _) in enumerate(sequences)
        ]
        rows = rows_of(bound, [(length, slot) for _, slot in sequences])
        for at, logits in enumerate(step(model, layers, *runs, adapters=rows)):
            results[at].append(logits)
        start += length
    return [np.concatenate(parts) for parts in results]


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama-biased",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "phi3",
        "granite",
        "smollm3",
        "mixtral",
        "qwen2_moe",
    ],
)
def test_each_row_has_its_own(family: str, bits: int | None, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family, bits=bits)
    model, (stock, _) = load_model(folder), load_stock(folder, strict=True)
    adapters = [random_adapter(model, stock, 1, 8), random_adapter(model, stock, 2, 20)]
    bound = bind_adapters(model.module, adapters)
    tokens = [random_tokens(24, seed) for seed in range(4)]
    slots, chunks = (0, -1, 1, 0), (16, 1, 3, 1, 3)
    together = chunked(model, bound, list(zip(tokens, slots, strict=True)), chunks)
    plain = in_chunks(model, tokens[1], chunks, range(4, 8))
    np.testing.assert_array_equal(together[1], plain)
    for ours, slot, ids in zip(together, slots, tokens, strict=True):
        assert_close(ours, stock_logits(folder, ids, None if slot < 0 else adapters[slot]))
        (alone,) = chunked(model, bound, [(ids, slot)], (24,))
        np.testing.assert_array_equal(ours, alone)
    # The adapters matter, and differ.
    (other,) = chunked(model, bound, [(tokens[0], 1)], chunks)
    without = in_chunks(model, tokens[0], chunks, range(4))
    for left, right in ((together[0], other), (together[0], without), (other, without)):
        assert np.abs(left - right).max() > 0.01 * np.abs(without).max()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *itertools.product(("llama", "qwen2_moe"), SEPARATE),
        *itertools.product(("phi3",), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
)
def test_of_one_projection(name: str, family: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family, bits=4)
    model, (stock, _) = load_model(folder), load_stock(folder, strict=True)
    adapter, ids = random_adapter(model, stock, 3, 16, [name]), random_tokens(20)
    bound = bind_adapters(model.module, [adapter])
    (ours,) = chunked(model, bound, [(ids, 0)], (12, 1, 2, 5))
    assert_close(ours, stock_logits(folder, ids, adapter))
    assert np.abs(ours - in_chunks(model, ids, [20], range(4))).max() > 0.01


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_adapters(dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", bits=4)
    model, (stock, _) = load_model(folder), load_stock(folder, strict=True)
    adapter, ids = random_adapter(model, stock, 5, 12, dtype=dtype), random_tokens(20)
    (ours,) = chunked(model, bind_adapters(model.module, [adapter]), [(ids, 0)], (12, 1, 2, 5))
    assert_close(ours, stock_logits(folder, ids, adapter))


def test_slots_may_change_different_layers(tmp_path: Path) -> None:
    """Of the same layer one slot changes q, another down; the last layer is changed by none."""
    folder = tiny(tmp_path, "llama", bits=4)
    model, (stock, _) = load_model(folder), load_stock(folder, strict=True)
    first = {k: v for k, v in random_adapter(model, stock, 1, 4, ["q_proj"]).items() if ".0." in k}
    second = {k: v for k, v in random_adapter(model, stock, 2, 40, ["down_proj"]).items() if ".2." not in k}
    bound, tokens = bind_adapters(model.module, [first, {}, second]), random_tokens(20)
    results = chunked(model, bound, [(tokens, slot) for slot in (2, 1, 0, -1)], (8, 1, 2, 9))
    for ours, adapter in zip(results, (second, None, first, None), strict=True):
        assert_close(ours, stock_logits(folder, tokens, adapter))
    np.testing.assert_array_equal(results[1], results[3])
    np.testing.assert_array_equal(results[3], in_chunks(model, tokens, [20], range(4)))


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_bits_are_the_same_with_any_number_of_threads(isa: str, family: str, tmp_path: Path) -> None:
    cpu = extension()
    assert cpu is not None
    if isa not in cpu.available_isas():
        pytest.skip(f"this CPU has no {isa}")
    tokens, in_use = random_tokens(24), cpu.isa()
    try:
        cpu.configure(1, isa)
        folder = tiny(tmp_path, family, bits=4)
        model, (stock, _) = load_model(folder), load_stock(folder, strict=True)
        adapters = [random_adapter(model, stock, 1, 8), random_adapter(model, stock, 2, 24)]
        bound, results = bind_adapters(model.module, adapters), []
        for threads in (1, 2, 3, 5):
            cpu.configure(threads, isa)
            results.append(chunked(model, bound, [(tokens, slot) for slot in (1, -1, 0)], (18, 1, 1, 4)))
    finally:
        cpu.configure(num_threads(), in_use)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    for result, adapter in zip(results[0], (adapters[1], None, adapters[0]), strict=True):
        assert_close(result, stock_logits(folder, tokens, adapter))


def test_a_step_in_flight_keeps_its_adapters(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", bits=4)
    model, (stock, _) = load_model(folder), load_stock(folder, strict=True)
    ids = random_tokens(3)
    bound = bind_adapters(model.module, [random_adapter(model, stock, 1, 8)])
    (expected,) = chunked(model, bound, [(ids, 0)], [3])

    metadata = PagedMetadata(
        ints(0, 1, 2), ints(0, 1, 2), ints(0)[None], ints(0, 3), ints(3), adapters=rows_of(bound, [(3, 0)])
    )
    logits = model.forward(mx.array(ids), PagedCaches(new_pages(model), metadata, mx.arange(3)))
    del bound, metadata
    np.testing.assert_array_equal(np.array(logits), expected)


def test_what_cannot_be_changed_is_named(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen2_moe", bits=4)
    module = load_model(folder).module
    change = LowRank(mx.zeros((64, 4)), mx.zeros((4, 64)), 1.0)
    layer = "model.layers.1"
    with pytest.raises(
        UnsupportedModelError, match=r"adapter 1 changes 'lm_head', which is in no fused block"
    ):
        bind_adapters(module, [{}, {"lm_head": change}])
    path = f"{layer}.mlp.switch_mlp.gate_proj"
    with pytest.raises(
        UnsupportedModelError, match=rf"{path}'; of that layer it can change self_attn.q_proj, .*"
    ):
        bind_adapters(module, [{path: change}])
    with pytest.raises(UnsupportedModelError, match=r"mlp.shared_expert.gate_proj"):
        bind_adapters(module, [{f"{layer}.mlp.gate": change}])
    with pytest.raises(ValueError, match=r"adapter 0, .*k_proj: b must be \[R, 32\], got \[4, 64\]"):
        bind_adapters(module, [{f"{layer}.self_attn.k_proj": change}])
    with pytest.raises(
        ValueError, match=r"layer 1, q: a must be \[64, R\] and b \[R, 64\], got \(32,4\) and"
    ):
        bind_adapters(module, [{f"{layer}.self_attn.q_proj": LowRank(change.a[:32], change.b, 1.0)}])
    with pytest.raises(ValueError, match="layer 1, q: a and b must have one dtype"):
        bind_adapters(
            module, [{f"{layer}.self_attn.q_proj": LowRank(change.a, change.b.astype(mx.float16), 1.0)}]
        )
    unfused = load_model(folder, fuse=False).module
    with pytest.raises(UnsupportedModelError, match="in no fused block"):
        bind_adapters(unfused, [{f"{layer}.self_attn.q_proj": change}])


def test_wrong_adapters_of_a_stack(tmp_path: Path) -> None:
    model, other = load_model(tiny(tmp_path / "a", "mixtral")), load_model(tiny(tmp_path / "b", "llama"))
    (stack,) = (part.stack for part in fused_parts(model.module).values() if part.stack is not None)
    change = LowRank(mx.zeros((64, 4)), mx.zeros((4, 64)), 1.0)
    with pytest.raises(ValueError, match="layer 2, gate: adapters of experts are not supported"):
        StackAdapters(stack, [[{}, {}, {"gate": change}]])
    with pytest.raises(ValueError, match="layer 0, x: there is no such projection"):
        StackAdapters(stack, [[{"x": change}, {}, {}]])
    with pytest.raises(ValueError, match="adapter 1 has 1 layers, the stack 3"):
        StackAdapters(stack, [[{}] * NUM_LAYERS, [{}]])
    bound = bind_adapters(model.module, [{"model.layers.0.self_attn.q_proj": change}])
    run = Run(random_tokens(3), 0, (0,))
    with pytest.raises(ValueError, match="the adapters were made for another stack"):
        step(other, new_pages(other), run, adapters=rows_of(bound, [(3, 0)]))
    with pytest.raises(ValueError, match="adapter_slots must be int32 with 3 entries"):
        step(model, new_pages(model), run, adapters=rows_of(bound, [(2, 0)]))


@pytest.mark.parametrize("wrong", [-2, 1])
def test_wrong_slots_are_found_at_evaluation(wrong: int, tmp_path: Path) -> None:
    model = load_model(tiny(tmp_path, "llama"))
    (stack,) = (part.stack for part in fused_parts(model.module).values() if part.stack is not None)
    change = LowRank(mx.zeros((64, 4)), mx.zeros((4, 64)), 1.0)
    pages = new_pages(model)
    hidden, _ = stack(
        pages.held(0, stack),
        mx.zeros((2, 64)),
        ints(0, 1),
        ints(0, 1),
        ints(0)[None],
        ints(0, 2),
        ints(2),
        pages[0].keys,
        adapters=StackAdapters(stack, [[{"q": change}, {}, {}]]),
        adapter_slots=ints(0, wrong),
    )
    with pytest.raises(RuntimeError, match=rf"adapter_slots\[1\] is {wrong}, there are 1 adapters"):
        mx.eval(hidden)
