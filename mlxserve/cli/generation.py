"""The work of ``mlxserve generate``."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from dataclasses import dataclass

from rich.console import Console

from mlxserve.cli.local_run import Message, RunStats, SamplingOptions, build_request, chat_prompt, stream_text
from mlxserve.cli.opening import open_model
from mlxserve.config import EngineConfig
from mlxserve.engine.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and how to answer it. ``is_raw`` leaves the chat template out."""

    prompt: str
    system: str | None
    is_raw: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    sampling: SamplingOptions

    @property
    def messages(self) -> list[Message]:
        messages: list[Message] = [{"role": "user", "content": self.prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages


def generate(name: str, job: Job, *, config: EngineConfig, as_json: bool) -> None:
    """Stream the answer to stdout and the figures to stderr, or print one JSON object to stdout."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    model = open_model(name, config, console=console)
    asyncio.run(_generate(model, job, console, as_json))


async def _generate(model: ServedModel, job: Job, console: Console, as_json: bool) -> None:
    try:
        prompt_ids = (
            tuple(model.tokenizer.encode(job.prompt)) if job.is_raw else chat_prompt(model, job.messages)
        )
        request = build_request(
            model, prompt_ids, max_tokens=job.max_tokens, sampling=job.sampling, script_key=job.prompt
        )
        stats = RunStats()
        pieces: list[str] = []
        async with aclosing(stream_text(model, request, stats, stops=job.stops)) as texts:
            async for text in texts:
                pieces.append(text)
                if not as_json:
                    write_text(text)
    finally:
        await model.close()
    if as_json:
        write_text(json.dumps(_report(model, stats, "".join(pieces)), ensure_ascii=False) + "\n")
        return
    write_text("\n")
    console.print(stats.line(), style="dim")


def write_text(text: str) -> None:
    """To stdout as UTF-8 whatever the locale, at once."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def _report(model: ServedModel, stats: RunStats, text: str) -> dict[str, object]:
    return {
        "model": model.id,
        "text": text,
        "finish_reason": stats.finish_reason,
        "prompt_tokens": stats.num_prompt_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "completion_tokens": stats.num_completion_tokens,
        "prefill_s": round(stats.prefill_s, 4),
        "decode_tok_s": None if stats.decode_tok_s is None else round(stats.decode_tok_s, 2),
    }
