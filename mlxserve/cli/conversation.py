"""The work of ``mlxserve chat``: messages kept over turns, and the loop that reads lines."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing, suppress

from rich.console import Console
from rich.markup import escape

from mlxserve.cli.generation import write_text
from mlxserve.cli.local_run import Message, RunStats, SamplingOptions, build_request, chat_prompt, stream_text
from mlxserve.cli.opening import open_model
from mlxserve.config import EngineConfig
from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import InvalidRequestError

HELP = """/help   this list
/reset  forget the conversation
/exit   leave (so does Ctrl-D)
Ctrl-C stops an answer. A line that begins with // is a message that begins with /."""


class Conversation:
    """The messages so far. A turn that fails leaves no trace; a stopped one keeps what was said."""

    def __init__(self, system: str | None, max_tokens: int | None, sampling: SamplingOptions) -> None:
        self._first: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._first)
        self._max_tokens = max_tokens
        self._sampling = sampling

    def reset(self) -> None:
        self._messages = list(self._first)

    async def answer(self, model: ServedModel, text: str) -> RunStats:
        """Print the answer as it comes. Raises InvalidRequestError when the context is full."""
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        request = build_request(
            model,
            chat_prompt(model, messages),
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            script_key=text,
        )
        stats = RunStats()
        pieces: list[str] = []
        try:
            async with aclosing(stream_text(model, request, stats)) as texts:
                async for piece in texts:
                    pieces.append(piece)
                    write_text(piece)
        finally:
            write_text("\n")
            if pieces:
                self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return stats


def chat(name: str, conversation: Conversation, *, config: EngineConfig) -> None:
    """Read lines until /exit or the end of stdin, and answer each."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    model = open_model(name, config, console=console)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        # Importing it gives input() line editing and history.
        with suppress(ImportError):
            import readline  # noqa: F401
        console.print(f"[bold]{escape(model.id)}[/bold]: /help lists the commands, Ctrl-D leaves.")
    with asyncio.Runner() as runner:
        try:
            while (line := _read_line(is_terminal)) is not None:
                if not _handle(line, model, conversation, runner, console, is_terminal):
                    break
        finally:
            runner.run(model.close())


def _handle(
    line: str,
    model: ServedModel,
    conversation: Conversation,
    runner: asyncio.Runner,
    console: Console,
    is_terminal: bool,
) -> bool:
    """One line of input; False ends the chat."""
    text = line.strip()
    if not text:
        return True
    if text.startswith("/") and not text.startswith("//"):
        return _run_command(text, conversation, console)
    try:
        stats = runner.run(
            conversation.answer(model, text.removeprefix("/") if text.startswith("//") else text)
        )
    except InvalidRequestError as error:
        console.print(f"error: {error} (/reset starts anew)", markup=False)
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        console.print("(stopped)", style="dim")
    else:
        if is_terminal:
            console.print(stats.line(), style="dim")
    return True


def _run_command(text: str, conversation: Conversation, console: Console) -> bool:
    if text == "/exit":
        return False
    if text == "/reset":
        conversation.reset()
        console.print("(a new conversation)", style="dim")
    elif text == "/help":
        console.print(HELP, markup=False)
    else:
        console.print(f"error: no command {text.split()[0]}; /help lists them", markup=False)
    return True


def _read_line(is_terminal: bool) -> str | None:
    """The next line without its end; None at the end of input. Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> ") if is_terminal else _read_piped_line()
        except EOFError:
            if is_terminal:
                write_text("\n")
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            write_text("\n")


def _read_piped_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return line.decode("utf-8", "replace") if line else None
