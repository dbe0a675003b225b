"""``mlxserve lora fuse``, ``export`` and ``import``: what becomes of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxserve.errors import UsageError

AdapterOption = Annotated[Path, typer.Option("--adapter", metavar="DIR", help="Folder of the adapter.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The new folder.")]
_BITS = ("auto", "keep")


def fuse_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The base of the adapter.")],
    adapter: AdapterOption,
    output: OutputOption,
    bits: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="Of changed layers in a quantized base: auto gives each the fewest bits that keep its "
            "change, keep the bits that it has.",
        ),
    ] = "auto",
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Write floats throughout.")] = False,
    check: Annotated[
        bool, typer.Option(help="Compare the result with base plus adapter before it is kept.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output folder.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put an adapter into its base: a model folder that needs no adapter.

    A small change vanishes when a layer is rounded to 4 bits again. Each changed layer is measured, and the
    result must predict like base plus adapter, or nothing is kept.

    Example:
      mlxserve lora fuse smollm2 --adapter ./adapters -o ./smollm2-mine
    """
    import json as json_module
    from dataclasses import asdict

    from rich.console import Console

    from mlxserve.cli.model_source import conversion_progress, prepare_model
    from mlxserve.tuning.fuse import layers_summary
    from mlxserve.tuning.fusing import fuse_adapter

    if bits not in _BITS:
        raise UsageError(f"--bits {bits} is not possible, only: {', '.join(_BITS)}")
    if dequantize and bits != "auto":
        raise UsageError("--dequantize writes floats: --bits does not go with it")
    console = Console(stderr=True)
    base = prepare_model(model, console=console).path
    with conversion_progress(console, f"Fusing {adapter.name}") as on_progress:
        fused = fuse_adapter(
            base,
            adapter,
            output,
            bits="floats" if dequantize else "keep" if bits == "keep" else "auto",
            force=force,
            check=check,
            on_progress=on_progress,
        )
    if json:
        layers = [asdict(layer) for layer in fused.layers]
        value = {
            "output": str(fused.output),
            "num_bytes": fused.num_bytes,
            "layers": layers,
            "divergence": fused.divergence,
            "effect": fused.effect,
        }
        typer.echo(json_module.dumps(value))
        return
    kinds = ", ".join(f"{count} in {name}" for name, count in layers_summary(fused.layers).items())
    worst = max((layer.lost for layer in fused.layers), default=0.0)
    typer.echo(
        f"Wrote {fused.output}: {len(fused.layers)} changed layers ({kinds}), {fused.num_bytes / 1e6:.1f} MB"
    )
    typer.echo(f"Rounding takes at most {worst:.1%} of a layer's change.")
    if fused.divergence is not None and fused.effect is not None:
        typer.echo(
            f"Check: predictions differ from base plus adapter by {fused.divergence:.5f} nats a token; the "
            f"adapter's effect is {fused.effect:.5f}"
        )


def export_command(
    adapter: AdapterOption,
    output: OutputOption,
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the base to write (default: the adapter's own)."),
    ] = None,
) -> None:
    """Write an adapter in the layout of Hugging Face's PEFT.

    Example:
      mlxserve lora export --adapter ./adapters -o ./adapters-peft
    """
    from mlxserve.models.adapter_folder import read_adapter
    from mlxserve.tuning.peft import export_peft

    _check_new(output)
    read = read_adapter(adapter)
    export_peft(read, output, base_name=base or str(read.config.get("model", "")))
    typer.echo(f"Wrote {output}")


def import_command(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a PEFT LoRA or DoRA adapter.")],
    output: OutputOption,
) -> None:
    """Make an adapter of a PEFT folder that mlxserve and mlx-lm load.

    Example:
      mlxserve lora import ./adapter-peft -o ./adapters
    """
    from mlxserve.tuning.peft import import_peft

    _check_new(output)
    import_peft(source, output)
    typer.echo(f"Wrote {output}")


def _check_new(output: Path) -> None:
    if output.exists():
        raise UsageError(f"{output}: exists already, choose another --output")
