"""mlxserve's side of scripts/bench_peers.py: the engine in this process, without HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_protocol import serve
from rich.console import Console

from mlxserve.cli.model_source import prepare_model
from mlxserve.engine.benchmark import DecodeShape, decode_core, decode_weight_bytes, drain, run_streams
from mlxserve.engine.read_rate import measure_read_rates
from mlxserve.models.loader import LoadedModel, load_model
from mlxserve_kernels import ops


class Side:
    """A loaded model; a fresh engine for each run."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._folder = Path()

    def load(self, model: str, threads: int) -> dict[str, Any]:
        """``model`` as the command line names one; a GGUF file is imported first, once."""
        if ops.num_threads() != threads:
            raise ValueError(f"{ops.num_threads()} threads are set, {threads} are wanted")
        self._folder = prepare_model(model, console=Console(stderr=True)).path
        self._model = load_model(self._folder)
        return {
            "version": f"mlxserve, {ops.implementation()} kernels",
            "vocab_size": self._model.vocab_size,
            "weight_bytes": self._model.weight_bytes,
            "decode_weight_bytes": decode_weight_bytes(self._model),
            "kv_token_bytes": sum(spec.page_bytes(1) for spec in self._model.layers),
            "folder": str(self._folder),
        }

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """All prompts, then greedy tokens of all streams together."""
        model = self._loaded()
        shape = DecodeShape(len(prompts[0]), new_tokens, len(prompts))
        core = decode_core(model, shape)
        run = run_streams(core, shape, [tuple(prompt) for prompt in prompts])
        drain(core, shape)
        return {
            "prefill_tok_s": shape.streams * shape.prompt_tokens / (run.prefilled - run.started),
            "decode_tok_s": run.num_decoded / max(run.ended - run.prefilled, 1e-9),
            "tokens": run.tokens,
        }

    def logits(self, prompt: list[int]) -> dict[str, Any]:
        """The logits of each token of a prompt, by mlx-lm's own cache on our kernels."""
        logits = self._loaded().module(mx.array([prompt], dtype=mx.int32))[0]
        return {"logits": logits.astype(mx.float32).tolist()}

    def read_rates(self) -> dict[str, Any]:
        rates = measure_read_rates(ops.num_threads())
        return {"best": rates.best, "small_pages": rates.small_pages}

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise ValueError("no model was loaded")
        return self._model


if __name__ == "__main__":
    side = Side()
    serve({"load": side.load, "run": side.run, "logits": side.logits, "read_rates": side.read_rates})
