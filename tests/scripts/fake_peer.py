"""Speaks the protocol of scripts/bench_peers.py as a side that is exactly as fast as it says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_protocol import serve


def load(model: str, threads: int) -> dict[str, Any]:
    print("a library that writes to stdout")  # noqa: T201
    return {"version": f"fake, {threads} threads"}


def run(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    return {"prefill_tok_s": 10.0, "decode_tok_s": 2.0, "tokens": [[1] * new_tokens for _ in prompts]}


def fail() -> dict[str, Any]:
    raise ValueError("it was asked to")


def end() -> dict[str, Any]:
    sys.exit("the end of it")


serve({"load": load, "run": run, "fail": fail, "end": end})
