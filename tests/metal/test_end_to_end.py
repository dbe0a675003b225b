"""A small quantized Llama through the real engine with every kernel of ours executed as Metal: the logits are
those of mlx's own ops within a tolerance, the tokens the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_stock

from metal_on_host import Host
from mlxserve.config import EngineConfig
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.target import StepInputs
from mlxserve.models.adapters import bind_adapters
from mlxserve.models.loader import load_model
from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import REFERENCE, Selection, metal_selection, using
from tests.engine.driving import generate, greedy
from tests.engine.test_adapters import chunked, random_adapter, stock_logits
from tests.engine.test_fused import assert_close, in_chunks, quantize, random_tokens, tiny
from tests.tiny_models import TinyModel, write_tiny_model

PAGE = 16
NEW_TOKENS = 12
KERNELS = {
    *("add_rms_norm", "quantized_matmul", "gate_up"),
    *("rope", "rope_and_write_tails"),
    *("attend_tile", "attend_split", "merge_splits"),
}
"""What a Llama runs: its steps, and the comparison at load, whose block tables are as wide as long contexts'
and whose pages are written with no step in flight."""
TOLERANCE = {"float32": 1e-5, "float16": 2e-2}
"""Largest difference of a logit from float32, relative to the step's largest logit."""


class RecordingTarget(ModelTarget):
    """Keeps the logits of every step that samples."""

    def __init__(self, folder: Path, kv_bits: int | None) -> None:
        super().__init__(load_model(folder), PAGE, kv_bits)
        self.logits: list[np.ndarray] = []
        self.rows: list[int] = []

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        logits = super().forward(batch, inputs)
        self.rows.append(batch.num_tokens)
        if batch.num_sampled:
            self.logits.append(np.array(logits.astype(mx.float32)))
        return logits


@dataclass
class Outcome:
    tokens: list[list[int]]
    logits: list[np.ndarray]
    rows: list[int] = field(default_factory=list)


def serve(folder: Path, chosen: Selection, kv_bits: int | None = None) -> Outcome:
    """Two prompts, of 37 and 25 tokens, in chunks of at most 24 tokens a step; both then cross the end of a
    page as they decode."""
    with using(chosen):
        config = EngineConfig(
            max_running=2,
            page_size=PAGE,
            max_step_tokens=24,
            kv_pages=12,
            kv_bits=kv_bits,
            prefix_cache=False,
        )
        target = RecordingTarget(folder, kv_bits)
        core = EngineCore(target, config, is_pipelined=ops.supports_steps_in_flight())
        prompts = (random_tokens(37, 1), random_tokens(25, 2))
        requests = [greedy(str(index), prompt, NEW_TOKENS) for index, prompt in enumerate(prompts)]
        return Outcome(generate(core, *requests), target.logits, target.rows)


def llama(folder: Path, dtype: str) -> Path:
    write_tiny_model(folder, TinyModel(layers=2, dtype=dtype, has_eos=False, head_dim=32))
    quantize(folder, 4)
    return folder


@pytest.mark.parametrize(
    ("dtype", "kv_bits"),
    [
        ("float16", None),
        ("float32", None),
        pytest.param("float32", 8, marks=pytest.mark.full),
        pytest.param("float32", 4, marks=pytest.mark.full),
    ],
)
def test_a_llama_runs_as_metal(host: Host, dtype: str, kv_bits: int | None, tmp_path: Path) -> None:
    folder = llama(tmp_path, dtype)
    exact = serve(folder, REFERENCE, kv_bits)
    # mlx-lm's own blocks, in the model's dtype as ours.
    plain = serve(folder, metal_selection(host.metal_kernel, proven=frozenset()), kv_bits)
    assert not host.reports
    ours = serve(folder, metal_selection(host.metal_kernel), kv_bits)
    assert {report.name for report in host.reports} == KERNELS
    assert ours.tokens == plain.tokens == exact.tokens
    assert [len(tokens) for tokens in ours.tokens] == [NEW_TOKENS, NEW_TOKENS]
    assert max(ours.rows) > 8 and 2 in ours.rows, "chunks, then both decode together"
    errors, plain_errors = (_errors(side.logits, exact.logits) for side in (ours, plain))
    assert max(errors) <= TOLERANCE[dtype]
    if dtype != "float32":
        # Kernels round once where single operations round often.
        assert np.mean(errors) <= np.mean(plain_errors)


def _errors(found: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    """Of each step, relative to its largest logit."""
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, exact, strict=True)]


def test_bits_of_a_row_depend_on_itself_alone(host: Host, tmp_path: Path) -> None:
    """In one piece, more rows than a tile of the products has, or in chunks."""
    folder, tokens = llama(tmp_path, "float16"), random_tokens(27)
    with using(metal_selection(host.metal_kernel)):
        model = load_model(folder)
        whole = in_chunks(model, tokens, [27], range(4))
        np.testing.assert_array_equal(in_chunks(model, tokens, [3, 1, 18, 5], (5, 2, 7, 0)), whole)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_run_as_metal(host: Host, family: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family, bits=4)
    with using(metal_selection(host.metal_kernel)):
        ours = in_chunks(load_model(folder), random_tokens(20), (12, 1, 7), range(3))
    assert {report.name for report in host.reports} >= {"expert_gate_up", "gather_matmul"}
    with using(REFERENCE):
        assert_close(ours, in_chunks(load_model(folder), random_tokens(20), (12, 1, 7), range(3)))


def test_adapters_run_as_metal(host: Host, tmp_path: Path) -> None:
    """Rows with two adapters and none, some of whose projections share one product."""
    folder, tokens = tiny(tmp_path, "llama", bits=4), [random_tokens(9, seed) for seed in range(3)]
    stock, _ = load_stock(folder, strict=True)
    with using(metal_selection(host.metal_kernel)):
        model = load_model(folder)
        adapters = [random_adapter(model, stock, seed, 8) for seed in (1, 2)]
        bound = bind_adapters(model.module, adapters)
        slots = (0, -1, 1)
        results = chunked(model, bound, list(zip(tokens, slots, strict=True)), (5, 1, 3))
    assert {report.name for report in host.reports} >= {"low_rank_inner", "low_rank_outer"}
    for ours, slot, ids in zip(results, slots, tokens, strict=True):
        assert_close(ours, stock_logits(folder, ids, None if slot < 0 else adapters[slot]))


def test_tokens_are_those_of_the_cpu(host: Host, tmp_path: Path) -> None:
    folder = llama(tmp_path, "float32")
    assert serve(folder, metal_selection(host.metal_kernel)).tokens == serve(folder, REFERENCE).tokens
