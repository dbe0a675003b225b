"""``mlxserve lora train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mlxserve.cli.options import ModelArgument
from mlxserve.config import DEFAULT_MODEL

DataOption = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Folder, file (.jsonl, .json, .csv, .parquet) or hub data set."),
]


def train_command(
    model: ModelArgument = DEFAULT_MODEL,
    data: DataOption = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the adapter (default: ./adapters).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings from a .yaml or .toml file; flags win.")
    ] = None,
    type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="lora, dora or full (default: lora).")
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Rank of the change (default: 8).")] = None,
    alpha: Annotated[
        float | None,
        typer.Option(metavar="X", help="The change counts alpha/rank times (default: alpha is 2 * rank)."),
    ] = None,
    rslora: Annotated[
        bool | None, typer.Option("--rslora", help="Let it count alpha/sqrt(rank) times.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(metavar="X", help="Dropout before the change.")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Layers to train, such as q_proj, or a preset: linear (default), attention, qv, mlp, "
            "experts. Repeatable.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Train the last N decoder layers (default: all).")
    ] = None,
    iters: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer steps (default: one epoch).")
    ] = None,
    epochs: Annotated[float | None, typer.Option(metavar="X", help="Passes over the data.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Examples of a forward (default: 4).")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(metavar="N", help="Forwards of an optimizer step (default: 1).")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of an example (default: 2048).")
    ] = None,
    long_rows: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="What longer rows become: cut (default), keep-answer or skip."),
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", help="What is trained: last reply (default), all-assistant or none masked."
        ),
    ] = None,
    pack: Annotated[
        bool | None, typer.Option("--pack/--no-pack", help="Lay examples end to end (default: yes).")
    ] = None,
    valid_share: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Share of rows held out where there is no valid file (default: 0.05)."
        ),
    ] = None,
    skip_bad: Annotated[
        bool | None, typer.Option("--skip-bad", help="Leave bad rows out instead of refusing the data.")
    ] = None,
    prompt_field: Annotated[str | None, typer.Option(metavar="NAME", help="Column of prompts.")] = None,
    completion_field: Annotated[str | None, typer.Option(metavar="NAME", help="Column of answers.")] = None,
    messages_field: Annotated[str | None, typer.Option(metavar="NAME", help="Column of messages.")] = None,
    text_field: Annotated[str | None, typer.Option(metavar="NAME", help="Column of texts.")] = None,
    tools_field: Annotated[str | None, typer.Option(metavar="NAME", help="Column of tools.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(metavar="X", help="At its highest (default: 1e-4).")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="KIND", help="constant, linear or cosine (default).")
    ] = None,
    warmup: Annotated[int | None, typer.Option(metavar="N", help="Steps in which the rate rises.")] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="KIND", help="adamw (default) or sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(metavar="X", help="Default: 0.01.")] = None,
    clip: Annotated[float | None, typer.Option(metavar="X", help="Limit of the gradient's norm.")] = None,
    grad_checkpoint: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Recompute activations to save memory: auto (default), on, off."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of everything random (default: 0).")] = None,
    eval_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between evaluations.")] = None,
    save_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between saves.")] = None,
    report_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between lines.")] = None,
    patience: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after N evaluations without a better loss.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with a run; a finished one for --iters more.")
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Prompt to answer before and after. Repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")] = False,
) -> None:
    """Train an adapter on your own data and save it in mlx-lm's layout.

    Rows are messages, prompt/completion or text. Ctrl-C saves; --resume goes on exactly. Figures of every
    step go to metrics.jsonl, curves and samples to report.html beside the adapter.

    Example:
      mlxserve lora train smollm2 --data ./data --output ./adapters --iters 200
      mlxserve lora train ./model --config train.yaml --resume ./adapters
    """
    from mlxserve.cli.training import run_training
    from mlxserve.tuning.settings import make_settings

    flags: dict[str, Any] = {
        "data": data,
        "type": type,
        "rank": rank,
        "alpha": alpha,
        "rslora": rslora,
        "dropout": dropout,
        "targets": target,
        "layers": layers,
        "iters": iters,
        "epochs": epochs,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "max_length": max_length,
        "long_rows": long_rows,
        "mask": mask,
        "pack": pack,
        "valid_share": valid_share,
        "skip_bad": skip_bad,
        "prompt_field": prompt_field,
        "completion_field": completion_field,
        "messages_field": messages_field,
        "text_field": text_field,
        "tools_field": tools_field,
        "learning_rate": learning_rate,
        "schedule": schedule,
        "warmup": warmup,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "clip": clip,
        "grad_checkpoint": grad_checkpoint,
        "seed": seed,
        "eval_every": eval_every,
        "save_every": save_every,
        "report_every": report_every,
        "patience": patience,
    }
    settings = make_settings(config, flags)
    place = output or resume or Path("adapters")
    run_training(model, settings, place, resume=resume, prompts=sample, as_json=json)
