"""Whether each Metal kernel is right on this device, and faster than MLX's own ops.

A kernel is compiled and compared with ``reference`` by calls of ``ops``, alone and while earlier steps still
run, then timed beside ``reference``. ``run_self_test`` does so in a process of its own: a kernel that ends
the process fails, and the others are tried in another one.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from typing import Any, Literal

import mlx.core as mx

from mlxserve_kernels.dispatch import REFERENCE, Selection, host_maker, using
from mlxserve_kernels.metal_kernels import MetalKernels
from mlxserve_kernels.metal_kernels.maker import KernelCall, KernelMaker, mlx_maker
from mlxserve_kernels.self_test_cases import KERNELS, Case, Run, cases_of

Status = Literal["used", "slower", "wrong", "failed"]
Timer = Callable[[Run, Run], tuple[float, float]]
"""Seconds that a call of each takes, measured in turn."""

_TIMEOUT_S = 600
_REPEAT = 7
_TARGET_S = 0.02
"""Calls are repeated to about this time, so that a wake-up does not count."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a kernel. ``detail`` is one line; times are geometric means over the timed cases."""

    kernel: str
    status: Status
    detail: str
    us: float | None = None
    mlx_us: float | None = None

    @property
    def is_used(self) -> bool:
        return self.status == "used"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(name: str, cases: Iterable[Case], make: KernelMaker, timer: Timer | None) -> Verdict:
    """Try one kernel. Without a timer what is right is used."""
    try:
        return _judge(name, list(cases), make, timer)
    except Exception as error:  # noqa: BLE001 - whatever a device's compiler or driver raises
        return Verdict(name, "failed", _one_line(error))


def judge_all(
    names: Iterable[str], make: KernelMaker, timer: Timer | None, *, is_small: bool
) -> Iterable[Verdict]:
    """Each verdict as soon as it is there. ``is_small``: sizes for a host."""
    for name in names:
        yield judge(name, cases_of(name, is_small=is_small), make, timer)


class _Launches:
    """Makes kernels that count their launches."""

    def __init__(self, make: KernelMaker) -> None:
        self._make = make
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> KernelCall:
        call = self._make(*args, **kwargs)

        def counted(**arguments: Any) -> list[mx.array]:
            self.count += 1
            return call(**arguments)

        return counted


def _judge(name: str, cases: Sequence[Case], make: KernelMaker, timer: Timer | None) -> Verdict:
    launches = _Launches(make)
    chosen = Selection("metal", metal=MetalKernels(launches), proven=frozenset({name}))
    for case in cases:
        before = launches.count
        difference = _difference(case, chosen)
        if launches.count == before:
            return Verdict(name, "failed", f"{case.label}: the kernel was not called")
        if not difference <= case.tolerance:
            return Verdict(name, "wrong", _too_far(case, difference))
    if timer is None:
        return Verdict(name, "used", f"right in {len(cases)} cases")
    ours, plain = _times(cases, chosen, timer)
    status: Status = "used" if ours <= plain else "slower"
    return Verdict(name, status, f"{plain / ours:.2f} times MLX's speed", ours * 1e6, plain * 1e6)


def _too_far(case: Case, difference: float) -> str:
    return f"{case.label}: differs by {difference:.2g} of the largest value (limit {case.tolerance})"


def compare(name: str, cases: Iterable[Case], chosen: Selection) -> Verdict:
    """The same comparison for the extension's kernels, by the same calls on float32."""
    count = 0
    for case in cases:
        if case.is_of_metal:
            continue
        count += 1
        try:
            difference = _difference(replace(case, run=case.expected), chosen)
        except Exception as error:  # noqa: BLE001 - whatever it raises is what is wrong
            return Verdict(name, "failed", f"{case.label}: {_one_line(error)}")
        if not difference <= case.tolerance:
            return Verdict(name, "wrong", _too_far(case, difference))
    return Verdict(name, "used", f"right in {count} cases")


def _difference(case: Case, chosen: Selection) -> float:
    """The largest of three runs: alone, and two that are started while others still run."""
    with using(REFERENCE):
        expected = list(case.expected())
        mx.eval(expected)
    with using(chosen):
        alone = list(case.run())
        mx.eval(alone)
        busy = mx.ones((256, 256))
        for _ in range(8):
            busy = busy @ busy / 256
        mx.async_eval(busy)
        results = [alone]
        for _ in range(2):
            results.append(list(case.run()))
            mx.async_eval(results[-1])
        mx.eval(results)
    return max(_gap(ours, wanted) for found in results for ours, wanted in zip(found, expected, strict=True))


def _gap(ours: mx.array, wanted: mx.array) -> float:
    """The largest difference relative to the largest value; infinite for another shape, or a NaN."""
    if ours.shape != wanted.shape:
        return float("inf")
    a, b = ours.astype(mx.float32), wanted.astype(mx.float32)
    scale = max(float(mx.abs(b).max().item()), 1e-20)  # type: ignore[arg-type]
    gap = float(mx.abs(a - b).max().item()) / scale  # type: ignore[arg-type]
    return gap if gap == gap else float("inf")


def _times(cases: Sequence[Case], chosen: Selection, timer: Timer) -> tuple[float, float]:
    def with_selection(run: Run, selection: Selection) -> Run:
        def call() -> Sequence[mx.array]:
            with using(selection):
                return run()

        return call

    pairs = [
        timer(with_selection(case.run, chosen), with_selection(case.run, REFERENCE))
        for case in cases
        if case.is_timed
    ]
    ours, plain = (exp(statistics.fmean(log(pair[side]) for pair in pairs)) for side in (0, 1))
    return ours, plain


def device_timer(ours: Run, plain: Run) -> tuple[float, float]:
    """Medians of runs in turn on the device."""
    counts = [_calibrate(run) for run in (ours, plain)]
    times: list[list[float]] = [[], []]
    for _ in range(_REPEAT):
        for side, run in enumerate((ours, plain)):
            times[side].append(_time(run, counts[side]) / counts[side])
    return statistics.median(times[0]), statistics.median(times[1])


def _calibrate(run: Run) -> int:
    _time(run, 1)
    return max(1, min(200, int(_TARGET_S / max(_time(run, 1), 1e-6))))


def _time(run: Run, count: int) -> float:
    started = time.perf_counter()
    mx.eval([list(run()) for _ in range(count)])
    return time.perf_counter() - started


def run_self_test(
    names: Sequence[str] = KERNELS, *, arguments: Sequence[str] = (), command: Sequence[str] | None = None
) -> list[Verdict]:
    """Verdicts of all named kernels, from processes of their own; ``command`` starts another one."""
    command = command or [sys.executable, "-m", "mlxserve_kernels.self_test"]
    verdicts: list[Verdict] = []
    remaining = list(names)
    while remaining:
        found, ending = _child([*command, *arguments, *remaining])
        for verdict in found:
            if verdict.kernel in remaining:
                remaining.remove(verdict.kernel)
                verdicts.append(verdict)
        if ending is None and not found:
            ending = "the process that tried it said nothing"
        if remaining and ending is not None:
            verdicts.append(Verdict(remaining.pop(0), "failed", ending))
    return sorted(verdicts, key=lambda verdict: list(names).index(verdict.kernel))


def _child(command: Sequence[str]) -> tuple[list[Verdict], str | None]:
    """The verdicts that a process printed, and, where it did not end well, how it ended."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output if isinstance(output, str) else output.decode(errors="replace")
        return _parse(text), f"it took more than {_TIMEOUT_S} s"
    if done.returncode == 0:
        return _parse(done.stdout), None
    last = (done.stderr.strip().splitlines() or [""])[-1][:200]
    how = (
        f"signal {_signal_name(-done.returncode)}" if done.returncode < 0 else f"exit code {done.returncode}"
    )
    return _parse(done.stdout), f"the process that tried it ended with {how}: {last}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _parse(text: str) -> list[Verdict]:
    """Lines of other kinds, as libraries print them, are skipped."""
    verdicts = []
    for line in text.splitlines():
        try:
            verdicts.append(Verdict(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return verdicts


def _one_line(error: Exception) -> str:
    """The compiler's first error, where it is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if "error:" in line), lines[0])
    return line[:300]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Print a JSON line for each Metal kernel.")
    parser.add_argument("--host", action="store_true", help="run them on the CPU, compare only")
    parser.add_argument("names", nargs="*", default=list(KERNELS))
    options = parser.parse_args(argv)
    make, timer = (host_maker(), None) if options.host else (mlx_maker(), device_timer)
    for verdict in judge_all(options.names, make, timer, is_small=options.host):
        sys.stdout.write(json.dumps(verdict.as_dict()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
