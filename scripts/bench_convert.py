#!/usr/bin/env python3
"""Measure a conversion: time, peak of anonymous memory, and that a killed one goes on to the same result.

    scripts/bench_convert.py write llama-13b DIR        a bf16 checkpoint with seeded random weights, 26 GB
    scripts/bench_convert.py run DIR OUT                convert it to 4 bits: seconds, GB/s, peak memory
    scripts/bench_convert.py run DIR OUT --kill 0.5     kill -9 after that share of the output, and go on
    scripts/bench_convert.py peers DIR WORK             in turn with mlx_lm.convert, medians and ratio

Memory is that of the converting process (RssAnon, sampled every 10 ms), which Linux alone tells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxserve_convert.shards import ShardedWriter

SEED = 7
BLOCK_ELEMENTS = 1 << 24
SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 512, False),
    "llama-1b": Shape(2048, 16, 32, 8, 8192, 128256, True),
    "llama-7b": Shape(4096, 32, 32, 32, 11008, 32000, False),
    "llama-13b": Shape(5120, 40, 40, 40, 13824, 32000, False),
}


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
    }


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    head_dim = shape.hidden // shape.heads
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        for name, rows in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows * head_dim, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, shape.heads * head_dim)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.ffn, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.ffn, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.ffn)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def write_checkpoint(shape: Shape, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    writer = ShardedWriter(folder, [name for name, _ in tensors(shape)])
    try:
        for index, (name, size) in enumerate(tensors(shape)):
            (stream,) = writer.begin([(name, "BF16", size)])
            offset = 0
            for block in blocks(index, size):
                writer.write(stream, offset, block)
                offset += block.nbytes
            writer.end()
        writer.finish()
    finally:
        writer.close()


def blocks(index: int, size: tuple[int, ...]) -> Iterator[npt.NDArray[np.uint16]]:
    """A tensor's values as bfloat16 bits: norms near 1, matrices of a standard deviation of 0.02."""
    rng = np.random.Generator(np.random.SFC64([SEED, index]))
    left = int(np.prod(size))
    mean, scale = (1.0, 0.1) if len(size) == 1 else (0.0, 0.02)
    while left:
        values = rng.standard_normal(min(left, BLOCK_ELEMENTS), dtype=np.float32)
        values *= scale
        values += mean
        yield (values.view(np.uint32) >> 16).astype(np.uint16)
        left -= values.size


def tokenizer() -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }


@dataclass(frozen=True)
class Run:
    seconds: float
    peak_bytes: int
    was_killed: bool


def convert(
    source: Path, output: Path, *, kill_at: int | None = None, arguments: tuple[str, ...] = ()
) -> Run:
    command = [sys.executable, "-m", "mlxserve", "convert", str(source), "-o", str(output), "--no-check"]
    return measured([*command, "--bits", "4", "--group-size", "64", *arguments], output, kill_at)


def stock_convert(source: Path, output: Path) -> Run:
    command = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(source), "--mlx-path", str(output)]
    return measured([*command, "-q", "--q-bits", "4", "--q-group-size", "64"], output, None)


def measured(command: list[str], output: Path, kill_at: int | None) -> Run:
    """Runs a command and looks at its memory meanwhile; with ``kill_at`` it is killed once it has written so
    many bytes beside ``output``."""
    peak = 0
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        if kill_at is not None and written(output) >= kill_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(SAMPLE_SECONDS)
    seconds = time.perf_counter() - start
    assert process.stderr is not None
    if process.returncode not in (0, -signal.SIGKILL) or (process.returncode and kill_at is None):
        raise SystemExit(f"{command[2]} failed: {process.stderr.read()}")
    return Run(seconds, peak, process.returncode != 0)


def anonymous(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def written(output: Path) -> int:
    partial = output.with_name(f".{output.name}.partial")
    if not partial.is_dir():
        return 0
    return sum(file.stat().st_blocks * 512 for file in partial.glob("shard-*.data"))


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.name.encode())
        with file.open("rb") as handle:
            found.update(hashlib.file_digest(handle, "sha256").digest())
    return found.hexdigest()


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run(source: Path, output: Path, kill_share: float | None) -> dict[str, Any]:
    size = folder_bytes(source)
    whole = convert(source, output)
    result: dict[str, Any] = {
        "source_bytes": size,
        "output_bytes": folder_bytes(output),
        "seconds": round(whole.seconds, 1),
        "source_gb_per_s": round(size / 1e9 / whole.seconds, 3),
        "peak_anonymous_mb": round(whole.peak_bytes / 1e6),
    }
    if kill_share is not None:
        expected = digest(output)
        kill_at = int(result["output_bytes"] * kill_share)
        shutil.rmtree(output)
        killed = convert(source, output, kill_at=kill_at)
        rest = convert(source, output)
        result["killed"] = {
            "was_killed": killed.was_killed,
            "seconds_before": round(killed.seconds, 1),
            "seconds_after": round(rest.seconds, 1),
            "identical": digest(output) == expected,
        }
    return result


def peers(source: Path, work: Path, repeat: int) -> dict[str, Any]:
    ours: list[Run] = []
    stock: list[Run] = []
    for _ in range(repeat):
        for runs, side in ((ours, convert), (stock, stock_convert)):
            with tempfile.TemporaryDirectory(dir=work) as place:
                runs.append(side(source, Path(place) / "out"))
    figures = {
        name: {
            "seconds": round(statistics.median(run.seconds for run in runs), 1),
            "peak_anonymous_mb": round(statistics.median(run.peak_bytes for run in runs) / 1e6),
        }
        for name, runs in (("mlxserve", ours), ("mlx_lm", stock))
    }
    ratio = figures["mlxserve"]["seconds"] / figures["mlx_lm"]["seconds"]
    return {"source_bytes": folder_bytes(source), "repeat": repeat, **figures, "time_ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("shape", choices=SHAPES)
    write.add_argument("folder", type=Path)
    one = commands.add_parser("run")
    one.add_argument("source", type=Path)
    one.add_argument("output", type=Path)
    one.add_argument("--kill", type=float, metavar="SHARE")
    both = commands.add_parser("peers")
    both.add_argument("source", type=Path)
    both.add_argument("work", type=Path)
    both.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write_checkpoint(SHAPES[arguments.shape], arguments.folder)
        return
    if arguments.command == "run":
        result = run(arguments.source, arguments.output, arguments.kill)
    else:
        result = peers(arguments.source, arguments.work, arguments.repeat)
    sys.stdout.write(json.dumps({"cpus": os.cpu_count(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
