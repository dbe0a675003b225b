"""The measuring tools: what they count, and that they leave no trace."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxserve.engine import runner
from mlxserve.engine.benchmark import (
    DecodeShape,
    decode_core,
    drain,
    measure,
    measure_profile,
    random_prompts,
    run_streams,
)
from mlxserve.engine.kernel_benchmark import ModelSizes, kernel_cases, measure_kernel
from mlxserve.engine.read_rate import measure_read_rates
from mlxserve.engine.step_profile import PARTS
from mlxserve.errors import UsageError
from mlxserve.models.loader import LoadedModel, load_model
from mlxserve.text.tokenizer import load_tokenizer
from mlxserve.types import GenerationRequest, SamplingParams
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context=4096)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder)


def test_a_run_counts_the_tokens_between_the_last_start_and_the_first_end(model: LoadedModel) -> None:
    shape = DecodeShape(20, 8, 3)
    core = decode_core(model, shape)
    run = run_streams(core, shape, random_prompts(shape, model.vocab_size))
    assert run.started < run.prefilled < run.ended
    assert run.num_decoded == 3 * 7
    assert [len(tokens) for tokens in run.tokens] == [8, 8, 8]
    drain(core, shape)
    assert not core.has_work
    core.check_integrity()


def test_too_few_new_tokens_are_refused(model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="2 new tokens are too few for 4 streams of 600"):
        measure(model, DecodeShape(600, 2, 4), read_rate=1e9)


def test_a_copied_context_has_no_prefill_figure(model: LoadedModel) -> None:
    run = measure(model, DecodeShape(1500, 40, 2, is_context_copied=True), read_rate=1e9)
    assert run.prefill_tok_s is None
    assert run.decode_tok_s > 0


def test_a_copied_context_is_copied_and_its_decode_steps_are_real(model: LoadedModel) -> None:
    shape = DecodeShape(1500, 20, 1, is_context_copied=True)
    core = decode_core(model, shape)
    (prompt,) = random_prompts(shape, model.vocab_size)
    core.add(GenerationRequest("0", prompt, shape.tokens, SamplingParams(temperature=0)))
    num_tokens = 0
    while num_tokens < 3:
        num_tokens += sum(len(output.token_ids) for output in core.step())
    values = core._target._inner._pages[0].values
    (sequence,) = core._scheduler.running
    for index in range(16, 1500 // 32):
        source, copy = sequence.pages[index % 16], sequence.pages[index]
        assert mx.array_equal(values[source], values[copy]), index
    last = 1500 // 32
    source, copy = sequence.pages[last % 16], sequence.pages[last]
    assert not mx.array_equal(values[source, :, 1500 % 32], values[copy, :, 1500 % 32])


def test_a_profile_has_all_parts_and_takes_its_hooks_off(folder: Path, model: LoadedModel) -> None:
    before = (mx.eval, mx.async_eval, runner.sample)
    profile = measure_profile(model, DecodeShape(20, 12, 2), load_tokenizer(folder))
    assert (mx.eval, mx.async_eval, runner.sample) == before
    assert profile.parts.keys() == PARTS.keys()
    assert profile.num_steps == 11
    assert all(value >= 0 for value in profile.parts.values())
    assert profile.parts["graph_ms"] > 0
    assert profile.parts["schedule_ms"] > 0
    assert profile.host_ms <= profile.step_ms
    assert profile.detokenize_ms is not None


def test_hooks_come_off_after_a_failure(model: LoadedModel) -> None:
    before = (mx.eval, mx.async_eval)
    with pytest.raises(UsageError):
        measure_profile(model, DecodeShape(600, 2, 4), None)
    assert (mx.eval, mx.async_eval) == before


@pytest.mark.parametrize("num_threads", [1, 2])
def test_read_rates_are_of_both_kinds_of_pages(num_threads: int) -> None:
    rates = measure_read_rates(num_threads, num_bytes=8 << 20)
    assert rates.small_pages > 0
    assert rates.best == max(rates.small_pages, rates.huge_pages or 0)


def test_every_kernel_is_measured_beside_its_reference() -> None:
    sizes = ModelSizes(64, 96, 4, 2, 32, 128)
    for name, make in kernel_cases(sizes):
        case = next(make())
        assert case.name == name
        run = measure_kernel(case, repeat=1, reference_limit_s=60)
        assert run.us > 0 and run.gbps > 0
        assert run.reference_us is not None
        assert run.as_dict()["ratio"] == pytest.approx(run.reference_us / run.us, abs=0.01)
        slow = measure_kernel(case, repeat=1, reference_limit_s=0)
        assert slow.reference_us is None and slow.as_dict()["ratio"] is None


def test_both_sides_of_a_kernel_compute_the_same() -> None:
    sizes = ModelSizes(64, 96, 4, 2, 32, 128)
    for name, make in kernel_cases(sizes):
        if name == "write_pages":
            # Its calls write to pools of their own, of different content.
            continue
        for case in make():
            ours, plain = case.ours(1), case.reference(1)
            assert mx.allclose(ours, plain, rtol=1e-3, atol=1e-3), (name, case.shape)
