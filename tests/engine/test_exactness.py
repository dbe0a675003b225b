"""A request's logits have the same bits whoever else is there, however it is cut and wherever its pages
lie. Needs the C++ kernels: mlx's own ops make no such promise."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_stock
from mlx_lm.utils import quantize_model

from mlxserve.config import EngineConfig
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.engine.scheduler import ScheduledBatch, Scheduler
from mlxserve.engine.sequence import Sequence
from mlxserve.engine.target import StepInputs
from mlxserve.models.loader import load_model
from mlxserve.types import GenerationRequest, SamplingParams, TokenOutput
from mlxserve_kernels import ops
from tests.tiny_models import write_tiny_model

from .driving import generate, greedy, tokens

pytestmark = pytest.mark.skipif(
    not ops.implementation().startswith("cpu"), reason="the kernels that promise equal bits are not in use"
)

Rows = dict[int, npt.NDArray[np.float32]]
PROMPT = [(7 * i * i + 3 * i) % 96 for i in range(70)]


class RecordingTarget(ModelTarget):
    """Keeps the logits of every sampled row, by request and index; a row sampled again, after its step
    was lost or it was preempted, must have the same bits."""

    seen: dict[str, Rows]

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        logits = super().forward(batch, inputs)
        place = 0
        for row in batch.rows:
            rows = self.seen[row.sequence.request.request_id]
            for offset in range(row.num_sampled):
                index, found = row.sample_index + offset, np.array(logits[place + offset])
                assert_bits(rows.setdefault(index, found), found)
            place += row.num_sampled
        return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    half = {"hidden": 128, "head_dim": 32, "intermediate": 192}
    return {
        "full": write_tiny_model(root / "full", context=512),
        "half": write_tiny_model(root / "half", dtype="float16", context=512, **half),
        "quantized": quantized(write_tiny_model(root / "quantized", context=512)),
        "window": write_tiny_model(root / "window", model_type="gemma3_text", sliding_window=8, layers=4),
    }


def quantized(folder: Path) -> Path:
    """The same folder with affine 4-bit weights in groups of 32."""
    model, config = load_stock(folder)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def core_of(folder: Path, **limits: int | bool) -> tuple[EngineCore, RecordingTarget]:
    config = EngineConfig(**({"page_size": 8, "kv_pages": 96} | limits))  # type: ignore[arg-type]
    target = RecordingTarget(load_model(folder), config.page_size)
    target.seen = defaultdict(dict)
    return EngineCore(target, config, is_pipelined=True), target


def assert_bits(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


def assert_same_bits(left: Rows, right: Rows, count: int = 12) -> None:
    for index in range(count):
        assert_bits(left[index], right[index])


@pytest.fixture(scope="module", params=["full", "half", "quantized", "window"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Rows:
    core, target = core_of(folder)
    generate(core, greedy("x", PROMPT))
    return target.seen["x"]


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_chunks(folder: Path, alone: Rows, chunk: int) -> None:
    core, target = core_of(folder, max_step_tokens=chunk, max_running=2)
    generate(core, greedy("x", PROMPT))
    assert_same_bits(target.seen["x"], alone)


@pytest.mark.parametrize("num_others", [1, 5, 15])
def test_company(folder: Path, alone: Rows, num_others: int) -> None:
    core, target = core_of(folder)
    others = [greedy(f"other{i}", PROMPT[i + 1 : 3 + 4 * i + 9], 5 + i) for i in range(num_others)]
    generate(core, *others[:2], greedy("x", PROMPT), *others[2:])
    assert_same_bits(target.seen["x"], alone)


def test_pages_in_disorder(folder: Path, alone: Rows) -> None:
    core, target = core_of(folder, prefix_cache=False, kv_pages=40)
    for i in range(6):
        core.add(greedy(f"o{i}", PROMPT[i : 9 + 6 * i], 3 + 2 * (i % 3)))
    for _ in range(6):
        core.step()
    generate_among(core, greedy("x", PROMPT))
    pool = core._scheduler.pool
    assert pool._free != sorted(pool._free, reverse=True), "the pages were not in disorder"
    assert_same_bits(target.seen["x"], alone)


def generate_among(core: EngineCore, request: GenerationRequest) -> list[int]:
    """Runs the engine empty with one more request; its tokens."""
    core.add(request)
    outputs: list[TokenOutput] = []
    while core.has_work:
        outputs += [output for output in core.step() if output.request_id == request.request_id]
    return tokens(outputs)


@pytest.mark.parametrize("shared", [3, 8, 40, 69, 70])
def test_a_prefix_hit(folder: Path, alone: Rows, shared: int) -> None:
    core, target = core_of(folder)
    generate(core, greedy("first", [*PROMPT[:shared], 90, 91], 9))
    core.add(greedy("x", PROMPT))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert outputs[-1].num_cached_tokens == min(shared, 69)
    assert_same_bits(target.seen["x"], alone)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption(folder: Path, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[str] = []
    original = Scheduler._preempt

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        preempted.append(sequence.request.request_id)
        original(self, sequence)

    request = greedy("x", PROMPT[:30], 20)
    solo_core, solo_target = core_of(folder)
    expected = generate(solo_core, request)[0]
    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    core, target = core_of(folder, kv_pages=10, prefix_cache=prefix_cache)
    core.add(greedy("old", PROMPT[40:56], 60))
    core.step()
    assert generate_among(core, request) == expected
    assert "x" in preempted
    assert_same_bits(target.seen["x"], solo_target.seen["x"], count=20)


def test_seeded_rows_repeat_in_any_company(folder: Path) -> None:
    hot = GenerationRequest("x", tuple(PROMPT[:20]), 12, SamplingParams(temperature=1.5, seed=3, top_p=0.95))
    core, _ = core_of(folder)
    alone = generate(core, hot)[0]
    crowd, _ = core_of(folder, max_step_tokens=24, max_running=4)
    others = [greedy(f"o{i}", PROMPT[i : i + 9 * i + 4]) for i in range(5)]
    assert generate(crowd, *others[:3], hot, *others[3:])[3] == alone
