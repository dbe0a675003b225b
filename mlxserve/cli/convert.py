"""``mlxserve convert``: a checkpoint or a GGUF file into an MLX folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.sizes import parse_size

if TYPE_CHECKING:
    from mlxserve_convert import ConvertReport, PlannedTensor

_SHOWN_NAMES = 5


def convert_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder, a .gguf file, a built-in name or a hub repo id.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The new folder (default: in the local store)."),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(metavar="N", help="Bits a weight: 2, 3, 4, 5, 6 or 8 (default: 4).")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Weights that share a scale: 32, 64 or 128 (default: 64)."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="affine, mxfp4, mxfp8 or nvfp4 (default: affine)."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which matrices get more or fewer bits: default, uniform, mixed, experts-low, or auto, "
            "which measures what each one's bits are worth.",
        ),
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option(metavar="BITS", help="With --recipe auto: bits a weight, all counted (default: 4.5)."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="float16, bfloat16 or float32 (default: the source's)."),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Make floats of a quantized source.")
    ] = False,
    lost_formats: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Formats that MLX lacks, in an import: float (exact), 8bit (small), or auto: float while "
            "the result stays under 1.5 times the source.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done for each matrix and write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output folder.")] = False,
    check: Annotated[
        bool, typer.Option(help="Load the result and compare it with the source before it is kept.")
    ] = True,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory that the conversion may take, such as 2G (default: a quarter of the machine's).",
        ),
    ] = None,
    force_result: Annotated[
        bool, typer.Option("--force-result", help="Keep a result that is too far from the source.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Convert a model into an MLX folder that mlxserve and mlx-lm load.

    A GGUF file is imported exactly, in its own formats. A folder of floats becomes 4-bit. A matrix whose
    columns no group divides stays as it is, and the summary says so. A result that is far from its source
    is not kept.

    Example:
      mlxserve convert ./my-model -o ./my-model-4bit --bits 4 --group-size 64
      mlxserve convert ./model.Q8_0.gguf -o ./model-mlx
    """
    from rich.console import Console

    from mlxserve.cli.model_source import conversion_progress, fetch
    from mlxserve.hub import resolve
    from mlxserve.hub.store import models_dir
    from mlxserve_convert import ConvertOptions, convert

    options = ConvertOptions(
        bits=bits,
        group_size=group_size,
        dtype=dtype,
        dequantize=dequantize,
        lost_formats=lost_formats,
        force=force,
        dry_run=dry_run,
        mode=mode,
        check="never" if not check else "force" if force_result else "auto",
        recipe=recipe,
        target_bpw=target_bpw,
        memory_limit=memory_limit,
    )
    console = Console(stderr=True)
    found = None if Path(source).exists() else resolve(source)
    path = Path(source) if found is None else fetch(found, console=console)
    named = path
    if found is not None and not (found.kind == "hub" and path.suffix == ".gguf"):
        named = Path(found.name.partition("@")[0] if found.kind == "hub" else found.name)
    target = output or models_dir() / _default_name(named, options)
    with conversion_progress(console, f"Converting {path.name}") as on_progress:
        report = convert(path, target, options, on_progress)
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    _print_json(report) if as_json else _print_text(report)


def _default_name(source: Path, options: Any) -> str:
    stem = source.stem if source.suffix == ".gguf" else source.name
    if options.dequantize:
        return f"{stem}-floats"
    return f"{stem}-mlx" if options.bits is None else f"{stem}-{options.bits}bit"


def _print_text(report: ConvertReport) -> None:
    if report.is_dry_run:
        for tensor in report.tensors:
            typer.echo(_plan_line(tensor))
    left = report.unquantized_matrices
    names = ", ".join(left[:_SHOWN_NAMES]) + (", …" if len(left) > _SHOWN_NAMES else "")
    verb = "Would write" if report.is_dry_run else "Wrote"
    typer.echo(
        f"{verb} {report.output}: {report.num_quantized} matrices quantized, {len(left)} left unquantized"
        f"{f' ({names})' if left else ''}, {report.bits_per_weight:.3f} bits per weight, "
        f"{report.num_bytes / 1e6:.1f} MB"
    )
    rounded = report.inexact_tensors
    if not rounded:
        typer.echo("Exact: every value is that of the source.")
    elif len(rounded) < len(report.tensors):
        typer.echo(f"Exact: {len(report.tensors) - len(rounded)} of {len(report.tensors)} tensors.")
    if report.num_resumed:
        typer.echo(f"Resumed: {report.num_resumed} tensors were there from an interrupted run.")
    if not report.is_dry_run:
        typer.echo(f"Check: {report.verified}")


def _plan_line(tensor: PlannedTensor) -> str:
    how = tensor.dtype
    if tensor.bits is not None:
        mode = "" if tensor.mode == "affine" else f"{tensor.mode}, "
        how = f"{mode}{tensor.bits}-bit, group size {tensor.group_size}"
    exact = "exact" if tensor.is_exact else "rounded"
    size = f"{tensor.num_bytes / 1e6:.1f} MB"
    return f"{tensor.name}  {tensor.source_type} {list(tensor.shape)}  {how}  {size}  {exact}"


def _print_json(report: ConvertReport) -> None:
    import json
    from dataclasses import asdict

    value = {
        "source": str(report.source),
        "output": str(report.output),
        "source_format": report.source_format,
        "model_type": report.model_type,
        "num_parameters": report.num_parameters,
        "num_bytes": report.num_bytes,
        "bits_per_weight": report.bits_per_weight,
        "num_quantized": report.num_quantized,
        "num_resumed": report.num_resumed,
        "unquantized": list(report.unquantized_matrices),
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "source_type": tensor.source_type,
                "bits": tensor.bits,
                "group_size": tensor.group_size,
                "mode": tensor.mode,
                "dtype": tensor.dtype,
                "num_bytes": tensor.num_bytes,
                "exact": tensor.is_exact,
            }
            for tensor in report.tensors
        ],
        "warnings": list(report.warnings),
        "verified": report.verified,
        "proof": report.proof and {**asdict(report.proof.divergence), "bound": report.proof.bound},
        "dry_run": report.is_dry_run,
    }
    typer.echo(json.dumps(value, ensure_ascii=False))
