"""The engine core, the runner and the small parts beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.block_pool import BlockPool
from mlxserve.engine.core import EngineCore
from mlxserve.engine.memory import plan_pages
from mlxserve.engine.model_target import ModelTarget
from mlxserve.engine.pacing import MIN_PREFILL_TOKENS, PrefillPacer
from mlxserve.engine.runner import Runner, independent_groups
from mlxserve.engine.scheduler import ScheduledBatch, ScheduledSequence, Scheduler
from mlxserve.engine.target import StepInputs
from mlxserve.errors import ModelLoadError, RequestFailedError, UnsupportedModelError
from mlxserve.models.loader import load_model
from mlxserve.types import TokenOutput
from tests.tiny_models import write_tiny_model

from .driving import generate, greedy, run, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=512)


class PlantingTarget(ModelTarget):
    """Spoils the logits of the requests in ``spoiled``."""

    spoiled: frozenset[str] = frozenset()

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        logits = super().forward(batch, inputs)
        rows = [row.sequence.request.request_id for row in batch.rows for _ in range(row.num_sampled)]
        for index, name in enumerate(rows):
            if name in self.spoiled:
                logits[index, 3] = mx.nan
        return logits


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_nan_ends_its_request_alone(folder: Path, is_pipelined: bool) -> None:
    target = PlantingTarget(load_model(folder), 8)
    core = EngineCore(target, EngineConfig(page_size=8, kv_pages=64), is_pipelined=is_pipelined)
    prompts = {"a": range(10, 30), "b": range(40, 45), "c": [7]}
    expected = {name: generate(core, greedy(name, list(prompt)))[0] for name, prompt in prompts.items()}
    target.spoiled = frozenset({"b"})
    outputs = run(core, *(greedy(name, list(prompt)) for name, prompt in prompts.items()))
    assert tokens(outputs["a"]) == expected["a"]
    assert tokens(outputs["c"]) == expected["c"]
    last = outputs["b"][-1]
    assert (last.finish_reason, last.token_ids) == ("error", ())
    assert isinstance(last.error, RequestFailedError)
    assert "NaN" in str(last.error)
    target.spoiled = frozenset()
    assert generate(core, greedy("b", list(prompts["b"]))) == [expected["b"]]


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_the_pool_grows_under_live_rows(folder: Path, is_pipelined: bool) -> None:
    config = EngineConfig(page_size=4, max_step_tokens=16)
    model = load_model(folder)
    roomy = EngineCore(
        ModelTarget(model, 4), EngineConfig(page_size=4, kv_pages=200), is_pipelined=is_pipelined
    )
    requests = [greedy(str(i), list(range(i, i + 30 + 7 * i)), 40) for i in range(4)]
    expected = generate(roomy, *requests)
    core = EngineCore(ModelTarget(model, 4), config, is_pipelined=is_pipelined)
    # Start from one page, as a large model under a small first size would.
    core._scheduler = Scheduler(config, BlockPool(1, 200))
    core._runner = Runner(core._target, 4, 1)
    assert generate(core, *requests) == expected
    assert core.stats().pool_pages > 60


def test_a_failure_after_a_row_has_ended_still_tells_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(
        ModelTarget(load_model(folder), 8), EngineConfig(page_size=8, kv_pages=32), is_pipelined=True
    )
    expected = generate(core, greedy("0", [1, 2, 3], 4))
    original, calls = Scheduler._accept, []

    def accept(self: Scheduler, row: ScheduledSequence, sampled: list[int]) -> TokenOutput:
        calls.append(row.sequence.request.request_id)
        if calls == ["short", "long"]:
            raise RuntimeError("planted")
        return original(self, row, sampled)

    monkeypatch.setattr(Scheduler, "_accept", accept)
    outputs = run(core, greedy("short", [5, 6], 1), greedy("long", [7, 8], 9))
    for given in outputs.values():
        assert [output.finish_reason for output in given] == ["error"]
        assert str(given[0].error) == "the engine failed on this step: planted"
    assert generate(core, greedy("0", [1, 2, 3], 4)) == expected


def test_copies_that_depend_on_each_other_go_one_after_the_other() -> None:
    assert independent_groups([]) == []
    assert independent_groups([(0, 1), (2, 3)]) == [((0, 1), (2, 3))]
    assert independent_groups([(0, 1), (2, 0)]) == [((0, 1),), ((2, 0),)]
    assert independent_groups([(0, 1), (1, 2)]) == [((0, 1),), ((1, 2),)]
    assert independent_groups([(0, 1), (0, 2)]) in ([((0, 1), (0, 2))], [((0, 1),), ((0, 2),)])
    assert independent_groups([(0, 5), (1, 5)]) == [((0, 5),), ((1, 5),)]


def test_one_page_limit_and_a_sequence_that_just_fits(folder: Path) -> None:
    core = EngineCore(
        ModelTarget(load_model(folder), 8), EngineConfig(page_size=8, kv_pages=3), is_pipelined=True
    )
    assert core.max_sequence_tokens == 24
    first, second = greedy("0", list(range(12)), 12), greedy("1", list(range(12)), 12)
    alone = generate(core, first)[0]
    assert len(alone) == 12
    assert generate(core, first, second) == [alone, alone]


def test_pacing_learns_the_rate_and_keeps_a_minimum() -> None:
    pacer = PrefillPacer(512)
    first = pacer.prefill_budget
    assert MIN_PREFILL_TOKENS <= first <= 512
    pacer.observe(100, 100, 0.0)
    for second in range(1, 20):
        pacer.observe(400, 400, float(second))
    assert pacer.prefill_budget == 100
    for second in range(20, 60):
        pacer.observe(10, 10, float(second))
    assert pacer.prefill_budget == MIN_PREFILL_TOKENS
    for index in range(1, 40):
        pacer.observe(500, 500, 60.0 + index / 100)
    assert pacer.prefill_budget == 512


def test_idle_time_and_decode_steps_are_no_prefill_rate() -> None:
    pacer = PrefillPacer(512)
    pacer.observe(100, 100, 0.0)
    pacer.observe(400, 400, 1.0)
    before = pacer.prefill_budget
    pacer.rest()
    pacer.observe(400, 400, 1000.0)
    pacer.observe(0, 8, 1001.0)
    assert pacer.prefill_budget == before


def test_the_page_plan_pays_the_weights_first() -> None:
    plan = plan_pages(EngineConfig(memory_limit=10_000), page_bytes=100, weight_bytes=4_000)
    assert plan.limit == 60
    assert 0 < plan.num_initial <= 60
    assert plan_pages(EngineConfig(kv_pages=7), page_bytes=100, weight_bytes=0).limit == 7
    with pytest.raises(ModelLoadError, match="does not fit the memory limit"):
        plan_pages(EngineConfig(memory_limit=4_100), page_bytes=100, weight_bytes=4_000)


def damaged_copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[]", "config.json"),
        ("model.safetensors", None, "model.*safetensors"),
        ("model.safetensors", b"\x01\x02", "model.safetensors: not a safetensors file"),
        ("model.safetensors", b"\xff" * 100, "model.safetensors: not a safetensors file"),
    ],
)
def test_a_damaged_folder_is_named(
    folder: Path, tmp_path: Path, name: str, change: bytes | None, message: str
) -> None:
    copy = damaged_copy(folder, tmp_path / "copy")
    if change is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(change)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated_weights_are_named(folder: Path, tmp_path: Path, keep: float) -> None:
    copy = damaged_copy(folder, tmp_path / "copy")
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: int(keep * len(data))])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated: the data ends at byte"):
        load_model(copy)


@pytest.mark.parametrize("model_type", ["no_such_model", "olmo"])
def test_an_unknown_architecture_is_named(folder: Path, tmp_path: Path, model_type: str) -> None:
    copy = damaged_copy(folder, tmp_path / "copy")
    config: dict[str, Any] = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=f"model_type '{model_type}' is not supported") as caught:
        load_model(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="on Metal activations keep the dtype")
def test_half_precision_weights_stay_narrow_and_compute_in_float32(tmp_path: Path) -> None:
    whole = load_model(write_tiny_model(tmp_path / "whole"))
    half = load_model(write_tiny_model(tmp_path / "half", dtype="float16"))
    assert {spec.dtype for spec in half.layers} == {mx.float32}
    assert half.weight_bytes < 0.6 * whole.weight_bytes
    ids = mx.array([[5, 6, 7, 8]])
    assert half.module(ids).dtype == mx.float32
    np.testing.assert_allclose(np.array(half.module(ids)), np.array(whole.module(ids)), atol=0.05)
