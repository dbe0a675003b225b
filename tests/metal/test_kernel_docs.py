"""docs/kernels.md says what the kernels cost now, and each reads weights, keys and values once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from metal_on_host import Settings
from mlxserve_kernels.metal_kernels.maker import HOST_PERMISSIONS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import kernel_costs  # noqa: E402
import kernel_docs  # noqa: E402

DOCUMENT = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
SMALLEST = kernel_costs.MODELS[0]


@pytest.fixture(scope="module")
def meter(cache_dir: Path) -> kernel_costs.Meter:
    return kernel_costs.Meter(Settings(seeds=(0,), cache_dir=cache_dir, **HOST_PERMISSIONS))


def names(rows: int) -> list[str]:
    return [f"{case.kernel}, {case.what}" for case in kernel_costs.cases(SMALLEST) if case.rows == rows]


@pytest.mark.parametrize("rows", [1, 4, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", names(1))
def test_the_document_is_current(meter: kernel_costs.Meter, name: str, rows: int) -> None:
    """Otherwise: scripts/gen_kernel_docs."""
    cases = [case for case in kernel_costs.cases(SMALLEST) if case.rows == rows]
    (case,) = (case for case in cases if f"{case.kernel}, {case.what}" == name)
    line = meter.measure(case)
    assert kernel_docs.table_row(line) in DOCUMENT
    assert line.cost.ratio is None or line.cost.ratio <= 1.05
    # A key that goes into a page alone touches a line for each value.
    assert line.cost.coalescing >= 0.9 or case.kernel == "rope_and_write_pages"


def test_it_has_every_kernel_and_source() -> None:
    for model in kernel_costs.MODELS:
        assert f"## {model.name}\n" in DOCUMENT
    for chip in kernel_costs.CHIPS:
        assert f"| {chip.name} | {chip.gbps:g} | {chip.tflops:g} | {chip.source} |" in DOCUMENT
    assert "Nothing here was measured on a Mac" in DOCUMENT


def test_a_cost_that_is_not_linear_is_refused(meter: kernel_costs.Meter) -> None:
    case = next(case for case in kernel_costs.cases(SMALLEST) if case.sizes)

    def squared(kernels: object, size: int) -> object:
        return case.run(kernels, 64 if size == 64 else size * size // 64)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="is not linear in its size"):
        meter.measure(replace(case, run=squared))


def test_time_is_the_longer_of_memory_and_arithmetic() -> None:
    cost = kernel_costs.Cost(2e9, 2e9, 5e9, 1e9, 1.0, 1.0, 0, 0)
    chip = kernel_costs.Chip("M0", 100, 1.0, "nobody")
    case = kernel_costs.Case("k", "w", 1, lambda kernels, size: mx.array(0), 1, flops=1e9)
    assert kernel_costs.Line(case, cost).seconds(chip) == pytest.approx(0.03)
    assert kernel_costs.Line(replace(case, flops=1e12), cost).seconds(chip) == pytest.approx(1.0)
