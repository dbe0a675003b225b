"""What ``mlxserve fit`` asks of the sizes and how it prints them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console

from mlxserve.cli.model_source import fetch
from mlxserve.errors import UsageError
from mlxserve.hub import ModelSource, resolve
from mlxserve.hub.remote_config import pull_config
from mlxserve.json_file import read_json_object
from mlxserve_convert.fit import (
    ENGINE_SHARE,
    KV_BITS,
    Budget,
    Footprint,
    LayerCache,
    footprint,
    gguf_footprint,
    macs,
    tokens_per_second,
)

_BITS = (None, 8, 6, 4, 3)
_SPEED_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """None where the command line says nothing."""

    memory: int | None
    context: int | None
    parallel: int | None
    kv_bits: int


def show_fit(name: str, question: Question, *, as_json: bool) -> None:
    """Raises UsageError for widths of keys and values that the model cannot have."""
    if question.kv_bits not in KV_BITS:
        raise UsageError(f"--kv-bits knows {', '.join(map(str, KV_BITS))}, got {question.kv_bits}")
    source = resolve(name)
    model = _footprint(source)
    try:
        model.kv_token_bytes(question.kv_bits)
    except ValueError as error:
        raise UsageError(f"--kv-bits {question.kv_bits} does not fit this model: {error}") from None
    report = _report(source.name, model, question)
    typer.echo(json.dumps(report, ensure_ascii=False)) if as_json else _print(report)


def _footprint(source: ModelSource) -> Footprint:
    if source.kind == "scripted":
        raise UsageError(f"{source.name} is a scripted model, it has no weights")
    if source.kind == "hub":
        path = pull_config(source.name)
        return footprint(read_json_object(path), path.parent, _BITS)
    path = fetch(source, console=Console(stderr=True))
    if path.is_dir():
        return footprint(read_json_object(path / "config.json"), path, _BITS)
    return gguf_footprint(path, _BITS)[0]


def _report(name: str, model: Footprint, question: Question) -> dict[str, Any]:
    trained = model.context_length
    context = question.context or min(_SPEED_CONTEXT, trained or _SPEED_CONTEXT)
    return {
        "model": name,
        "model_type": model.model_type,
        "num_parameters": model.weights[0].num_parameters,
        "context_length": trained,
        "weights": [
            asdict(weights) | {"bits_per_weight": round(weights.bits_per_weight, 3)}
            for weights in model.weights
        ],
        "kv": {
            "layers": _layer_kinds(model.layers),
            "token_bytes": {str(bits): _token_bytes(model, bits) for bits in KV_BITS},
            "state_bytes": model.state_bytes,
        },
        "asked": {
            "memory": question.memory,
            "context": question.context,
            "parallel": question.parallel,
            "kv_bits": question.kv_bits,
        },
        "speed_context": context,
        "macs": [_mac(size, model, question, context) for size, _ in macs(question.memory)],
    }


def _token_bytes(model: Footprint, bits: int) -> int | None:
    try:
        return model.kv_token_bytes(bits, model.float_bytes)
    except ValueError:
        return None


def _layer_kinds(layers: tuple[LayerCache, ...]) -> list[dict[str, Any]]:
    return [{"count": count, **asdict(layer)} for layer, count in Counter(layers).items()]


def _mac(size: int, model: Footprint, question: Question, context: int) -> dict[str, Any]:
    budget = Budget.of_mac(size)
    parallel = question.parallel or 1
    fits = []
    for weights in model.weights:
        row: dict[str, Any] = {
            "weights": weights.name,
            "max_context": budget.max_context(model, weights, parallel, question.kv_bits),
        }
        if question.context is not None:
            count = budget.max_parallel(model, weights, question.context, question.kv_bits)
            row |= {"max_parallel": count, "fits": count >= parallel}
        fits.append(row)
    chips = dict(macs(size))[size]
    return {
        "memory_bytes": size,
        "usable_bytes": budget.engine_bytes,
        "fits": fits,
        "bounds": [
            {
                "chip": chip.name,
                "bandwidth_gbps": chip.bandwidth,
                "tok_s": {
                    weights.name: round(tokens_per_second(model, weights, chip, context, question.kv_bits), 1)
                    for weights, row in zip(model.weights, fits, strict=True)
                    if row["max_context"] >= context
                },
            }
            for chip in chips
        ],
    }


def _print(report: Mapping[str, Any]) -> None:
    asked = report["asked"]
    trained = report["context_length"]
    typer.echo(
        f"{report['model']} ({report['model_type']}): {report['num_parameters'] / 1e9:.3g} billion weights, "
        f"context {trained or 'not stated'}"
    )
    for weights in report["weights"]:
        typer.echo(
            f"  {weights['name']:8} {weights['num_bytes'] / 1e9:8.2f} GB  {weights['bits_per_weight']:6.2f} "
            f"bits a weight, {weights['read_bytes'] / 1e9:.2f} GB read for a token"
        )
    for kind in report["kv"]["layers"]:
        typer.echo(f"  {_kind_line(kind)}")
    sizes = report["kv"]["token_bytes"]
    each = ", ".join(f"{bits}-bit {size / 1024:.1f} KiB" for bits, size in sizes.items() if size is not None)
    typer.echo(f"Keys and values of a token: {each}")
    if any(kind["kind"] == "window" for kind in report["kv"]["layers"]):
        typer.echo("  (the server keeps all tokens of windowed layers, too, until a sequence ends)")
    typer.echo(
        f"Usable for weights and KV: {ENGINE_SHARE:.0%} of what Metal lets a process keep, which is 2/3 of "
        "the memory, 3/4 from 36 GB on"
    )
    _print_fits(report, asked)
    typer.echo(
        f"Bound of decoding one sequence at {report['speed_context']} tokens by memory bandwidth, tok/s "
        "(computed, not measured)"
    )
    for mac in report["macs"]:
        for bound in mac["bounds"]:
            if bound["tok_s"]:
                rates = ", ".join(f"{name} {rate:g}" for name, rate in bound["tok_s"].items())
                typer.echo(f"  {bound['chip']:17} {mac['memory_bytes'] >> 30:4} GB: {rates}")


def _kind_line(kind: Mapping[str, Any]) -> str:
    shape = " + ".join(f"{heads} x {size}" for heads, size in kind["rows"]) or "no keys"
    window = f", window {kind['window']}" if kind["window"] else ""
    state = f", {kind['state_bytes'] / 2**20:.2f} MiB a sequence" if kind["state_bytes"] else ""
    return f"{kind['count']} layers {kind['kind']}: {shape} values a token{window}{state}"


def _print_fits(report: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    if asked["context"] is None:
        typer.echo(f"Longest context with {asked['parallel'] or 1} at once, {asked['kv_bits']}-bit KV")
    else:
        typer.echo(f"Sequences of {asked['context']} tokens at once, {asked['kv_bits']}-bit KV")
    for mac in report["macs"]:
        key = "max_context" if asked["context"] is None else "max_parallel"
        cells = [f"{row['weights']} {row[key] or 'no'}" for row in mac["fits"]]
        typer.echo(
            f"  {mac['memory_bytes'] / 2**30:4.0f} GB ({mac['usable_bytes'] / 1e9:6.1f} usable): "
            f"{', '.join(cells)}"
        )
