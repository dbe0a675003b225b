"""``mlxserve lora``: fine-tune a model, look at data and results, and put adapters to use. One module a
command."""

from __future__ import annotations

import typer

from mlxserve.cli.lora_adapter import export_command, fuse_command, import_command
from mlxserve.cli.lora_check_data import check_data_command
from mlxserve.cli.lora_eval import eval_command
from mlxserve.cli.lora_train import train_command

lora_app = typer.Typer(help="Fine-tune a model on your own data.", no_args_is_help=True)


@lora_app.callback()
def lora() -> None:
    """Fine-tune a model on your own data: LoRA, DoRA or full weights, on the machine that serves it."""


lora_app.command("check-data")(check_data_command)
lora_app.command("train")(train_command)
lora_app.command("eval")(eval_command)
lora_app.command("fuse")(fuse_command)
lora_app.command("export")(export_command)
lora_app.command("import")(import_command)
