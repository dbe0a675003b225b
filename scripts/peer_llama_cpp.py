"""The llama.cpp side of scripts/bench_peers.py: its low-level batch API, through llama-cpp-python.

Runs in a virtual environment that has ``llama-cpp-python`` (numpy comes with it) and nothing of ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import llama_cpp
import numpy as np
from bench_protocol import serve
from llama_cpp import llama_cpp as api

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
"""llama.cpp's own defaults."""

Row = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether its logits are wanted."""


class Side:
    """A loaded model; a fresh context for each run."""

    def __init__(self) -> None:
        self._model: Any = None
        self._threads = 1

    def load(self, model: str, threads: int) -> dict[str, Any]:
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._threads = threads
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        info = api.llama_print_system_info().decode()
        return {"version": f"llama-cpp-python {llama_cpp.__version__}", "system": info}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """All prompts, then greedy tokens of all streams together."""
        length = len(prompts[0]) + new_tokens
        context = self._context(len(prompts), length)
        batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            started = time.perf_counter()
            newest = self._prefill(context, batch, prompts)
            prefilled = time.perf_counter()
            tokens = [newest]
            for step in range(new_tokens - 1):
                rows = [
                    (token, len(prompt) + step, stream, True)
                    for stream, (token, prompt) in enumerate(zip(tokens[-1], prompts, strict=True))
                ]
                self._decode(context, batch, rows)
                tokens.append([self._best(context, stream) for stream in range(len(prompts))])
            ended = time.perf_counter()
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)
        return {
            "prefill_tok_s": sum(map(len, prompts)) / (prefilled - started),
            "decode_tok_s": len(prompts) * (new_tokens - 1) / max(ended - prefilled, 1e-9),
            "tokens": [list(stream) for stream in zip(*tokens, strict=True)],
        }

    def logits(self, prompt: list[int]) -> dict[str, Any]:
        """The logits of each token of a prompt."""
        context = self._context(1, len(prompt))
        batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            self._decode(context, batch, [(token, place, 0, True) for place, token in enumerate(prompt)])
            return {"logits": [self._row(context, place).tolist() for place in range(len(prompt))]}
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)

    def _context(self, streams: int, length: int) -> Any:
        parameters = api.llama_context_default_params()
        # Each stream has its own part of the cache, of a multiple of 256 tokens.
        parameters.n_ctx = streams * (-(-length // 256) * 256)
        parameters.n_batch = BATCH_TOKENS
        parameters.n_ubatch = MICRO_BATCH_TOKENS
        parameters.n_seq_max = streams
        parameters.n_threads = parameters.n_threads_batch = self._threads
        context = api.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp has no memory for {parameters.n_ctx} tokens of context")
        return context

    def _prefill(self, context: Any, batch: Any, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first token of each stream. Batches are filled across prompts, as short ones would else run in
        smaller matrices."""
        rows = [
            (token, place, stream, place == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        first: dict[int, int] = {}
        for start in range(0, len(rows), BATCH_TOKENS):
            part = rows[start : start + BATCH_TOKENS]
            self._decode(context, batch, part)
            for index, (_, _, stream, is_wanted) in enumerate(part):
                if is_wanted:
                    first[stream] = self._best(context, index)
        return [first[stream] for stream in range(len(prompts))]

    def _decode(self, context: Any, batch: Any, rows: Iterable[Row]) -> None:
        count = 0
        for index, (token, position, stream, is_wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = int(is_wanted)
            count = index + 1
        batch.n_tokens = count
        status = api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")

    def _row(self, context: Any, index: int) -> Any:
        return np.ctypeslib.as_array(api.llama_get_logits_ith(context, index), shape=(self._vocab_size,))

    def _best(self, context: Any, index: int) -> int:
        return int(self._row(context, index).argmax())


@api.llama_log_callback
def _ignore_log(level: int, text: bytes, user_data: object) -> None:
    """llama.cpp tells each tensor and buffer; failures come as results."""


if __name__ == "__main__":
    api.llama_log_set(_ignore_log, None)
    side = Side()
    serve({"load": side.load, "run": side.run, "logits": side.logits})
