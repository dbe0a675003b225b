"""The self-test of the device side, with the harness in the GPU's place, and what a start makes of it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_on_host import Host, Settings
from mlxserve.errors import UnsupportedModelError
from mlxserve.models import kernel_choice
from mlxserve.models.loader import load_model
from mlxserve_kernels import dispatch, self_test
from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import HOST_PERMISSIONS
from mlxserve_kernels.self_test import Verdict, judge, run_self_test
from mlxserve_kernels.self_test_cases import KERNELS, Case, cases_of
from tests.tiny_models import TinyModel, write_tiny_model

NORM = "add_rms_norm"


@pytest.fixture
def fast_host(cache_dir: Path) -> Host:
    return Host(Settings(cache_dir=cache_dir, seeds=(0,), count=False, **HOST_PERMISSIONS))


def verdict_of(name: str, make: Any, *, times: tuple[float, float] | None = (1.0, 2.0)) -> Verdict:
    timer = None if times is None else lambda ours, plain: times
    return judge(name, cases_of(name, is_small=True), make, timer)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_right(fast_host: Host, name: str) -> None:
    verdict = verdict_of(name, fast_host.metal_kernel)
    assert verdict == Verdict(name, "used", "2.00 times MLX's speed", pytest.approx(1e6), pytest.approx(2e6))


def test_a_slow_kernel_is_not_used(fast_host: Host) -> None:
    verdict = verdict_of(NORM, fast_host.metal_kernel, times=(2.0, 1.0))
    assert (verdict.status, verdict.detail) == ("slower", "0.50 times MLX's speed")
    assert not verdict.is_used


def test_a_wrong_kernel_is_not_used(fast_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = maker.source("rms_norm.h")
    monkeypatch.setattr(maker, "source", lambda name: sound.replace("total / Size", "total * 1.1f / Size"))
    verdict = verdict_of(NORM, fast_host.metal_kernel)
    assert verdict.status == "wrong"
    assert verdict.detail.startswith("1 x 64 float16: differs by 0.0")


def test_one_that_is_wrong_while_steps_are_in_flight(fast_host: Host) -> None:
    """The first call is right, later ones give what the first gave plus 1."""
    calls = 0

    def make(*args: Any, **kwargs: Any) -> Any:
        sound = fast_host.metal_kernel(*args, **kwargs)

        def call(**arguments: Any) -> list[mx.array]:
            nonlocal calls
            calls += 1
            results = sound(**arguments)
            return results if calls == 1 else [result + 1 for result in results]

        return call

    assert verdict_of(NORM, make).status == "wrong"


def test_nan_is_wrong(fast_host: Host) -> None:
    def make(*args: Any, **kwargs: Any) -> Any:
        sound = fast_host.metal_kernel(*args, **kwargs)
        return lambda **arguments: [result * mx.nan for result in sound(**arguments)]

    assert verdict_of(NORM, make).status == "wrong"


def test_one_that_does_not_compile(fast_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = maker.source("rms_norm.h")
    monkeypatch.setattr(maker, "source", lambda name: sound.replace("simd_sum", "simd_some"))
    verdict = verdict_of(NORM, fast_host.metal_kernel)
    assert verdict.status == "failed"
    assert "error:" in verdict.detail and "simd_some" in verdict.detail
    assert "\n" not in verdict.detail


def test_one_that_is_never_called() -> None:
    case = Case("none", lambda: [mx.zeros(3)], lambda: [mx.zeros(3)], 1.0)
    verdict = judge(NORM, [case], lambda *a, **k: lambda **c: [], None)
    assert (verdict.status, verdict.detail) == ("failed", "none: the kernel was not called")


def test_times_are_taken_in_turn() -> None:
    order = []

    def run(side: str) -> Callable[[], Sequence[mx.array]]:
        def call() -> Sequence[mx.array]:
            order.append(side)
            return [mx.zeros(4) + 1]

        return call

    ours, plain = self_test.device_timer(run("a"), run("b"))
    assert ours > 0 and plain > 0
    assert "".join(order).count("ab") >= self_test._REPEAT - 1


def child(program: str) -> list[str]:
    return [sys.executable, "-c", "import json, os, sys\nnames = sys.argv[1:]\n" + program]


SAY = "print(json.dumps({'kernel': names[0], 'status': 'used', 'detail': 'ok'}), flush=True)\n"


def test_a_kernel_that_ends_the_process_fails_alone() -> None:
    program = "print('noise')\nif names[0] == 'bad': os.abort()\n" + SAY
    found = run_self_test(("good", "bad", "other"), command=child(program))
    assert [(v.kernel, v.status) for v in found] == [("good", "used"), ("bad", "failed"), ("other", "used")]
    assert found[1].detail.startswith("the process that tried it ended with signal SIGABRT")


def test_a_process_that_fails_or_is_silent() -> None:
    (verdict,) = run_self_test(("one",), command=child("sys.exit('no such luck')"))
    assert verdict.detail == "the process that tried it ended with exit code 1: no such luck"
    (verdict,) = run_self_test(("one",), command=child("pass"))
    assert verdict == Verdict("one", "failed", "the process that tried it said nothing")


def test_a_process_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_TIMEOUT_S", 1)
    program = SAY + "import time; time.sleep(60)"
    found = run_self_test(("one", "two"), command=child("if names[0] == 'two': names[0] = 'x'\n" + program))
    assert [(v.kernel, v.status) for v in found] == [("one", "used"), ("two", "failed")]
    assert found[1].detail == "it took more than 1 s"


def test_the_real_process_on_the_host() -> None:
    (verdict,) = run_self_test((NORM,), arguments=("--host",))
    assert verdict == Verdict(NORM, "used", "right in 6 cases")


@pytest.fixture
def on_a_mac(fast_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a process there begins: Metal is picked, nothing is proven."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "_settled", None)
    kernels = dispatch.metal_selection(fast_host.metal_kernel, proven=frozenset())
    with dispatch.using(replace(kernels, name="metal")):
        yield


def verdicts(**statuses: Any) -> list[Verdict]:
    return [Verdict(name, statuses.get(name, "used"), "detail of it") for name in KERNELS]


def test_the_first_start_tries_and_later_ones_know(
    on_a_mac: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    monkeypatch.setattr(kernel_choice, "run_self_test", lambda: runs.append(1) or verdicts())
    assert kernel_choice.settle() == verdicts()
    assert dispatch.metal(NORM) is not None
    assert [record.message for record in caplog.records] == [
        "Trying the Metal kernels on this Mac, once; this takes about a minute."
    ]
    caplog.clear()
    monkeypatch.setattr(kernel_choice, "_settled", None)
    assert kernel_choice.settle() == kernel_choice.settle() == verdicts()
    assert (len(runs), caplog.records) == (1, [])
    monkeypatch.setattr(kernel_choice, "_settled", None)
    other = replace(kernel_choice.this_machine(), mlx="99")
    monkeypatch.setattr(kernel_choice, "this_machine", lambda: other)
    kernel_choice.settle()
    assert len(runs) == 2


@pytest.mark.parametrize(("status", "lines"), [("wrong", 1), ("failed", 1), ("slower", 0)])
def test_what_is_not_used_says_so_once(
    on_a_mac: None, caplog: pytest.LogCaptureFixture, status: str, lines: int
) -> None:
    kernel_choice.write_verdicts(kernel_choice.this_machine(), verdicts(add_rms_norm=status))
    for _ in range(2):
        kernel_choice.settle()
    assert dispatch.metal(NORM) is None
    assert len(caplog.records) == lines
    if lines:
        assert caplog.records[0].message == (
            "The Metal kernel add_rms_norm is not used, MLX's own is: detail of it (mlxserve doctor)"
        )


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"machine": 3', "\x00\x01", '{"machine": MACHINE, "verdicts": [{"kernel": 1}]}'],
)
def test_a_damaged_file_is_one_line(
    on_a_mac: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    machine = kernel_choice.this_machine()
    kernel_choice.write_verdicts(machine, verdicts())
    path = tmp_path / "metal_kernels.json"
    stored = json.dumps(json.loads(path.read_text())["machine"])
    path.write_text(content.replace("MACHINE", stored))
    assert kernel_choice.read_verdicts(machine) is None
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith(f"{path} is not used: ")
    assert "\n" not in caplog.records[0].message


def test_a_file_that_cannot_be_written_is_one_line(
    on_a_mac: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "file"))
    kernel_choice.write_verdicts(kernel_choice.this_machine(), verdicts())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot be written" in caplog.records[0].message


def test_a_model_that_fails_with_them_is_served_without_them(
    fast_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own sizes may be ones that the self-test has not tried."""

    def make(name: str, *args: Any, **kwargs: Any) -> Any:
        def fail(**arguments: Any) -> list[mx.array]:
            raise RuntimeError("[metal::Device] Unable to build metal library\nerror: too large")

        return fail if name == "attend_split" else fast_host.metal_kernel(name, *args, **kwargs)

    monkeypatch.setattr(kernel_choice, "_settled", verdicts())
    write_tiny_model(tmp_path / "llama", TinyModel())
    write_tiny_model(tmp_path / "other", TinyModel(model_type="mamba", extra_config=MAMBA))
    chosen = replace(dispatch.metal_selection(make, proven=frozenset(KERNELS)), name="metal")
    with dispatch.using(chosen):
        # What no kernels could serve changes nothing.
        with pytest.raises(UnsupportedModelError):
            load_model(tmp_path / "other")
        assert dispatch.selection() is chosen
        caplog.clear()
        model = load_model(tmp_path / "llama")
        assert dispatch.selection().proven == frozenset()
    assert model.num_fused_layers == 0
    assert caplog.records[-1].message.startswith(
        "The Metal kernels are not used, MLX's own operations are: model_type 'llama' is not served yet: "
    )
    assert "Unable to build metal library" in caplog.text


MAMBA = {
    "state_size": 4,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}


def test_nothing_is_settled_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_settled", None)
    with dispatch.using(dispatch.REFERENCE):
        assert kernel_choice.settle() is None
