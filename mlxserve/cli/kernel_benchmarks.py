"""What ``mlxserve bench kernels`` runs and how it prints."""

from __future__ import annotations

from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mlxserve.cli.benchmarks import read_figures
from mlxserve.engine.kernel_benchmark import MODEL_SIZES, kernel_cases, measure_kernel
from mlxserve.engine.read_rate import measure_read_rates
from mlxserve.errors import UsageError
from mlxserve_kernels import ops


def bench_kernels(
    shape: str, *, only: tuple[str, ...] | None, repeat: int, reference_limit_s: float, as_json: bool
) -> None:
    """Measure and print; each kernel's runs alternate with its reference's."""
    if shape not in MODEL_SIZES:
        raise UsageError(f"--shape knows {', '.join(MODEL_SIZES)}, got {shape!r}")
    kernels = dict(kernel_cases(MODEL_SIZES[shape]))
    for name in only or ():
        if name not in kernels:
            raise UsageError(f"--only knows {', '.join(kernels)}, got {name!r}")
    console = Console(stderr=True)
    rates = [measure_read_rates(ops.num_threads())]
    runs = []
    with console.status("Measuring kernels") as status:
        for name in only or kernels:
            for case in kernels[name]():
                status.update(f"Measuring {case.name}: {case.shape}")
                runs.append(measure_kernel(case, repeat=repeat, reference_limit_s=reference_limit_s))
    rates.append(measure_read_rates(ops.num_threads()))
    report: dict[str, Any] = {
        "shape": shape,
        "kernels": ops.implementation(),
        "threads": ops.num_threads(),
        **read_figures(rates),
        "runs": [run.as_dict() for run in runs],
    }
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _print_table(report)


def _print_table(report: dict[str, Any]) -> None:
    table = Table(
        title=f"Kernels at the sizes of {report['shape']}: {report['threads']} threads, "
        f"{report['kernels']}, {report['read_gbps']} GB/s read"
    )
    for heading in ("kernel", "shape"):
        table.add_column(heading, no_wrap=True)
    for heading in ("us", "GB/s", "GFLOP/s", "reference us", "ratio"):
        table.add_column(heading, justify="right")
    for run in report["runs"]:
        is_slow = run["reference_us"] is None
        table.add_row(
            run["kernel"],
            run["shape"],
            f"{run['us']:.1f}",
            f"{run['gbps']:.1f}",
            f"{run['gflops']:.1f}",
            "too slow" if is_slow else f"{run['reference_us']:.1f}",
            "" if is_slow else f"{run['ratio']:.1f}",
        )
    Console().print(table)
