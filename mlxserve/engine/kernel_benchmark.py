"""Times each kernel beside its reference, at a model's sizes, on weights that come from memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlxserve.config import DEFAULT_PAGE_SIZE
from mlxserve_kernels import ops, reference

_WEIGHT_BYTES = 128 << 20
"""A matrix is held so often that its copies exceed the caches, as the matrices of a model do."""
_MAX_COPIES = 64
_TARGET_S = 0.05
"""Calls are repeated to about this time, so that neither the clock nor one wake-up counts."""
_GROUP_SIZE = 32
_ROWS = (1, 4, 16, 128, 512)

Call = Callable[[int], mx.array]
"""Call number i, lazily: on copy i of the inputs that would otherwise stay in a cache."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the shapes of a model's matrices follow from."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODEL_SIZES = {
    "smollm2": ModelSizes(576, 1536, 9, 3, 64, 49152),
    "llama-1b": ModelSizes(2048, 8192, 32, 8, 64, 128256),
    "qwen3-moe": ModelSizes(1024, 512, 16, 4, 64, 32768),
}


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel at one shape: what it must read and compute, and both implementations."""

    name: str
    shape: str
    num_bytes: int
    num_flops: int
    ours: Call
    reference: Call


@dataclass(frozen=True, slots=True)
class KernelRun:
    """Medians. ``reference_us`` is None where one call of it takes too long."""

    name: str
    shape: str
    us: float
    gbps: float
    gflops: float
    reference_us: float | None

    def as_dict(self) -> dict[str, Any]:
        slow = self.reference_us
        return {
            "kernel": self.name,
            "shape": self.shape,
            "us": round(self.us, 2),
            "gbps": round(self.gbps, 2),
            "gflops": round(self.gflops, 2),
            "reference_us": None if slow is None else round(slow, 2),
            "ratio": None if slow is None else round(slow / self.us, 2),
        }


def measure_kernel(case: KernelCase, *, repeat: int, reference_limit_s: float) -> KernelRun:
    """Both sides in turn, ``repeat`` times."""
    count = _calibrate(case.ours)
    reference_s = _time(case.reference, 1)
    is_slow = reference_s > reference_limit_s
    reference_count = max(1, min(count, int(_TARGET_S / reference_s)))
    times, slow_times = [], []
    for _ in range(repeat):
        times.append(_time(case.ours, count) / count)
        if not is_slow:
            slow_times.append(_time(case.reference, reference_count) / reference_count)
    seconds = statistics.median(times)
    return KernelRun(
        name=case.name,
        shape=case.shape,
        us=seconds * 1e6,
        gbps=case.num_bytes / seconds / 1e9,
        gflops=case.num_flops / seconds / 1e9,
        reference_us=None if is_slow else statistics.median(slow_times) * 1e6,
    )


def _calibrate(call: Call) -> int:
    """How many calls take the target time; the first, discarded, pays for what is made once."""
    _time(call, 1)
    return max(1, min(1000, int(_TARGET_S / max(_time(call, 1), 1e-6))))


def _time(call: Call, count: int) -> float:
    started = time.perf_counter()
    mx.eval([call(index) for index in range(count)])
    return time.perf_counter() - started


def kernel_cases(sizes: ModelSizes) -> Iterator[tuple[str, Callable[[], Iterator[KernelCase]]]]:
    """Each kernel's name, and its cases: made when they are asked for, as they hold much memory."""
    yield "quantized_matmul", lambda: _quantized_cases(sizes)
    yield "linear", lambda: _linear_cases(sizes)
    yield "paged_attention", lambda: _attention_cases(sizes)
    yield "rms_norm", lambda: _norm_cases(sizes)
    yield "silu_mul", lambda: _silu_cases(sizes)
    yield "write_pages", lambda: _write_cases(sizes)
    yield "greedy_tokens", lambda: _greedy_cases(sizes)


def _quantized_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    for bits in (4, 8):
        for outputs, inputs in ((sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn)):
            num_bytes = outputs * inputs * bits // 8 + 4 * (outputs * inputs // _GROUP_SIZE)
            copies = _num_copies(num_bytes)
            weights = [_quantized(outputs, inputs, bits) for _ in range(copies)]
            for rows in _ROWS:
                x = _normal(rows, inputs)
                named: dict[str, Any] = {"group_size": _GROUP_SIZE, "bits": bits}

                yield KernelCase(
                    "quantized_matmul",
                    f"{rows} x {inputs} -> {outputs}, {bits} bit",
                    num_bytes + 4 * rows * (inputs + outputs),
                    2 * rows * inputs * outputs,
                    _rotating(partial(ops.quantized_matmul, **named), x, weights),
                    _rotating(partial(_plain_quantized, **named), x, weights),
                )


def _plain_quantized(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, **named: Any) -> mx.array:
    """mlx's own kernel wants scales of the activations' dtype, as its models hold them."""
    return reference.quantized_matmul(x, w, scales.astype(x.dtype), biases.astype(x.dtype), **named)


def _rotating(call: Callable[..., mx.array], x: mx.array, weights: Sequence[tuple[mx.array, ...]]) -> Call:
    return lambda index: call(x, *weights[index % len(weights)])


def _fixed(call: Callable[..., mx.array], *inputs: Any) -> Call:
    return lambda _: call(*inputs)


def _quantized(outputs: int, inputs: int, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """Random bits with small scales: quantizing floats would take longer than all measurements."""
    words = mx.random.randint(0, 1 << 31, (outputs, inputs * bits // 32)).astype(mx.uint32)
    scales = (0.001 * mx.random.uniform(shape=(outputs, inputs // _GROUP_SIZE))).astype(mx.float16)
    biases = (-0.5 * (1 << bits) * scales).astype(mx.float16)
    mx.eval(words, scales, biases)
    return words, scales, biases


def _linear_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    outputs, inputs = sizes.ffn, sizes.hidden
    num_bytes = 2 * outputs * inputs
    weights = [(_normal(outputs, inputs, dtype=mx.float16),) for _ in range(_num_copies(num_bytes))]
    for rows in _ROWS:
        x = _normal(rows, inputs)
        yield KernelCase(
            "linear",
            f"{rows} x {inputs} -> {outputs}, float16 weights",
            num_bytes + 4 * rows * (inputs + outputs),
            2 * rows * inputs * outputs,
            _rotating(ops.linear, x, weights),
            _rotating(reference.linear, x, weights),
        )


def _attention_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    for streams, context, rows in ((1, 128, 1), (1, 1024, 1), (1, 8192, 1), (16, 512, 1), (1, 512, 512)):
        pages = context // DEFAULT_PAGE_SIZE
        keys = _normal(streams * pages, sizes.kv_heads, sizes.head_dim, DEFAULT_PAGE_SIZE)
        values = _normal(streams * pages, sizes.kv_heads, DEFAULT_PAGE_SIZE, sizes.head_dim)
        q = _normal(streams * rows, sizes.heads, sizes.head_dim)
        index = (
            mx.arange(streams * pages, dtype=mx.int32).reshape(streams, pages),
            mx.arange(streams + 1, dtype=mx.int32) * rows,
            mx.full((streams,), context, dtype=mx.int32),
        )
        seen = streams * (context if rows == 1 else rows * (rows + 1) // 2)
        kind = "decode" if rows == 1 else "prefill"
        inputs, scale = (q, keys, values, *index), sizes.head_dim**-0.5
        yield KernelCase(
            "paged_attention",
            f"{kind}, {streams} x {context} tokens",
            keys.nbytes + values.nbytes + 2 * q.nbytes,
            4 * sizes.heads * sizes.head_dim * seen,
            _fixed(partial(ops.paged_attention, scale=scale), *inputs),
            _fixed(partial(reference.paged_attention, scale=scale), *inputs),
        )


def _norm_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    weight = _normal(sizes.hidden)
    for rows in (1, 16, 512):
        x = _normal(rows, sizes.hidden)
        yield KernelCase(
            "rms_norm",
            f"{rows} x {sizes.hidden}",
            2 * x.nbytes + weight.nbytes,
            4 * int(x.size),
            _fixed(ops.rms_norm, x, weight, 1e-5),
            _fixed(reference.rms_norm, x, weight, 1e-5),
        )


def _silu_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    for rows in (1, 16, 512):
        x = _normal(rows, sizes.ffn)
        yield KernelCase(
            "silu_mul",
            f"{rows} x {sizes.ffn}",
            3 * x.nbytes,
            4 * int(x.size),
            _fixed(ops.silu_mul, x, x),
            _fixed(reference.silu_mul, x, x),
        )


def _write_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    for rows in (1, 16, 512):
        row, slots = _normal(rows, sizes.kv_heads, sizes.head_dim), mx.arange(rows, dtype=mx.int32)
        yield KernelCase(
            "write_pages",
            f"{rows} tokens",
            4 * row.nbytes,
            0,
            _writer(ops.write_pages, row, slots),
            _writer(reference.write_pages, row, slots),
        )


def _writer(write: Callable[..., tuple[mx.array, mx.array]], row: mx.array, slots: mx.array) -> Call:
    """Writes again and again to pools of its own, of which it holds the newest handles alone."""
    _, heads, dim = row.shape
    pools = [_normal(64, heads, dim, DEFAULT_PAGE_SIZE), _normal(64, heads, DEFAULT_PAGE_SIZE, dim)]

    def call(_: int) -> mx.array:
        pools[:] = write(pools[0], pools[1], row, row, slots)
        return pools[0]

    return call


def _greedy_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    for rows in (1, 16):
        logits = _normal(rows, sizes.vocab)
        yield KernelCase(
            "greedy_tokens",
            f"{rows} x {sizes.vocab}",
            logits.nbytes,
            int(logits.size),
            _fixed(ops.greedy_tokens, logits),
            _fixed(reference.greedy_tokens, logits),
        )


def _num_copies(num_bytes: int) -> int:
    return max(1, min(_MAX_COPIES, -(-_WEIGHT_BYTES // num_bytes)))


def _normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    array = mx.random.normal(shape).astype(dtype)
    mx.eval(array)
    return array
