"""Whole decoder layers as one operation compute what single operations and mlx-lm's own blocks compute, and a
row's bits depend on nothing beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_stock

from mlxserve.models import loader
from mlxserve.models.loader import LoadedModel, load_model
from mlxserve.models.paged import ModelPages, PagedCaches, PagedMetadata, RowAdapters
from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import extension, num_threads
from tests.tiny_models import TinyModel, write_tiny_model

PAGE = 8
NUM_LAYERS = 3
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
GRANITE = {
    "attention_bias": True,
    "mlp_bias": True,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-interleaved": {"rope_traditional": True},
    "llama-llama3": {"rope_scaling": LLAMA3_ROPE},
    "llama-yarn": {"rope_scaling": YARN_ROPE},
    "llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-windowed": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": True},
    "mixtral": MOE,
    "olmoe": MOE | {"norm_topk_prob": True},
    "granitemoe": GRANITE | MOE,
    "gemma2": {},
    "gemma3_text": {"sliding_window": 8},
    "phi3": {},
    "phi3-long": {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": 32},
    "granite": GRANITE,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "olmo2": {},
}


@pytest.fixture(autouse=True)
def cpu_kernels() -> None:
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")


def tiny(folder: Path, family: str, *, bits: int | None = None, mode: str = "affine", **shape: Any) -> Path:
    model = TinyModel(
        model_type=family.split("-")[0], layers=NUM_LAYERS, extra_config=FAMILIES[family], **shape
    )
    write_tiny_model(folder, model)
    if bits is not None:
        quantize(folder, bits, mode)
    return folder


def quantize(folder: Path, bits: int, mode: str = "affine", *, bits_of: dict[str, int] | None = None) -> None:
    """Rewrite a checkpoint in one of MLX's formats, norms and biases as they are. ``bits_of`` names layers,
    by a part of their paths, that become affine with others."""
    group_size = 16 if mode == "nvfp4" else 32
    module, _ = load_stock(folder, strict=True)
    others: dict[str, Any] = {}

    def choose(path: str, layer: nn.Module) -> Any:
        if not hasattr(layer, "to_quantized"):
            return False
        for part, count in (bits_of or {}).items():
            if part in path:
                others[path] = {"group_size": 32, "bits": count, "mode": "affine"}
                return others[path]
        return True

    nn.quantize(module, group_size=group_size, bits=bits, mode=mode, class_predicate=choose)
    (folder / "model.safetensors").unlink()
    weights = {name: array for name, array in tree_flatten(module.parameters()) if "rope" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization"] = {"group_size": group_size, "bits": bits, "mode": mode, **others}
    path.write_text(json.dumps(config), encoding="utf-8")


@dataclass(frozen=True)
class Run:
    """One sequence's share of a step: its tokens from ``start`` on, and its pages."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


def new_pages(model: LoadedModel, count: int = 24) -> ModelPages:
    pages = ModelPages(model.layers, PAGE)
    pages.resize(count)
    return pages


def step(
    model: LoadedModel, pages: ModelPages, *runs: Run, adapters: RowAdapters | None = None
) -> list[np.ndarray]:
    """Logits of all rows of each run."""

    def ints(values: Any) -> mx.array:
        return mx.array(np.asarray(values, dtype=np.int32))

    positions = [run.start + i for run in runs for i in range(len(run.tokens))]
    owners = [run for run in runs for _ in run.tokens]
    slots = [run.pages[at // PAGE] * PAGE + at % PAGE for run, at in zip(owners, positions, strict=True)]
    width = max(len(run.pages) for run in runs)
    starts = np.cumsum([0, *(len(run.tokens) for run in runs)])
    metadata = PagedMetadata(
        positions=ints(positions),
        slot_mapping=ints(slots),
        block_tables=ints([[*run.pages, *[0] * (width - len(run.pages))] for run in runs]),
        q_starts=ints(starts),
        kv_lens=ints([run.start + len(run.tokens) for run in runs]),
        adapters=adapters,
    )
    caches = PagedCaches(pages, metadata, mx.arange(len(positions)))
    logits = model.forward(ints([token for run in runs for token in run.tokens]), caches)
    return np.split(np.array(logits), starts[1:-1])


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, count).tolist()


def in_chunks(
    model: LoadedModel, tokens: list[int], chunks: Sequence[int], pages: Sequence[int]
) -> np.ndarray:
    """Logits of one sequence that comes in chunks."""
    layers, start, results = new_pages(model), 0, []
    for length in chunks:
        results += step(model, layers, Run(tokens[start : start + length], start, pages))
        start += length
    assert start == len(tokens)
    return np.concatenate(results)


def assert_close(left: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-4 * np.abs(right).max())


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_is_unfused_is_stock(family: str, bits: int | None, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family, bits=bits)
    tokens, pages = random_tokens(30), (5, 2, 9, 0)
    stock, _ = load_stock(folder, strict=True)
    expected = np.array(stock(mx.array([tokens]), make_prompt_cache(stock))[0])
    fused, unfused = load_model(folder), load_model(folder, fuse=False)
    assert (fused.num_fused_layers, unfused.num_fused_layers) == (NUM_LAYERS, 0)
    chunks = (20, 1, 5, 4)
    logits = in_chunks(fused, tokens, chunks, pages)
    assert_close(logits, in_chunks(unfused, tokens, chunks, pages))
    assert_close(logits, expected)


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        ("llama", 4),
        ("llama-windowed", 8),
        ("gemma3_text", None),
        ("gemma2", 4),
        ("olmo2", None),
        ("mixtral", 4),
        ("qwen2_moe", 8),
        ("qwen3_moe", None),
    ],
)
def test_bits_of_a_row_depend_on_itself_alone(family: str, bits: int | None, tmp_path: Path) -> None:
    model = load_model(tiny(tmp_path, family, bits=bits, context=512))
    tokens = random_tokens(150)
    whole = in_chunks(model, tokens, [150], range(19))
    for chunks in ([1] * 150, [7, 100, 1, 6, 36], [64, 64, 22]):
        np.testing.assert_array_equal(in_chunks(model, tokens, chunks, range(19)), whole)
    order = np.random.default_rng(1).permutation(24)[:19].tolist()
    np.testing.assert_array_equal(in_chunks(model, tokens, [150], order), whole)


def test_bits_are_the_same_beside_other_sequences(tmp_path: Path) -> None:
    model = load_model(tiny(tmp_path, "qwen3", bits=4))
    tokens, other = random_tokens(40), random_tokens(40, seed=8)
    alone = in_chunks(model, tokens, [40], range(5))
    layers = new_pages(model)
    results = []
    for start, end in ((0, 30), (30, 37), (37, 38), (38, 40)):
        ours = Run(tokens[start:end], start, (11, 3, 7, 20, 5))
        theirs = Run(other[start : start + 2], start, (8, 1, 2, 4, 6))
        third = Run(other[:9], 0, (13, 12))
        # The place of a row in the batch changes from step to step.
        runs = [theirs, ours, third] if start else [third, theirs, ours]
        results.append(step(model, layers, *runs)[runs.index(ours)])
    np.testing.assert_array_equal(np.concatenate(results), alone)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_bits_are_the_same_with_any_number_of_threads(isa: str, family: str, tmp_path: Path) -> None:
    cpu = extension()
    assert cpu is not None
    if isa not in cpu.available_isas():
        pytest.skip(f"this CPU has no {isa}")
    tokens, in_use = random_tokens(60), cpu.isa()
    try:
        cpu.configure(1, isa)
        model = load_model(tiny(tmp_path, family, bits=4))
        results = []
        for threads in (1, 2, 3, 5):
            cpu.configure(threads, isa)
            results.append(in_chunks(model, tokens, [50, 1, 4, 5], range(8)))
    finally:
        cpu.configure(num_threads(), in_use)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_steps_in_flight_see_their_own_pages(tmp_path: Path) -> None:
    """Steps are started without waiting; the pages stay where they are."""
    model = load_model(tiny(tmp_path, "llama", bits=4))
    tokens = random_tokens(60)
    expected = in_chunks(model, tokens, [60], range(8))
    layers = new_pages(model)
    results = []
    for at, token in enumerate(tokens):
        metadata = PagedMetadata(
            *(mx.array(values, dtype=mx.int32) for values in ([at], [at], [list(range(8))], [0, 1], [at + 1]))
        )
        logits = model.forward(mx.array([token]), PagedCaches(layers, metadata, mx.array([0])))
        mx.async_eval(logits)
        results.append(logits)
    np.testing.assert_array_equal(np.concatenate([np.array(logits) for logits in results]), expected)


FORMATS = [
    ("affine", 2),
    ("affine", 3),
    ("affine", 5),
    ("affine", 6),
    ("mxfp4", 4),
    ("mxfp8", 8),
    ("nvfp4", 4),
]


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(("mode", "bits"), FORMATS)
def test_every_format_is_fused(family: str, mode: str, bits: int, tmp_path: Path) -> None:
    """phi3's projections are rows of larger matrices."""
    folder = tiny(tmp_path, family, bits=bits, mode=mode)
    tokens, pages = random_tokens(30), (5, 2, 9, 0)
    fused, unfused = load_model(folder), load_model(folder, fuse=False)
    assert (fused.num_fused_layers, unfused.num_fused_layers) == (NUM_LAYERS, 0)
    logits = in_chunks(fused, tokens, (20, 1, 5, 4), pages)
    assert_close(logits, in_chunks(unfused, tokens, (20, 1, 5, 4), pages))
    np.testing.assert_array_equal(logits, in_chunks(fused, tokens, [30], pages))
    stock, _ = load_stock(folder, strict=True)
    assert_close(logits, np.array(stock(mx.array([tokens]), make_prompt_cache(stock))[0].astype(mx.float32)))


def assert_experts_in_the_stack(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Returns the logits of 9 tokens."""
    expected = in_chunks(model, random_tokens(9), [8, 1], range(2))
    for name in ("route", "gated_experts", "gather_matmul"):
        monkeypatch.delattr(ops, name)
    np.testing.assert_array_equal(in_chunks(model, random_tokens(9), [8, 1], range(2)), expected)
    return expected


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"])
def test_experts_are_part_of_the_stack(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_experts_in_the_stack(load_model(tiny(tmp_path, family, bits=4)), monkeypatch)


@pytest.mark.parametrize(("mode", "bits"), FORMATS)
def test_experts_of_every_format_are(
    mode: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(tmp_path, "qwen2_moe", bits=bits, mode=mode)
    unfused = in_chunks(load_model(folder, fuse=False), random_tokens(9), [8, 1], range(2))
    assert_close(assert_experts_in_the_stack(load_model(folder), monkeypatch), unfused)


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
@pytest.mark.parametrize("part", ["switch_mlp", "switch_mlp.gate_proj", "switch_mlp.down_proj"])
def test_experts_in_other_formats(family: str, part: str, tmp_path: Path) -> None:
    """Six bits among four. Where one of gate and up can be tiles, they run behind the attention."""
    folder = tiny(tmp_path, family)
    quantize(folder, 4, bits_of={part: 6})
    tokens = random_tokens(30)
    fused, unfused = load_model(folder), load_model(folder, fuse=False)
    assert fused.num_fused_layers == NUM_LAYERS
    logits = in_chunks(fused, tokens, (20, 1, 9), range(4))
    assert_close(logits, in_chunks(unfused, tokens, (20, 1, 9), range(4)))
    stock, _ = load_stock(folder, strict=True)
    assert_close(logits, np.array(stock(mx.array([tokens]), make_prompt_cache(stock))[0].astype(mx.float32)))


def test_other_blocks_stay_unfused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "cohere", TinyModel(model_type="cohere", extra_config={"logit_scale": 1.0}))
    assert load_model(tmp_path / "cohere").num_fused_layers == 0


def test_a_wrong_fused_path_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny(tmp_path, "llama")
    tokens = random_tokens(20)
    expected = in_chunks(load_model(folder, fuse=False), tokens, [20], range(3))
    fuse = loader.fuse_blocks

    def fuse_wrongly(module: nn.Module, specs: Any) -> int:
        for block in module.layers:
            block.self_attn.scale *= 3
        try:
            return fuse(module, specs)
        finally:
            for block in module.layers:
                block.self_attn.scale /= 3

    monkeypatch.setattr(loader, "fuse_blocks", fuse_wrongly)
    with caplog.at_level(logging.WARNING, loader.__name__):
        model = load_model(folder)
    assert model.num_fused_layers == 0
    assert len(caplog.records) == 1
    assert "'llama' runs unfused: its logits on pages differ by" in caplog.text
    np.testing.assert_allclose(in_chunks(model, tokens, [20], range(3)), expected, rtol=1e-5, atol=1e-5)
