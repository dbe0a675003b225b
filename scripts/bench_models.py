#!/usr/bin/env python3
"""Write GGUF models of a real model's shape with random weights, for scripts/bench_peers.py.

    scripts/bench_models.py llama-1b OUT.gguf      Llama 3.2 1B: Q4_1 layers, Q8_0 embedding, about 890 MB
    scripts/bench_models.py qwen3-moe OUT.gguf     a Qwen 3 MoE with 8 of 64 experts, about 800 MB

Blocks are made as they lie in the file, random bits with sane scales: nothing is quantized. ``--check PATH``
runs a prompt through llama.cpp (that Python has llama-cpp-python) and mlxserve, and prints how they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

from bench_protocol import Peer, PeerError  # noqa: E402

Bytes = npt.NDArray[np.uint8]

BLOCK = 32
"""Weights in a block of Q4_1 and of Q8_0."""
SEED = 11


@dataclass(frozen=True)
class Shape:
    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_theta: float
    experts: int = 0
    experts_used: int = 0


SHAPES = {
    "llama-1b": Shape("llama", 2048, 16, 32, 8, 64, 8192, 128256, 131072, 500000.0),
    "qwen3-moe": Shape("qwen3moe", 1024, 12, 16, 4, 128, 512, 32768, 32768, 1000000.0, 64, 8),
    "tiny-llama": Shape("llama", 64, 2, 4, 2, 32, 128, 512, 2048, 10000.0),
    "tiny-moe": Shape("qwen3moe", 64, 2, 4, 2, 32, 64, 512, 2048, 10000.0, 8, 2),
}


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Name, shape and type of each tensor, in the file's order."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab, shape.hidden), Kind.Q8_0
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (shape.hidden,), Kind.F32
        yield f"{block}.attn_q.weight", (q, shape.hidden), Kind.Q4_1
        yield f"{block}.attn_k.weight", (kv, shape.hidden), Kind.Q4_1
        yield f"{block}.attn_v.weight", (kv, shape.hidden), Kind.Q4_1
        yield f"{block}.attn_output.weight", (shape.hidden, q), Kind.Q4_1
        yield f"{block}.ffn_norm.weight", (shape.hidden,), Kind.F32
        if shape.experts:
            yield f"{block}.attn_q_norm.weight", (shape.head_dim,), Kind.F32
            yield f"{block}.attn_k_norm.weight", (shape.head_dim,), Kind.F32
            yield f"{block}.ffn_gate_inp.weight", (shape.experts, shape.hidden), Kind.F32
            yield f"{block}.ffn_gate_exps.weight", (shape.experts, shape.ffn, shape.hidden), Kind.Q4_1
            yield f"{block}.ffn_up_exps.weight", (shape.experts, shape.ffn, shape.hidden), Kind.Q4_1
            yield f"{block}.ffn_down_exps.weight", (shape.experts, shape.hidden, shape.ffn), Kind.Q4_1
        else:
            yield f"{block}.ffn_gate.weight", (shape.ffn, shape.hidden), Kind.Q4_1
            yield f"{block}.ffn_up.weight", (shape.ffn, shape.hidden), Kind.Q4_1
            yield f"{block}.ffn_down.weight", (shape.hidden, shape.ffn), Kind.Q4_1
    yield "output_norm.weight", (shape.hidden,), Kind.F32


def random_tensor(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Values with a spread of about ``1 / sqrt(columns)``, so that activations keep their size."""
    spread = shape[-1] ** -0.5
    if kind == Kind.F32:
        noise = rng.standard_normal(shape, dtype=np.float32)
        return 1 + 0.1 * noise if len(shape) == 1 else spread * noise
    blocks = (*shape[:-1], shape[-1] // BLOCK)
    if kind == Kind.Q8_0:
        # Uniform bytes spread by 256 / sqrt(12) steps.
        scale = _scales(blocks, spread / 74, rng)
        return np.concatenate([scale.view(np.uint8), _random_bytes((*blocks, BLOCK), rng)], axis=-1)
    # Uniform nibbles spread by 16 / sqrt(12) steps around 7.5.
    scale = _scales(blocks, spread / 4.6, rng)
    lowest = (scale.astype(np.float32) * -7.5).astype(np.float16)
    parts = [scale.view(np.uint8), lowest.view(np.uint8), _random_bytes((*blocks, BLOCK // 2), rng)]
    return np.concatenate(parts, axis=-1)


def _scales(blocks: tuple[int, ...], size: float, rng: np.random.Generator) -> npt.NDArray[np.float16]:
    values = size * (0.75 + 0.5 * rng.random((*blocks, 1), dtype=np.float32))
    return values.astype(np.float16)


def _random_bytes(shape: tuple[int, ...], rng: np.random.Generator) -> Bytes:
    return np.frombuffer(rng.bytes(int(np.prod(shape))), dtype=np.uint8).reshape(shape)


def write_model(path: Path, shape: Shape) -> None:
    """Streams one tensor after the other to ``path``."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(path.stem)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_theta)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.ffn)
    else:
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_vocab_size(shape.vocab)
    _add_tokenizer(writer, shape.vocab)
    planned = list(tensors(shape))
    rng = np.random.default_rng(SEED)
    for name, dimensions, kind in planned:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind == Kind.F32:
            writer.add_tensor_info(name, dimensions, np.dtype(np.float32), int(np.prod(dimensions)) * 4)
        else:
            raw = (*dimensions[:-1], dimensions[-1] // block * size)
            writer.add_tensor_info(name, raw, np.dtype(np.uint8), int(np.prod(raw)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, dimensions, kind in planned:
        writer.write_tensor_data(np.ascontiguousarray(random_tensor(dimensions, kind, rng)).reshape(-1))
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """The smallest byte-level BPE that both sides take: 256 bytes, one merge, an end token and fillers."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    tokens = [chr(code) for code in sorted(printable)] + [chr(256 + n) for n in range(256 - len(printable))]
    tokens += ["he", "<|endoftext|>"]
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL]
    tokens += [f"[unused{index}]" for index in range(len(tokens), size)]
    kinds += [gguf.TokenType.UNUSED] * (size - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)


def check(path: Path, peer_python: str) -> str:
    """One line: how far the two sides' logits and greedy tokens are from each other."""
    model = str(path.resolve())
    prompt = np.random.default_rng(SEED).integers(3, 257, size=16).tolist()
    answers = []
    for name, command in (
        ("mlxserve", [sys.executable, str(SCRIPTS / "peer_mlxserve.py")]),
        ("llama.cpp", [peer_python, str(SCRIPTS / "peer_llama_cpp.py")]),
    ):
        with Peer(name, command, environment={"MLXSERVE_THREADS": "2"}) as peer:
            peer.ask("load", model=model, threads=2)
            tokens = peer.ask("run", prompts=[prompt], new_tokens=8)["tokens"][0]
            answers.append((np.array(peer.ask("logits", prompt=prompt)["logits"]), tokens))
    (ours, our_tokens), (theirs, their_tokens) = answers
    gap, spread = float(np.abs(ours - theirs).max()), float(ours.std())
    correlation = float(np.corrcoef(ours.reshape(-1), theirs.reshape(-1))[0, 1])
    return (
        f"{path.name}: largest difference of a logit {gap:.3f} (their spread is {spread:.3f}), correlation "
        f"{correlation:.5f}; greedy tokens {our_tokens} and {their_tokens}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("output", type=Path)
    parser.add_argument("--check", metavar="PATH", help="the Python that has llama-cpp-python")
    options = parser.parse_args(arguments)
    if not options.output.is_file():
        write_model(options.output, SHAPES[options.shape])
    if options.check is not None:
        try:
            sys.stdout.write(check(options.output, options.check) + "\n")
        except PeerError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
