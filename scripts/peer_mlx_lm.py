"""Stock mlx-lm's side of scripts/bench_peers.py: the folder that mlxserve runs, float32, one stream."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_protocol import serve

from mlxserve.engine.benchmark import StockRun, mlx_lm_runner


class Side:
    def __init__(self) -> None:
        self._run: Callable[[tuple[int, ...], int], StockRun] | None = None

    def load(self, model: str, threads: int) -> dict[str, Any]:
        """``model`` is an MLX folder. The number of threads is MLX's own."""
        self._run = mlx_lm_runner(Path(model))
        return {"version": f"mlx-lm {version('mlx-lm')}"}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        if self._run is None or len(prompts) != 1:
            raise ValueError("a loaded model runs one stream")
        run = self._run(tuple(prompts[0]), new_tokens)
        return {
            "prefill_tok_s": run.prefill_tok_s,
            "decode_tok_s": run.decode_tok_s,
            "tokens": [run.token_ids],
        }


if __name__ == "__main__":
    side = Side()
    serve({"load": side.load, "run": side.run})
