"""``mlxserve chat``: a conversation in the terminal, in this process."""

from __future__ import annotations

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


def chat_command(
    model: ModelArgument = DEFAULT_MODEL,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    memory_limit: MemoryLimit = None,
) -> None:
    """Talk to a model in the terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    With a pipe as stdin each line is one message, and only the answers go to stdout.

    Example:
      mlxserve chat smollm2 --system "Answer in one sentence."
    """
    from mlxserve.cli.conversation import Conversation, chat
    from mlxserve.cli.local_run import SamplingOptions

    sampling = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    chat(
        model,
        Conversation(system, max_tokens, sampling),
        config=EngineConfig(max_running=1, memory_limit=memory_limit),
    )
