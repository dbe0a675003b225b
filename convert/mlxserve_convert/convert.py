"""The one entry: opens the source by its format, plans, and writes a folder."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

from mlxserve import __version__
from mlxserve.errors import ConversionError
from mlxserve_convert.check import Comparison, compare_with_source
from mlxserve_convert.checkpoint import Checkpoint
from mlxserve_convert.gguf_checkpoint import open_gguf
from mlxserve_convert.hf_checkpoint import open_hf
from mlxserve_convert.model_card import write_card
from mlxserve_convert.options import ConvertOptions, ConvertReport, OnProgress, Progress
from mlxserve_convert.output_folder import OutputFolder, write_json
from mlxserve_convert.plan import Plan, make_plan
from mlxserve_convert.streaming import StreamedOutput, memory_limit
from mlxserve_convert.verify import verify_folder
from mlxserve_convert.weights import quantized_types

_NOT_IN_PURPOSE = frozenset({"force", "dry_run", "check", "memory_limit"})
"""Options that change nothing in the tensors."""


def convert(
    source: Path, output: Path, options: ConvertOptions, on_progress: OnProgress | None = None
) -> ConvertReport:
    """Converts a GGUF file or a Hugging Face folder into an MLX folder.

    The output appears as a whole or not at all; an interrupted conversion goes on when it is asked for
    again. Raises ConversionError (or UnsupportedModelError) with one line on anything that is wrong with the
    source, the options for it, or the output.
    """
    source, output = source.expanduser(), output.expanduser()
    if not source.exists():
        raise ConversionError(f"{source}: no such file or folder")
    if source.resolve().is_relative_to(output.resolve()):
        raise ConversionError(f"{output}: holds the source {source}, choose another output")
    limit = memory_limit(options.memory_limit)
    with open_checkpoint(source) as checkpoint:
        _check_is_work(checkpoint, options)
        plan = make_plan(checkpoint, options)
        folder = OutputFolder(output, purpose=_purpose(checkpoint, options, plan), force=options.force)
        folder.check(plan.num_bytes)
        if options.dry_run:
            return _report(checkpoint, output, plan)
        with folder:
            return _write(checkpoint, plan, options, folder, limit, on_progress)


def _check_is_work(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    """Refuses to copy what is converted already."""
    types = quantized_types(checkpoint.weights.values())
    if checkpoint.is_mlx and types and not options.wants_quantization and not options.dequantize:
        raise ConversionError(
            f"{checkpoint.path}: is an MLX model already ({', '.join(types)}): use it as it is, or give "
            "--bits to quantize it again or --dequantize to make floats of it"
        )


def open_checkpoint(source: Path) -> Checkpoint:
    """The reader of a source's format."""
    if source.is_file():
        return open_gguf(source)
    return open_hf(source)


def _write(
    checkpoint: Checkpoint,
    plan: Plan,
    options: ConvertOptions,
    folder: OutputFolder,
    limit: int,
    on_progress: OnProgress | None,
) -> ConvertReport:
    output = StreamedOutput(plan, folder.path, limit, options.dtype)
    output.write(on_progress)
    write_json(folder.path / "config.json", plan.config)
    checkpoint.write_texts(folder.path)
    verified, comparison = _checked(plan, output, options, folder.path, on_progress)
    report = ConvertReport(
        source=checkpoint.path,
        output=folder.target,
        source_format=checkpoint.source_format,
        model_type=plan.config["model_type"],
        tensors=tuple(output.tensors),
        warnings=(*plan.warnings, *output.warnings),
        verified=verified,
        is_dry_run=False,
        num_resumed=output.num_resumed,
        proof=comparison.proof,
    )
    write_card(folder.path, report, options, checkpoint)
    return report


def _checked(
    plan: Plan, output: StreamedOutput, options: ConvertOptions, path: Path, on_progress: OnProgress | None
) -> tuple[str, Comparison]:
    """What ``ConvertReport.verified`` says, and the figures."""
    if options.check == "never":
        return "not checked: switched off", Comparison(None, "")
    num_bytes = sum(tensor.num_bytes for tensor in output.tensors)

    def show(phase: str) -> None:
        if on_progress is not None:
            on_progress(Progress(num_bytes, num_bytes, phase))

    show("loading the result")
    verified = verify_folder(path, num_bytes)
    comparison = compare_with_source(
        plan,
        output.tensors,
        path,
        mode=options.check,
        memory_limit=options.memory_limit,
        on_phase=show,
    )
    return f"{verified}; {comparison.sentence}", comparison


def _report(checkpoint: Checkpoint, output: Path, plan: Plan) -> ConvertReport:
    return ConvertReport(
        source=checkpoint.path,
        output=output,
        source_format=checkpoint.source_format,
        model_type=plan.config["model_type"],
        tensors=tuple(target.planned() for target in plan.targets),
        warnings=plan.warnings,
        verified="not checked: nothing was written",
        is_dry_run=True,
    )


def _purpose(checkpoint: Checkpoint, options: ConvertOptions, plan: Plan) -> str:
    """What decides every byte of the output: this version, the source as it is now, the options, and what
    they came to."""
    wishes = [
        f"{f.name}={getattr(options, f.name)!r}" for f in fields(options) if f.name not in _NOT_IN_PURPOSE
    ]
    targets = [f"{target.name} {target.layout} {target.dtype} {target.is_kept}" for target in plan.targets]
    return hashlib.sha256(
        "\n".join([__version__, checkpoint.identity, *wishes, *targets]).encode()
    ).hexdigest()
