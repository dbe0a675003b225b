"""``mlxserve lora``: fine-tuning. One module a command."""

from __future__ import annotations

import typer

from mlxserve.cli.lora_check_data import check_data_command

lora_app = typer.Typer(help="Fine-tune a model on your own data.", no_args_is_help=True)


@lora_app.callback()
def lora() -> None:
    """Fine-tune a model on your own data."""


lora_app.command("check-data")(check_data_command)
