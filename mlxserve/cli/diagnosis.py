"""What ``mlxserve doctor`` finds out and how it prints."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mlxserve import __version__
from mlxserve.errors import UsageError
from mlxserve.models import kernel_choice
from mlxserve_kernels import dispatch, ops
from mlxserve_kernels.self_test import Verdict, compare, run_self_test
from mlxserve_kernels.self_test_cases import CPU_KERNELS, cases_of


def diagnose(*, is_again: bool, on_host: bool) -> dict[str, Any]:
    """Everything as one JSON object. Raises UsageError for what this machine cannot do."""
    try:
        dispatch.decoder_kind()
        name = dispatch.selection().name
        if on_host:
            dispatch.host_maker()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if is_again and name != "metal":
        raise UsageError(f"--again is for Macs that run the Metal kernels; here the {name} kernels run")
    checked = _check(name, is_again=is_again)
    report: dict[str, Any] = {
        "version": __version__,
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()} {platform.machine()}",
        "chip": str(mx.device_info()["device_name"]),
        "kernels": ops.implementation(),
        "decoder": dispatch.decoder_kind(),
        "cpu": _cpu() if name == "cpu" else None,
        "checked": [verdict.as_dict() for verdict in checked],
        "metal_on_host": [verdict.as_dict() for verdict in _on_host()] if on_host else None,
    }
    broken = [v for part in ("checked", "metal_on_host") for v in report[part] or () if _is_broken(v)]
    return report | {"ok": not broken}


def _cpu() -> dict[str, Any]:
    extension = dispatch.extension()
    assert extension is not None
    return {
        "isa": extension.isa(),
        "available_isas": list(extension.available_isas()),
        "threads": ops.num_threads(),
        "products": os.environ.get("MLXSERVE_CPU_MATMUL", "exact"),
    }


def _check(name: str, *, is_again: bool) -> Sequence[Verdict]:
    if name == "metal":
        if not is_again:
            return kernel_choice.settle() or ()
        verdicts = kernel_choice.test_again(run_self_test)
        kernel_choice.apply(verdicts)
        return verdicts
    if name == "cpu":
        chosen = dispatch.selection()
        return [compare(kernel, cases_of(kernel, is_small=True), chosen) for kernel in CPU_KERNELS]
    return ()


def _on_host() -> Sequence[Verdict]:
    return run_self_test(arguments=("--host",))


def _is_broken(verdict: dict[str, Any]) -> bool:
    return verdict["status"] in ("wrong", "failed")


_STATUS = {
    "used": "right, used",
    "slower": "right, slower: not used",
    "wrong": "WRONG: not used",
    "failed": "FAILED: not used",
}


def print_diagnosis(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    rows = {
        "mlxserve": f"{report['version']}, Python {report['python']}",
        "MLX": f"{report['mlx']}, mlx-lm {report['mlx_lm']}",
        "machine": f"{report['chip']}, {report['system']}",
        "kernels": _kernels_line(report),
        "decoder layers": report["decoder"],
    }
    for heading, text in rows.items():
        typer.echo(f"{heading:16} {text}")
    is_metal = report["kernels"] == "metal"
    if report["checked"]:
        title = "Metal kernels on this Mac" if is_metal else "Kernels compared with MLX's own"
        _print_verdicts(title, report["checked"])
    if report["metal_on_host"] is not None:
        _print_verdicts("Metal kernels on this CPU (right or not; no speed)", report["metal_on_host"])
    elif not is_metal:
        typer.echo("Metal kernels run on Macs only; --metal-host checks them on this CPU.")


def _kernels_line(report: dict[str, Any]) -> str:
    cpu = report["cpu"]
    if cpu is None:
        return str(report["kernels"])
    isas = ", ".join(cpu["available_isas"])
    return f"{report['kernels']} (this CPU has {isas}), {cpu['threads']} threads, products {cpu['products']}"


def _print_verdicts(title: str, verdicts: Sequence[dict[str, Any]]) -> None:
    is_timed = any(verdict["us"] is not None for verdict in verdicts)
    typer.echo(title)
    table = Table()
    for heading in ("kernel", "status"):
        table.add_column(heading)
    for heading in ("us", "MLX us") if is_timed else ():
        table.add_column(heading, justify="right")
    table.add_column("detail")
    for verdict in verdicts:
        times = [f"{verdict[key]:.1f}" if verdict[key] is not None else "" for key in ("us", "mlx_us")]
        table.add_row(
            verdict["kernel"], _STATUS[verdict["status"]], *(times if is_timed else ()), verdict["detail"]
        )
    Console().print(table)
