"""``mlxserve generate``: one prompt, one answer, in this process."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mlxserve.cli.options import (
    MaxTokens,
    MemoryLimit,
    MinP,
    ModelArgument,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
)
from mlxserve.config import DEFAULT_MODEL, EngineConfig
from mlxserve.errors import UsageError


def generate_command(
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT|-", help="The prompt; - reads it from stdin.")
    ],
    model: ModelArgument = DEFAULT_MODEL,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    system: System = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; repeatable.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    memory_limit: MemoryLimit = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")
    ] = False,
) -> None:
    """Answer one prompt in this process: the text goes to stdout as it comes, figures to stderr.

    Example:
      mlxserve generate --prompt "Name three seas." --max-tokens 64 --temperature 0
      cat notes.txt | mlxserve generate ./my-model --prompt - --json
    """
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out: give one of the two")
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise UsageError("--prompt is empty")
    from mlxserve.cli.generation import Job, generate
    from mlxserve.cli.local_run import SamplingOptions

    job = Job(
        prompt=text,
        system=system,
        is_raw=raw,
        max_tokens=max_tokens,
        stops=tuple(stop or ()),
        sampling=SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
    )
    generate(model, job, config=EngineConfig(max_running=1, memory_limit=memory_limit), as_json=as_json)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not UTF-8: byte {error.start}") from error
