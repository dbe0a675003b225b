"""``mlxserve doctor``: what runs on this machine, and whether it is right."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor_command(
    again: Annotated[
        bool, typer.Option("--again", help="On a Mac, try the Metal kernels again; keep the new choice.")
    ] = False,
    metal_host: Annotated[
        bool,
        typer.Option(
            "--metal-host",
            help="Compile the Metal kernels for this CPU and check them (a checkout on Linux with the test "
            "extra; no speed).",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which kernels run here, and check them against MLX's own operations.

    On a Mac each Metal kernel is compiled, compared and timed at the first start of a model or of this
    command; those that are right and faster are used, the choice is kept for this chip, system and MLX
    version. Exit code 1 when a kernel is broken: it is not used, MLX's own operation is.

    Example:
      mlxserve doctor --json
    """
    from mlxserve.cli.diagnosis import diagnose, print_diagnosis

    report = diagnose(is_again=again, on_host=metal_host)
    print_diagnosis(report, as_json=as_json)
    if not report["ok"]:
        raise typer.Exit(1)
