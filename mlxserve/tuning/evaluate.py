"""How well a model, with or without an adapter, does on rows that it was not trained on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import EngineDeadError
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.tuning.batches import evaluation_batches
from mlxserve.tuning.examples import Example
from mlxserve.tuning.trainer import evaluate
from mlxserve.tuning.training_model import TrainingModel
from mlxserve.types import GenerationRequest, SamplingParams

_BATCH_SIZE = 8
_EXTRA_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Perplexity:
    """``loss`` is the mean over ``num_tokens`` trained tokens, in nats."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer beside the row's own; both without surrounding space."""

    place: str
    expected: str
    found: str

    @property
    def is_exact(self) -> bool:
        return self.expected == self.found


def measure_perplexity(model: TrainingModel, examples: Sequence[Example], max_length: int) -> Perplexity:
    """Over the trained tokens of the examples."""
    batches = evaluation_batches(examples, batch_size=_BATCH_SIZE, max_length=max_length)
    loss, num_tokens = evaluate(model.module, model.loss, batches)
    return Perplexity(loss, num_tokens)


def expected_answer(example: Example, tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
    """The tokens before the first trained one, and the text of the trained ones."""
    first = example.is_trained.index(True)
    answer = [
        token
        for token, is_trained in zip(example.token_ids[first:], example.is_trained[first:], strict=True)
        if is_trained and token not in tokenizer.eos_ids
    ]
    return example.token_ids[:first], tokenizer.decode(answer).strip()


async def answer_all(model: ServedModel, examples: Sequence[Example]) -> list[Answer]:
    """Greedy answers of the engine to the prompts of all examples, at most a little longer than their own."""
    limit = model.engine.max_requests
    gate = asyncio.Semaphore(limit)

    async def answer(index: int, example: Example) -> Answer:
        prompt, expected = expected_answer(example, model.tokenizer)
        request = GenerationRequest(
            request_id=f"eval-{index}",
            prompt_ids=prompt,
            max_tokens=example.num_trained + _EXTRA_TOKENS,
            sampling=SamplingParams(temperature=0.0),
            stop_token_ids=model.tokenizer.eos_ids,
            adapter_id=model.adapter_id,
        )
        ids: list[int] = []
        async with gate:
            async for output in model.engine.submit(request):
                if output.error is not None:
                    raise output.error
                if output.finish_reason == "abort":
                    raise EngineDeadError("the evaluation was aborted")
                ids.extend(token for token in output.token_ids if token not in model.tokenizer.eos_ids)
        return Answer(example.place, expected, model.tokenizer.decode(ids).strip())

    return list(await asyncio.gather(*(answer(index, example) for index, example in enumerate(examples))))
