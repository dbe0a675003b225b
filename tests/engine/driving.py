"""Runs requests on an engine core in the test's own thread, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.engine.core import EngineCore
from mlxserve.types import GenerationRequest, SamplingParams, TokenOutput

GREEDY = SamplingParams(temperature=0)


def greedy(name: str, prompt: Sequence[int], max_tokens: int = 12) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), max_tokens, GREEDY)


def run(core: EngineCore, *requests: GenerationRequest) -> dict[str, list[TokenOutput]]:
    """All outputs of each request; all are added before the first step."""
    outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        for output in core.add(request):
            outputs[output.request_id].append(output)
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    core.check_integrity()
    for given in outputs.values():
        assert [output.finish_reason is not None for output in given] == [False] * (len(given) - 1) + [True]
    return outputs


def tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def generate(core: EngineCore, *requests: GenerationRequest) -> list[list[int]]:
    """The tokens of each request, in the order given."""
    outputs = run(core, *requests)
    return [tokens(outputs[request.request_id]) for request in requests]
