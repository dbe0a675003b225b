"""SmolLM2 through the engine against stock mlx-lm on the same folder, in float32, greedy.

A token may differ only where the reference's own two best logits are closer than ``MAX_GAP``; such
places are printed.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.config import EngineConfig
from mlxserve.engine.benchmark import load_stock_float32
from mlxserve.engine.served_model import ServedModel, open_folder
from mlxserve.types import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

NUM_TOKENS = 64
MAX_GAP = 1e-3
QUESTIONS = (
    "What is the capital city of France? Answer in one sentence.",
    "Write a short poem about the sea.",
    "List three uses of a paper clip.",
    "Explain why the sky is blue to a child.",
    "def fibonacci(n):",
    "Translate 'good morning' into Spanish and German.",
    "Why do cats purr?",
    "Give me a recipe for pancakes with exact amounts, please, and tell me how long it takes to make them.",
)


@dataclass(frozen=True)
class Reference:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@pytest.fixture(scope="module")
def references(smollm2_folder: Path) -> list[Reference]:
    """What stock mlx-lm gives, with the gap between its two best logits at each step."""
    served = open_folder(smollm2_folder, "smollm2", EngineConfig(kv_pages=8))
    prompts = [_prompt(served, question) for question in QUESTIONS]
    asyncio.run(served.close())
    module = load_stock_float32(smollm2_folder)
    return [_stock_greedy(module, prompt) for prompt in prompts]


def _prompt(served: ServedModel, question: str) -> tuple[int, ...]:
    assert served.template is not None
    rendered = served.template.render([{"role": "user", "content": question}])
    return tuple(served.tokenizer.encode_rendered(rendered))


def _stock_greedy(module, prompt: tuple[int, ...]) -> Reference:
    caches = make_prompt_cache(module)
    logits = module(mx.array([prompt]), caches)[0, -1]
    tokens, gaps = [], []
    for _ in range(NUM_TOKENS):
        second, first = mx.sort(logits)[-2:].tolist()
        tokens.append(int(mx.argmax(logits).item()))
        gaps.append(first - second)
        logits = module(mx.array([[tokens[-1]]]), caches)[0, -1]
    return Reference(prompt, tuple(tokens), tuple(gaps))


async def _generate(served: ServedModel, name: str, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    request = GenerationRequest(name, prompt, NUM_TOKENS, SamplingParams(temperature=0))
    tokens: list[int] = []
    cached = 0
    async for output in served.engine.submit(request):
        assert output.error is None
        tokens += output.token_ids
        cached = output.num_cached_tokens
    return tuple(tokens), cached


def _compare(tokens: tuple[int, ...], reference: Reference) -> None:
    assert len(tokens) == NUM_TOKENS
    for step, (ours, theirs) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if ours != theirs:
            print(f"step {step}: {ours} for {theirs}, the reference's gap is {reference.gaps[step]:.2g}")
            assert reference.gaps[step] < MAX_GAP
            return


async def test_each_alone_together_staggered_and_after_a_prefix_hit(
    smollm2_folder: Path, references: list[Reference]
) -> None:
    served = open_folder(smollm2_folder, "smollm2", EngineConfig(kv_pages=256))
    alone = [await _generate(served, f"alone {i}", ref.prompt) for i, ref in enumerate(references)]
    for (tokens, _), reference in zip(alone, references, strict=True):
        _compare(tokens, reference)

    fresh = open_folder(smollm2_folder, "smollm2", EngineConfig(kv_pages=256))
    together = await asyncio.gather(
        *(_generate(fresh, f"together {i}", ref.prompt) for i, ref in enumerate(references))
    )
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]

    rng = random.Random(5)

    async def staggered(index: int) -> tuple[int, ...]:
        # Yielding a random number of times spreads the arrivals over many steps.
        for _ in range(rng.randrange(2000)):
            await asyncio.sleep(0)
        return (await _generate(fresh, f"staggered {index}", references[index].prompt))[0]

    arrived = await asyncio.gather(*(staggered(i) for i in range(len(references))))
    assert list(arrived) == [tokens for tokens, _ in alone]

    for index, reference in enumerate(references):
        tokens, cached = await _generate(served, f"again {index}", reference.prompt)
        assert tokens == alone[index][0]
        assert cached == len(reference.prompt) - 1
    await served.close()
    await fresh.close()


async def test_a_conversation_computes_only_what_is_new(smollm2_folder: Path) -> None:
    served = open_folder(smollm2_folder, "smollm2", EngineConfig(kv_pages=256))
    rng = random.Random(1)
    history = tuple(rng.randrange(10, 40_000) for _ in range(1500))
    first, cached = await _generate(served, "first", history)
    assert cached == 0
    turn = (*history, *first, 11, 12, 13)
    second, cached = await _generate(served, "second", turn)
    # All but the last sampled token, which was never fed, and the new message.
    assert len(history) + NUM_TOKENS - 1 <= cached < len(turn)
    await served.close()

    cold = open_folder(smollm2_folder, "smollm2", EngineConfig(kv_pages=256))
    assert (await _generate(cold, "cold", turn))[0] == second
    await cold.close()
