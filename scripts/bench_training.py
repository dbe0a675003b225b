#!/usr/bin/env python3
"""Time LoRA training on the CPU kernels beside stock mlx-lm: each part of a step, then whole steps.

    scripts/bench_training.py                      parts at SmolLM2's sizes, and what they make of a step
    scripts/bench_training.py --steps --layers 4   whole steps of a model with SmolLM2's layers, both sides
    scripts/bench_training.py --steps --only ours  without the other side, which takes minutes a step
    scripts/bench_training.py --bits 4 --json      4-bit weights; one JSON object

Both sides run in turn, on random weights of float32 or, with --bits, affine in groups of 32. Stock mlx-lm's
parts are measured on one row of the batch and multiplied by the rows, as they take seconds. Times are those
of the clock and of all threads together: on a machine that does other things the latter says more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.activations import swiglu
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxserve.models.training import train_on_kernels
from mlxserve_kernels import ops
from mlxserve_kernels.decoder import Rope

HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
RANK, SCALE, GROUP = 8, 20.0, 32

Function = Callable[..., mx.array]


@dataclass(frozen=True)
class Part:
    """Of a step: how often, floating-point operations forward, both ways to compute it for some rows of the
    batch, and the number of arguments that have gradients (the first ones)."""

    name: str
    count: int
    flops: float
    ours: Function
    stock: Function
    args: Callable[[int], list[mx.array]]
    num_gradients: int


@dataclass(frozen=True)
class Time:
    """Seconds of one call: by the clock, and of all threads."""

    wall: float
    cpu: float

    def times(self, count: float) -> Time:
        return Time(self.wall * count, self.cpu * count)


def say(progress: dict[str, Any]) -> None:
    sys.stderr.write(json.dumps(progress) + "\n")


def measure(call: Callable[[], Any], repeat: int) -> Time:
    mx.eval(call())
    best = Time(float("inf"), float("inf"))
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        mx.eval(call())
        best = Time(min(best.wall, time.perf_counter() - wall), min(best.cpu, time.process_time() - cpu))
    return best


def both_ways(function: Function, args: Sequence[mx.array], num_gradients: int) -> Callable[[], Any]:
    """The forward, and what belongs to the first arguments."""
    weights = mx.random.normal(function(*args).shape)
    mx.eval(weights)
    others = args[num_gradients:]
    return lambda: mx.vjp(lambda *a: function(*a, *others), list(args[:num_gradients]), [weights])


def projection(name: str, n: int, k: int, count: int, length: int, bits: int | None) -> Part:
    w = mx.random.normal((n, k)) * k**-0.5
    a, b = mx.random.normal((k, RANK)) * k**-0.5, mx.random.normal((RANK, n)) * 0.01
    if bits is None:
        options: dict[str, Any] = {}
        weights: tuple[mx.array, ...] = (w,)
    else:
        options = {"group_size": GROUP, "bits": bits}
        weights = tuple(mx.quantize(w, **options))
    mx.eval(weights, a, b)

    def stock(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        y = x @ w.T if bits is None else mx.quantized_matmul(x, *weights, **options)
        return y + SCALE * ((x @ a) @ b)

    return Part(
        f"{name} {k} to {n}",
        count,
        2.0 * n * k,
        lambda x, a, b: ops.adapted_linear(x, a, b, SCALE, *weights, **options),
        stock,
        lambda rows: [mx.random.normal((rows * length, k)), a, b],
        3,
    )


def parts(layers: int, length: int, bits: int | None) -> Iterator[Part]:
    kv = KV_HEADS * DIM
    yield projection("q, o", HIDDEN, HIDDEN, 2 * layers, length, bits)
    yield projection("k, v", kv, HIDDEN, 2 * layers, length, bits)
    yield projection("gate, up", WIDTH, HIDDEN, 2 * layers, length, bits)
    yield projection("down", HIDDEN, WIDTH, layers, length, bits)
    rope, positions = Rope(mx.exp(-mx.arange(DIM // 2) / 3)), mx.arange(length, dtype=mx.int32)

    def heads(count: int, rows: int) -> mx.array:
        return mx.random.normal((rows, length, count, DIM)).transpose(0, 2, 1, 3)

    yield Part(
        "attention",
        layers,
        2.0 * HEADS * DIM * length,
        lambda q, k, v: ops.causal_attention(q, k, v, scale=0.125),
        lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal"),
        lambda rows: [heads(HEADS, rows), heads(KV_HEADS, rows), heads(KV_HEADS, rows)],
        3,
    )
    yield Part(
        "rope of q and k",
        layers,
        0.0,
        lambda x: ops.rotate_heads(x, positions, rope),
        lambda x: mx.fast.rope(x, DIM, traditional=False, base=10000.0, scale=1.0, offset=0),
        lambda rows: [heads(HEADS + KV_HEADS, rows)],
        1,
    )
    yield Part(
        "norms",
        2 * layers + 1,
        0.0,
        lambda x, w: ops.rms_norm(x, w, 1e-5),
        lambda x, w: mx.fast.rms_norm(x, w, 1e-5),
        lambda rows: [mx.random.normal((rows * length, HIDDEN)), mx.ones((HIDDEN,))],
        1,
    )
    yield Part(
        "silu times up",
        layers,
        0.0,
        ops.silu_mul,
        swiglu,
        lambda rows: [mx.random.normal((rows * length, WIDTH)) for _ in range(2)],
        2,
    )
    yield head(length, bits)


def head(length: int, bits: int | None) -> Part:
    w = mx.random.normal((VOCAB, HIDDEN)) * 0.05
    options = {"group_size": GROUP, "bits": bits} if bits else {}
    weights = tuple(mx.quantize(w, **options)) if bits else (w,)
    mx.eval(weights)

    def stock(hidden: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
        logits = mx.quantized_matmul(hidden, *weights, **options) if bits else hidden @ w.T
        return (nn.losses.cross_entropy(logits, targets) * mask).sum()

    def args(rows: int) -> list[mx.array]:
        targets = mx.random.randint(0, VOCAB, (rows * length,)).astype(mx.int32)
        return [mx.random.normal((rows * length, HIDDEN)), targets, mx.ones((rows * length,))]

    return Part(
        "head and loss",
        1,
        2.0 * HIDDEN * VOCAB,
        lambda *a: ops.cross_entropy_head(*a, *weights, **options),
        stock,
        args,
        1,
    )


def run_parts(options: argparse.Namespace) -> dict[str, Any]:
    rows, lines, totals = options.batch, [], {"ours": Time(0, 0), "stock": Time(0, 0)}
    for part in parts(options.layers, options.length, options.bits):
        args = part.args(rows)
        mx.eval(args)
        forward = measure(lambda: part.ours(*args), options.repeat)  # noqa: B023
        both = measure(both_ways(part.ours, args, part.num_gradients), options.repeat)
        flops = part.flops * rows * options.length
        line = {
            "part": part.name,
            "count": part.count,
            "forward_ms": round(forward.wall * 1e3, 2),
            "both_ms": round(both.wall * 1e3, 2),
            "both_cpu_ms": round(both.cpu * 1e3, 2),
            # A gradient for the rows takes as much again; attention's has 5 products to its 2, a fused head
            # one product more than its forward.
            "gflops": round(_work(part.name) * flops / both.wall / 1e9, 1),
            "gflops_cpu": round(_work(part.name) * flops / both.cpu / 1e9, 1),
        }
        totals["ours"] = _plus(totals["ours"], both.times(part.count))
        if options.only != "ours":
            one = part.args(1)
            mx.eval(one)
            stock = measure(both_ways(part.stock, one, part.num_gradients), 1).times(rows)
            totals["stock"] = _plus(totals["stock"], stock.times(part.count))
            line |= {
                "stock_ms": round(stock.wall * 1e3, 1),
                "ratio": round(stock.wall / both.wall, 1),
                "ratio_cpu": round(stock.cpu / both.cpu, 1),
            }
        say(line)
        lines.append(line)
    tokens = rows * options.length
    report: dict[str, Any] = {
        "tokens": tokens,
        "layers": options.layers,
        "bits": options.bits,
        "parts": lines,
    }
    for side, total in totals.items():
        if total.wall:
            report[side] = {
                "step_s": round(total.wall, 2),
                "step_cpu_s": round(total.cpu, 2),
                "tok_s": round(tokens / total.wall, 1),
            }
    return report


def _work(name: str) -> float:
    """Forward and backward operations, in forwards."""
    return 3.5 if name == "attention" else 2.0


def _plus(a: Time, b: Time) -> Time:
    return Time(a.wall + b.wall, a.cpu + b.cpu)


def build(layers: int, bits: int | None) -> nn.Module:
    """A model with SmolLM2's layers, its adapters, and nothing that was trained."""
    mx.random.seed(1)
    config = llama.ModelArgs(
        model_type="llama",
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        intermediate_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    model = llama.Model(config)
    if bits:
        nn.quantize(model, group_size=GROUP, bits=bits)
    model.freeze()
    linear_to_lora_layers(model, layers, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    mx.eval(model.parameters())
    return model


def run_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Whole steps: the loss of a batch, gradients, AdamW. Each side begins with the same parameters."""
    tokens = mx.random.randint(0, VOCAB, (options.batch, options.length + 1)).astype(mx.int32)
    weights = mx.ones((options.batch, options.length))
    report: dict[str, Any] = {
        "tokens": weights.size,
        "layers": options.layers,
        "bits": options.bits,
        "threads": ops.num_threads(),
    }
    for side in ("ours", "stock") if options.only is None else (options.only,):
        module = build(options.layers, options.bits)
        if side == "ours":
            loss: Function = train_on_kernels(module).loss
        else:

            def loss(tokens: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
                return (nn.losses.cross_entropy(module(tokens), targets) * weights).sum()  # noqa: B023

        optimizer = optimizers.AdamW(learning_rate=1e-5)
        value_and_grad = nn.value_and_grad(module, loss)
        weight_bytes = sum(array.nbytes for _, array in tree_flatten(module.parameters()))

        def step() -> mx.array:
            value, gradients = value_and_grad(tokens[:, :-1], tokens[:, 1:], weights)  # noqa: B023
            optimizer.update(module, gradients)  # noqa: B023
            mx.eval(value, module.trainable_parameters(), optimizer.state)  # noqa: B023
            return value

        mx.clear_cache()
        mx.reset_peak_memory()
        first = step().item() / weights.size
        took = measure(step, options.repeat) if side == "ours" else measure_once(step)
        report[side] = {
            "first_loss": round(first, 5),
            "step_s": round(took.wall, 2),
            "step_cpu_s": round(took.cpu, 2),
            "tok_s": round(weights.size / took.wall, 1),
            "tok_cpu_s": round(weights.size / took.cpu, 1),
            "peak_mb": round(mx.get_peak_memory() / 1e6),
            "weights_mb": round(weight_bytes / 1e6),
        }
        say({side: report[side]})
    if options.only is None:
        ours, stock = report["ours"], report["stock"]
        report["ratio"] = round(ours["tok_s"] / stock["tok_s"], 1)
        report["ratio_cpu"] = round(ours["tok_cpu_s"] / stock["tok_cpu_s"], 1)
        report["memory_ratio"] = round(ours["peak_mb"] / stock["peak_mb"], 2)
    return report


def measure_once(step: Callable[[], mx.array]) -> Time:
    wall, cpu = time.perf_counter(), time.process_time()
    mx.eval(step())
    return Time(time.perf_counter() - wall, time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", action="store_true", help="whole steps instead of their parts")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--batch", type=int, default=4, help="rows of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument(
        "--bits", type=int, choices=(2, 3, 4, 5, 6, 8), help="affine weights; default: float32"
    )
    parser.add_argument("--only", choices=("ours", "stock"), help="one side alone")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = run_steps(options) if options.steps else run_parts(options)
    sys.stdout.write(json.dumps(report, indent=None if options.json else 1) + "\n")


if __name__ == "__main__":
    main()
