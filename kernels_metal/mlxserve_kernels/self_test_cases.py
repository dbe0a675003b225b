"""What ``self_test`` tries with each Metal kernel: calls of ``ops`` that run it.

Sizes are those of Llama 3.1 8B on a device, and tiny on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlxserve_kernels import ops, reference
from mlxserve_kernels.decoder import Projection, Rope
from mlxserve_kernels.dispatch import metal
from mlxserve_kernels.experts import ExpertWeights
from mlxserve_kernels.page_rows import NO_SOURCE, TOKEN_SIZE, KvPages, KvRows
from mlxserve_kernels.quantized_pages import head_bytes, read_pages

Run = Callable[[], Sequence[mx.array]]
"""Builds the same results, lazily, from the same inputs each time."""

_GROUP_SIZE = 64
_TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""A few roundings to the dtype."""


@dataclass(frozen=True, slots=True)
class Case:
    """``tolerance``: the largest difference from ``expected``, which mlx's own ops compute in float32,
    relative to the largest value. ``run`` is also what mlx's own ops are timed with. ``is_of_metal``: a call
    that the extension has not."""

    label: str
    run: Run
    expected: Run
    tolerance: float
    is_timed: bool = True
    is_of_metal: bool = False


def cases_of(name: str, *, is_small: bool) -> Iterator[Case]:
    """The cases of one of KERNELS; made as they are asked for."""
    mx.random.seed(4)
    return _CASES[name](is_small)


def _add_rms_norm_cases(is_small: bool) -> Iterator[Case]:
    size = 64 if is_small else 4096
    for dtype in (mx.float16, mx.bfloat16):
        for rows in (1, 4, 16):
            x, residual = _normal(rows, size, dtype=dtype), _normal(rows, size, dtype=dtype)
            weight = _normal(size, dtype=dtype)
            yield _case(f"{rows} x {size}", dtype, ops.rms_norm, x, weight, 1e-5, residual)


def _quantized_cases(is_small: bool) -> Iterator[Case]:
    outputs, inputs = (24, 128) if is_small else (4096, 4096)
    for dtype, bits in ((mx.float16, 4), (mx.bfloat16, 4), (mx.bfloat16, 8)):
        weight = _quantized(outputs, inputs, bits=bits, dtype=dtype)
        for rows in (1, 4, 16):
            x = _normal(rows, inputs, dtype=dtype)
            label = f"{rows} x {inputs} to {outputs}, {bits} bit"
            yield _case(label, dtype, ops.quantized_matmul, x, *weight, group_size=_GROUP_SIZE, bits=bits)


def _gate_up_cases(is_small: bool) -> Iterator[Case]:
    outputs, inputs = (24, 128) if is_small else (14336, 4096)
    for dtype, bits in ((mx.float16, 4), (mx.bfloat16, 4)):
        gate, up = (
            Projection(*_quantized(outputs, inputs, bits=bits, dtype=dtype), _GROUP_SIZE, bits)
            for _ in range(2)
        )
        for rows in (1, 4, 16):
            x = _normal(rows, inputs, dtype=dtype)
            label = f"{rows} x {inputs} to twice {outputs}, {bits} bit"
            yield _case(label, dtype, ops.gate_up, x, gate, up, activation="silu")


def _many_rows_cases(is_small: bool) -> Iterator[Case]:
    """A chunk of a prompt; what is no whole number of tiles need only be right."""
    outputs, inputs = (24, 128) if is_small else (4096, 4096)
    dtype = mx.bfloat16
    gate, up = (
        Projection(*_quantized(outputs, inputs, bits=4, dtype=dtype), _GROUP_SIZE, 4) for _ in range(2)
    )
    for rows in (19, 32 if is_small else 512):
        x = _normal(rows, inputs, dtype=dtype)
        label = f"{rows} x {inputs} to {outputs}"
        for case in (
            _case(label, dtype, ops.project, x, gate),
            _case(f"{label}, twice", dtype, ops.gate_up, x, gate, up, activation="silu"),
        ):
            yield replace(case, is_timed=rows != 19)


def _expert_cases(is_small: bool, call: Callable[..., Any], num_matrices: int) -> Iterator[Case]:
    """Sizes of Qwen 3 30B-A3B on a device."""
    count, top_k, size, inner = (4, 2, 64, 32) if is_small else (128, 8, 2048, 768)
    shapes = ((inner, size), (inner, size), (size, inner))[:num_matrices]
    for dtype in (mx.float16, mx.bfloat16):
        matrices = [
            ExpertWeights(*_quantized(count, *shape, bits=4, dtype=dtype, group_size=32), 32, 4)
            for shape in shapes
        ]
        for rows in (1, 4, 16):
            x = _normal(rows, size, dtype=dtype)
            ids = mx.argsort(mx.random.uniform(shape=(rows, count)), axis=-1)[:, :top_k].astype(mx.int32)
            mx.eval(ids)
            yield _case(f"{rows} x {size}, {top_k} of {count}", dtype, call, x, ids, *matrices)


def _lora_cases(is_small: bool) -> Iterator[Case]:
    size, rank, outputs, count = (64, 8, 32, 3) if is_small else (4096, 16, 4096, 4)
    for dtype in (mx.float16, mx.bfloat16):
        a, b = _normal(count, size, rank, dtype=dtype), _normal(count, rank, outputs, dtype=dtype)
        for rows in (1, 4, 16):
            x = _normal(rows, size, dtype=dtype)
            slots = mx.arange(rows, dtype=mx.int32) % (count + 1) - (rows > 1)
            scales = mx.random.uniform(shape=(count,))
            mx.eval(slots, scales)
            label = f"{rows} x {size} to {outputs} by rank {rank}"
            yield _case(label, dtype, ops.lora_delta, x, a, b, slots, scales)


def _quantized(
    *shape: int, bits: int, dtype: mx.Dtype, group_size: int = 64
) -> tuple[mx.array, mx.array, mx.array]:
    """Random integers with small scales: quantizing floats would take longer."""
    words = mx.random.randint(0, 1 << 31, (*shape[:-1], shape[-1] * bits // 32)).astype(mx.uint32)
    scales = (0.01 * mx.random.uniform(shape=(*shape[:-1], shape[-1] // group_size))).astype(dtype)
    biases = (-0.5 * (1 << bits) * scales).astype(dtype)
    mx.eval(words, scales, biases)
    return words, scales, biases


@dataclass(frozen=True, slots=True)
class _PageShape:
    q_heads: int
    heads: int
    dim: int
    page_size: int
    num_pages: int

    @classmethod
    def of(cls, is_small: bool) -> _PageShape:
        return cls(4, 2, 32, 16, 4) if is_small else cls(32, 8, 128, 32, 64)

    def rows(self, count: int, dtype: mx.Dtype, *, has_rope: bool) -> KvRows:
        k, v = (_normal(count, self.heads, self.dim, dtype=dtype) for _ in range(2))
        if not has_rope:
            return KvRows(k, v)
        rope = Rope(10000.0 ** (-mx.arange(0, self.dim, 2) / self.dim))
        positions = mx.arange(100, 100 + count).astype(mx.int32)
        return KvRows(k, v, _normal(count, self.q_heads, self.dim, dtype=dtype), positions, rope)

    def pages(self, count: int, dtype: mx.Dtype, kv_bits: int | None = None) -> KvPages:
        """Full of random values; quantized ones, as the reference writes them."""
        keys, values = (self.dim, self.page_size), (self.page_size, self.dim)
        if kv_bits is None:
            return KvPages(*(_normal(count, self.heads, *part, dtype=dtype) for part in (keys, values)))
        size = head_bytes(self.dim, self.page_size, kv_bits)
        pools = [mx.zeros((count, self.heads, size), dtype=mx.uint8) for _ in range(2)]
        rows = [_normal(count * self.page_size, self.heads, self.dim, dtype=mx.float32) for _ in range(2)]
        slots = mx.arange(count * self.page_size).astype(mx.int32)
        written = reference.write_pages(pools[0], pools[1], rows[0], rows[1], slots, kv_bits=kv_bits)
        mx.eval(written)
        return KvPages(*written)


def _rope_cases(is_small: bool) -> Iterator[Case]:
    shape = _PageShape.of(is_small)
    for dtype in (mx.float16, mx.bfloat16):
        for count in (1, 64):
            rows = shape.rows(count, dtype, has_rope=True)
            yield _case(f"{count} rows", dtype, ops.rotate, rows.k, rows.positions, rows.rope)


def _tail_cases(is_small: bool, *, has_rope: bool) -> Iterator[Case]:
    shape = _PageShape.of(is_small)
    size = shape.page_size
    for dtype in (mx.float16, mx.bfloat16):
        pools, old = shape.pages(shape.num_pages, dtype), shape.pages(2, dtype)
        rows = shape.rows(size + 4, dtype, has_rope=has_rope)
        pieces = [(-1, 3, 1, 0), (2, 9, 2, 1), (NO_SOURCE, 0, size, 3), (-2, size - 1, 1, size + 3)]
        yield _case(
            f"{len(pieces)} tails", dtype, _new_tails, rows, pools, old,
            mx.array([(*piece, 0, 0, 0, 0) for piece in pieces], dtype=mx.int32),
        )  # fmt: skip
    for kv_bits in (8, 4):
        pools, old = (shape.pages(count, mx.float32, kv_bits) for count in (shape.num_pages, 2))
        rows = shape.rows(2, mx.bfloat16, has_rope=has_rope)
        pieces_array = mx.array([(-1, 3, 1, 0, 0, 0, 0, 0), (2, 9, 1, 1, 0, 0, 0, 0)], dtype=mx.int32)
        call = partial(_new_values, shape.dim, kv_bits)
        label = f"2 tails, {kv_bits} bits"
        # A rotation that rounds otherwise may give the integer beside.
        tolerance = 2 / (15 if kv_bits == 4 else 127)
        yield replace(_case(label, mx.bfloat16, call, rows, pools, old, pieces_array), tolerance=tolerance)


def _new_tails(rows: KvRows, pools: KvPages, old: KvPages, pieces: mx.array) -> tuple[mx.array, ...]:
    q, tails = ops.write_tails(rows, pools, old, pieces)
    return tails.keys, tails.values, *(() if q is None else (q,))


def _new_values(
    dim: int, kv_bits: int, rows: KvRows, pools: KvPages, old: KvPages, pieces: mx.array
) -> tuple[mx.array, ...]:
    """What quantized tails hold: the bytes themselves may differ where a rotation rounds otherwise."""
    q, tails = ops.write_tails(rows, pools, old, pieces, kv_bits=kv_bits)
    keys = read_pages(tails.keys, dim, kv_bits, is_keys=True)
    values = read_pages(tails.values, dim, kv_bits, is_keys=False)
    return keys, values, *(() if q is None else (q,))


def _through_cases(is_small: bool, *, has_rope: bool) -> Iterator[Case]:
    shape = _PageShape.of(is_small)
    for dtype in (mx.float16, mx.bfloat16):
        pools = shape.pages(shape.num_pages, dtype)
        for count in (1, shape.page_size):
            # Of three writes to the same slots, each behind the one before, the last must win.
            writes = [shape.rows(count, dtype, has_rope=has_rope) for _ in range(3)]
            slots = mx.arange(shape.page_size, shape.page_size + count).astype(mx.int32)
            yield _case(f"{count} rows", dtype, _written_through, pools, slots, *writes)


def _written_through(pools: KvPages, slots: mx.array, *writes: KvRows) -> tuple[mx.array, ...]:
    keys, values, order = pools.keys + 0, pools.values + 0, mx.zeros((TOKEN_SIZE,), dtype=mx.int32)
    q: mx.array | None = None
    if metal("write_pages") is None and metal("rope_and_write_pages") is None:
        for rows in writes:
            if rows.q is None or rows.positions is None:
                keys, values = ops.write_pages(keys, values, rows.k, rows.v, slots)
            else:
                q, keys, values = ops.rope_and_write_pages(
                    rows.q, rows.k, rows.v, keys, values, rows.positions, slots, rope=rows.rope
                )
    else:
        for rows in writes:
            q, order = ops.write_through(rows, KvPages(keys, values), slots, order)
        mx.eval(order)
    return keys, values, *(() if q is None else (q,))


def _attention_cases(is_small: bool) -> Iterator[Case]:
    """Decode of several sequences, one with tails, a chunk, and the ways of a head."""
    shape = _PageShape.of(is_small)
    context = 3 * shape.page_size - 5 if is_small else 60 * shape.page_size
    pages = -(-context // shape.page_size)
    for dtype in (mx.float16, mx.bfloat16):
        pools, tails = shape.pages(shape.num_pages, dtype), shape.pages(2, dtype)
        ways: tuple[tuple[str, list[int], dict[str, Any]], ...] = (
            ("decode", [1, 1], {}),
            ("decode beside tails", [1, 1], {"tails": tails}),
            ("chunk", [2 * shape.page_size], {}),
            ("window, soft cap, sinks", [1], {"window": shape.page_size + 3, "softcap": 20.0}),
        )
        for label, lengths, options in ways:
            table = mx.arange(pages).astype(mx.int32)[None] + mx.zeros((len(lengths), 1), dtype=mx.int32)
            if "tails" in options:
                table[:, -1] = mx.array([-1, -2], dtype=mx.int32)
            if "softcap" in options:
                options["sinks"] = _normal(shape.q_heads, dtype=dtype)
            starts = mx.array([0, *accumulate(lengths)], dtype=mx.int32)
            kv_lens = mx.array([context - 3 * index for index in range(len(lengths))], dtype=mx.int32)
            q = _normal(sum(lengths), shape.q_heads, shape.dim, dtype=dtype)
            mx.eval(table, starts, kv_lens)
            inputs = (q, pools.keys, pools.values, table, starts, kv_lens)
            scale = shape.dim**-0.5
            case = _case(label, dtype, ops.paged_attention, *inputs, scale=scale, **options)
            yield replace(case, is_of_metal="tails" in options)
    table, starts, kv_lens = (
        mx.array(values, dtype=mx.int32) for values in ([list(range(pages))], [0, 1], [context])
    )
    for kv_bits in (8, 4):
        pools = shape.pages(shape.num_pages, mx.float32, kv_bits)
        q = _normal(1, shape.q_heads, shape.dim, dtype=mx.bfloat16)
        options = {"scale": shape.dim**-0.5, "kv_bits": kv_bits}
        inputs = (q, pools.keys, pools.values, table, starts, kv_lens)
        yield _case(f"decode, {kv_bits} bits", mx.bfloat16, ops.paged_attention, *inputs, **options)


def _copy_cases(is_small: bool) -> Iterator[Case]:
    shape = _PageShape.of(is_small)
    for dtype in (mx.float16, mx.bfloat16):
        yield _case("3 copies in a row", dtype, _copied_through, shape.pages(shape.num_pages, dtype))


def _copied_through(pools: KvPages) -> tuple[mx.array, ...]:
    keys, values, order = pools.keys + 0, pools.values + 0, mx.zeros((TOKEN_SIZE,), dtype=mx.int32)
    for page in range(3):
        source, target = (mx.array([index], dtype=mx.int32) for index in (page, page + 1))
        if metal("copy_pages") is None:
            keys, values = ops.copy_pages(keys, values, source, target)
        else:
            order = ops.copy_through(KvPages(keys, values), source, target, order)
    mx.eval(order)
    return keys, values


def _case(label: str, dtype: mx.Dtype, call: Callable[..., Any], *inputs: Any, **options: Any) -> Case:
    def run() -> Sequence[mx.array]:
        return _results(call(*inputs, **options))

    def expected() -> Sequence[mx.array]:
        wide = {name: _wide(value) for name, value in options.items()}
        return _results(call(*map(_wide, inputs), **wide))

    return Case(f"{label} {_name(dtype)}", run, expected, _TOLERANCE[dtype])


def _results(result: Any) -> Sequence[mx.array]:
    return result if isinstance(result, tuple) else (result,)


def _wide(value: Any) -> Any:
    """In float32: arrays, and the arrays of weights, rows and pages."""
    if isinstance(value, Projection | ExpertWeights | KvRows | KvPages):
        return replace(value, **{f.name: _wide(getattr(value, f.name)) for f in fields(value)})
    is_float = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
    return value.astype(mx.float32) if is_float else value


def _normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    array = mx.random.normal(shape).astype(dtype)
    mx.eval(array)
    return array


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


_CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "add_rms_norm": _add_rms_norm_cases,
    "quantized_matmul": _quantized_cases,
    "gate_up": _gate_up_cases,
    "many_rows": _many_rows_cases,
    "gather_matmul": lambda is_small: _expert_cases(is_small, ops.gather_matmul, 1),
    "lora_delta": _lora_cases,
    "gated_experts": lambda is_small: _expert_cases(is_small, ops.gated_experts, 3),
    "paged_attention": _attention_cases,
    "rope": _rope_cases,
    "write_tails": partial(_tail_cases, has_rope=False),
    "rope_and_write_tails": partial(_tail_cases, has_rope=True),
    "write_pages": partial(_through_cases, has_rope=False),
    "rope_and_write_pages": partial(_through_cases, has_rope=True),
    "copy_pages": _copy_cases,
}

KERNELS = tuple(_CASES)
"""Names as ``dispatch.metal`` has them."""

CPU_KERNELS = (
    *("add_rms_norm", "quantized_matmul", "gate_up", "many_rows", "gather_matmul", "gated_experts"),
    *("lora_delta", "paged_attention", "write_pages", "copy_pages"),
)
"""Those whose calls run kernels of the extension."""
