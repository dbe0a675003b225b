"""MLX's own kernels, unmodified from the headers of its wheel, equal MLX's CPU results: a shim that runs
Apple's code is one to believe. A planted fault in a copy of each kind is caught."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_on_host import Argument, Library, MetalFault, Report, Settings, compile_library, mlx_include
from metal_on_host.arrays import from_bytes, to_bytes

HEADERS = (
    "utils.h",
    "sdpa_vector.h",
    "steel/gemm/gemm.h",
    "quantized_utils.h",
    "quantized.h",
    "softmax.h",
)
INSTANCES = """
instantiate_kernel("sdpa_float_64", sdpa_vector, float, 64, 64)
instantiate_kernel("sdpa_half_128", sdpa_vector, half, 128, 128)
instantiate_kernel("sdpa_bfloat_96", sdpa_vector, bfloat, 96, 96)
instantiate_kernel("softmax_float", softmax_single_row, float, float)
instantiate_kernel("softmax_bfloat", softmax_single_row, bfloat, float)
instantiate_kernel("softmax_looped_half", softmax_looped, half, float)
instantiate_kernel("qmv_float_4", affine_qmv_fast, float, 64, 4, false)
instantiate_kernel("qmv_half_8", affine_qmv_fast, half, 32, 8, false)
instantiate_kernel("qmv_bfloat_3", affine_qmv_fast, bfloat, 64, 3, false)
instantiate_kernel("qmm_float_4", affine_qmm_t, float, 64, 4, false, false)
instantiate_kernel("qmm_half_8", affine_qmm_t, half, 32, 8, false, false)
instantiate_kernel("qmm_bfloat_6", affine_qmm_t, bfloat, 128, 6, false, false)
"""
DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Relative to the largest result: a few units in the last place of the output's dtype."""
NO_BATCH = (np.int32(0), np.zeros(1, np.int32), np.zeros(1, np.int64))


def include(*headers: str) -> str:
    return "".join(f'#include "mlx/backend/metal/kernels/{header}"\n' for header in headers)


@pytest.fixture(scope="module")
def library(cache_dir: Path) -> Library:
    return compile_library(include(*HEADERS) + INSTANCES, include_dirs=(mlx_include(),), cache_dir=cache_dir)


def bind(name: str, value: Any) -> Argument | None:
    if value is None or isinstance(value, Argument):
        return value
    if isinstance(value, mx.array):
        return Argument(name, to_bytes(value, make_contiguous=True)[0], value.itemsize)
    numbers = np.atleast_1d(np.asarray(value))
    return Argument(name, numbers.view(np.uint8), numbers.itemsize, is_counted=False)


def launch(
    library: Library,
    name: str,
    values: Sequence[Any],
    output: tuple[tuple[int, ...], mx.Dtype],
    groups: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> tuple[mx.array, Report]:
    """Runs with `values` bound in order; `...` stands for the output."""
    shape, dtype = output
    data = np.empty(int(np.prod(shape)) * dtype.size, np.uint8)
    out = Argument("out", data, dtype.size, is_written=True, is_initialised=False)
    names = [p.name for p in library.entry(name).kernel.buffers]
    arguments = [bind(n, out if v is ... else v) for n, v in zip(names, values, strict=True)]
    grid = (groups[0] * threadgroup[0], groups[1] * threadgroup[1], groups[2] * threadgroup[2])
    report = library.launch(name, arguments, grid, threadgroup, Settings(seeds=(0, 1, 2)))
    return from_bytes(out.data, shape, dtype), report


def assert_close(actual: mx.array, expected: mx.array) -> None:
    error = mx.abs(actual.astype(mx.float32) - expected).max().item()
    assert error <= TOLERANCE[actual.dtype] * mx.abs(expected).max().item()


@pytest.mark.parametrize(
    ("name", "size"), [("sdpa_float_64", 64), ("sdpa_half_128", 128), ("sdpa_bfloat_96", 96)]
)
@pytest.mark.parametrize("keys", [1, 31, 77])
def test_sdpa_vector(library: Library, name: str, size: int, keys: int) -> None:
    dtype, kv_heads, group = DTYPES[name.split("_")[1]], 2, 3
    q = mx.random.normal((1, kv_heads * group, 1, size)).astype(dtype)
    k = mx.random.normal((1, kv_heads, keys, size)).astype(dtype)
    v = mx.random.normal((1, kv_heads, keys, size)).astype(dtype)
    strides = (np.uint64(keys * size), np.uint64(size)) * 2
    values = [q, k, v, ..., np.int32(group), np.int32(keys), *strides, np.float32(size**-0.5), *[None] * 7]
    out, _ = launch(library, name, values, (q.shape, dtype), (kv_heads * group, 1, 1), (1024, 1, 1))
    full = [x.astype(mx.float32) for x in (q, k, v)]
    assert_close(out, mx.fast.scaled_dot_product_attention(*full, scale=size**-0.5))


@pytest.mark.parametrize(
    ("name", "width", "threads"),
    [("softmax_float", 500, 128), ("softmax_bfloat", 1024, 256), ("softmax_looped_half", 5001, 1024)],
)
def test_softmax(library: Library, name: str, width: int, threads: int) -> None:
    dtype = DTYPES[name.split("_")[-1]]
    x = mx.random.normal((3, width)).astype(dtype)
    out, report = launch(
        library, name, [x, ..., np.int32(width)], (x.shape, dtype), (3, 1, 1), (threads, 1, 1)
    )
    assert_close(out, mx.softmax(x.astype(mx.float32), axis=-1))
    assert report.buffer("out").unique_written == x.nbytes


QUANTIZED = [("float_4", 64, 4), ("half_8", 32, 8), ("bfloat_3", 64, 3), ("bfloat_6", 128, 6)]


def quantized(
    n: int, k: int, group_size: int, bits: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    w, scales, biases = mx.quantize(mx.random.normal((n, k)), group_size, bits)
    return w, scales.astype(dtype), biases.astype(dtype)


def product(x: mx.array, w: mx.array, s: mx.array, b: mx.array, group_size: int, bits: int) -> mx.array:
    full = [a.astype(mx.float32) for a in (s, b)]
    return mx.quantized_matmul(
        x.astype(mx.float32), w, *full, transpose=True, group_size=group_size, bits=bits
    )


@pytest.mark.parametrize(("name", "group_size", "bits"), QUANTIZED[:3])
def test_qmv(library: Library, name: str, group_size: int, bits: int) -> None:
    dtype, k, n = DTYPES[name.split("_")[0]], 1024, 64
    w, s, b = quantized(n, k, group_size, bits, dtype)
    x = mx.random.normal((2, k)).astype(dtype)
    values = [w, s, b, x, ..., np.int32(k), np.int32(n), *NO_BATCH, *NO_BATCH, *[NO_BATCH[2]] * 2]
    out, report = launch(library, f"qmv_{name}", values, ((2, n), dtype), (2, n // 8, 1), (32, 2, 1))
    assert_close(out, product(x, w, s, b, group_size, bits))
    assert report.buffer("w").simd_read == 2 * w.nbytes


@pytest.mark.parametrize(("name", "group_size", "bits"), [QUANTIZED[0], QUANTIZED[1], QUANTIZED[3]])
@pytest.mark.parametrize(("rows", "n"), [(40, 64), (7, 50)])
def test_qmm(library: Library, name: str, group_size: int, bits: int, rows: int, n: int) -> None:
    dtype, k = DTYPES[name.split("_")[0]], 256
    w, s, b = quantized(n, k, group_size, bits, dtype)
    x = mx.random.normal((rows, k)).astype(dtype)
    values = [
        w,
        s,
        b,
        x,
        ...,
        np.int32(k),
        np.int32(n),
        np.int32(rows),
        *NO_BATCH,
        *NO_BATCH,
        *[NO_BATCH[2]] * 2,
    ]
    groups = (-(-n // 32), -(-rows // 32), 1)
    out, _ = launch(library, f"qmm_{name}", values, ((rows, n), dtype), groups, (32, 2, 2))
    assert_close(out, product(x, w, s, b, group_size, bits))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.float16, 4e-3), (mx.bfloat16, 3e-2)]
)
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (40, 75)])
@pytest.mark.parametrize("causal", [False, True])
def test_steel_attention(
    cache_dir: Path, dtype: mx.Dtype, tolerance: float, queries: int, keys: int, causal: bool
) -> None:
    """The tiled kernel for chunks: simdgroup matrices, reductions by shuffles, masks, ragged ends."""
    heads, group, size, bq, bk = 1, 2, 64, 32, 16
    name = next(n for n, d in DTYPES.items() if d == dtype)
    library = compile_library(
        include("utils.h", "steel/attn/attn.h", "steel/attn/kernels/steel_attention.h")
        + f'instantiate_kernel("k", attention, {name}, {bq}, {bk}, {size}, {size}, 4, 1, {name})\n',
        include_dirs=(mlx_include(),),
        function_constants={
            "align_Q": queries % bq == 0,
            "align_K": keys % bk == 0,
            "do_causal": causal,
        },
        cache_dir=cache_dir,
    )
    q = mx.random.normal((1, heads * group, queries, size)).astype(dtype)
    k, v = (mx.random.normal((1, heads, keys, size)).astype(dtype) for _ in range(2))
    rows, columns = -(-queries // bq), -(-keys // bk)
    numbers = [1, heads * group, size, queries, keys, group, rows, columns, queries // bq, keys // bk]
    numbers += [queries % bq, keys % bk, keys - queries]
    fields = np.array(numbers, np.int32).tobytes()
    scale = np.float32(size**-0.5).tobytes()
    strides = [heads * group * queries * size, queries * size, size]
    strides += [heads * keys * size, keys * size, size] * 2 + strides
    packed = fields[:24] + scale + fields[24:] + np.array(strides, np.int64).tobytes()
    params = np.frombuffer(packed, np.uint8)
    values = [q, k, v, ..., params, *[None] * 4]
    out, _ = launch(library, "k", values, (q.shape, dtype), (rows, heads * group, 1), (32, 4, 1))
    full = [x.astype(mx.float32) for x in (q, k, v)]
    mask = "causal" if causal else None
    expected = mx.fast.scaled_dot_product_attention(*full, scale=size**-0.5, mask=mask)
    assert mx.abs(out.astype(mx.float32) - expected).max().item() <= tolerance


def planted(cache_dir: Path, header: str, old: str, new: str, instance: str, count: int = 1) -> Library:
    """A copy of one of MLX's headers with one thing changed, the `count`th place where `old` stands."""
    text = (mlx_include() / "mlx/backend/metal/kernels" / header).read_text()
    parts = text.split(old)
    assert len(parts) > count
    text = old.join(parts[:count]) + new + old.join(parts[count:])
    before = HEADERS[: HEADERS.index(header)]
    return compile_library(
        include(*before) + text + instance, include_dirs=(mlx_include(),), cache_dir=cache_dir
    )


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SOFTMAX = 'instantiate_kernel("k", softmax_single_row, float, float)\n'


@pytest.mark.parametrize(
    ("old", "new", "count", "kind"),
    [
        (BARRIER, "", 1, "race"),
        (BARRIER, "", 2, "race"),
        (BARRIER, "", 4, "race"),
        (
            "normalizer = 1 / local_normalizer[0];",
            f"if (lid < 64) {BARRIER} normalizer = 1;",
            1,
            "divergent barrier",
        ),
        ("local_max[simd_lane_id] = Limits<AccT>::min;", "", 1, "uninitialised read"),
        ("lid * N_READS + N_READS <= axis_size", "true", 1, "out of bounds"),
        ("local_max[simd_group_id] = maxval;", "local_max[simd_group_id + 29] = maxval;", 1, "out of bounds"),
        ("simd_max(maxval)", "simd_shuffle(maxval, 32)", 1, "wrong lane"),
        (
            "ld[i] = AccT(in[i]);",
            "ld[i] = ((const device float2*)(in + 1))[i / 2].x;",
            1,
            "misaligned access",
        ),
    ],
)
def test_fault_planted_in_softmax(cache_dir: Path, old: str, new: str, count: int, kind: str) -> None:
    library = planted(cache_dir, "softmax.h", old, new, SOFTMAX, count)
    with pytest.raises(MetalFault) as caught:
        launch(
            library,
            "k",
            [mx.zeros((2, 510)), ..., np.int32(510)],
            ((2, 510), mx.float32),
            (2, 1, 1),
            (128, 1, 1),
        )
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (f"  {BARRIER}\n  max_score = max_scores[simd_lid];", "  max_score = max_scores[simd_lid];", None),
        ("outputs[simd_gid * BD + simd_lid]", "outputs[simd_gid * BD + simd_lid + 1]", "out of bounds"),
        ("i < N; i += BN", "i <= N; i += BN", "out of bounds"),
        (
            "k[j] = keys[j];",
            "k[j] = ((const device vec<T, 2>*)(keys + 1))[j / 2][j % 2];",
            "misaligned access",
        ),
        ("score = simd_sum(score);", "score = simd_broadcast(score, 32);", "wrong lane"),
        ("score = simd_sum(score);", f"score = simd_sum(score); {BARRIER}", "divergent barrier"),
    ],
)
def test_fault_planted_in_sdpa_vector(cache_dir: Path, old: str, new: str, kind: str | None) -> None:
    instance = 'instantiate_kernel("k", sdpa_vector, float, 64, 64)\n'
    library = planted(cache_dir, "sdpa_vector.h", old, new, instance)
    q, k, v = (mx.random.normal((1, 2, n, 64)) for n in (1, 77, 77))
    strides = (np.uint64(77 * 64), np.uint64(64)) * 2
    values = [q, k, v, ..., np.int32(1), np.int32(77), *strides, np.float32(0.125), *[None] * 7]
    with pytest.raises(MetalFault) as caught:
        launch(library, "k", values, (q.shape, mx.float32), (2, 1, 1), (1024, 1, 1))
    assert caught.value.kind == kind or (kind is None and caught.value.kind in ("race", "uninitialised read"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{BARRIER}\n\n        mma_op.mma(Xs, Ws);", "mma_op.mma(Xs, Ws);"),
        (f"{BARRIER}\n        loader_x.load_unsafe();", "loader_x.load_unsafe();"),
    ],
)
def test_missing_barrier_planted_in_qmm(cache_dir: Path, old: str, new: str) -> None:
    text = (mlx_include() / "mlx/backend/metal/kernels/quantized.h").read_text()
    instance = 'instantiate_kernel("k", affine_qmm_t, float, 64, 4, true, false)\n'
    before = HEADERS[: HEADERS.index("quantized.h")]
    assert old in text
    source = include(*before) + text.replace(old, new) + instance
    library = compile_library(source, include_dirs=(mlx_include(),), cache_dir=cache_dir)
    w, s, b = quantized(32, 128, 64, 4, mx.float32)
    x = mx.random.normal((32, 128))
    sizes = (np.int32(128), np.int32(32), np.int32(32))
    values = [w, s, b, x, ..., *sizes, *NO_BATCH, *NO_BATCH, *[NO_BATCH[2]] * 2]
    with pytest.raises(MetalFault, match=r"[XW]s\[") as caught:
        launch(library, "k", values, ((32, 32), mx.float32), (1, 1, 1), (32, 2, 2))
    assert caught.value.kind in ("race", "uninitialised read")


def test_wrong_lane_planted_in_qmv_shows_in_the_result(cache_dir: Path) -> None:
    instance = 'instantiate_kernel("k", affine_qmv_fast, float, 64, 4, false)\n'
    library = planted(cache_dir, "quantized.h", "simd_lid == 0 && row <= last_row", "simd_lid == 1", instance)
    sound = "result[row] = simd_sum(result[row]);"
    wrong = planted(
        cache_dir, "quantized.h", sound, "result[row] += simd_shuffle_down(result[row], 16);", instance
    )
    w, s, b = quantized(8, 512, 64, 4, mx.float32)
    x = mx.random.normal((1, 512))
    values = [w, s, b, x, ..., np.int32(512), np.int32(8), *NO_BATCH, *NO_BATCH, *[NO_BATCH[2]] * 2]
    out, _ = launch(library, "k", values, ((1, 8), mx.float32), (1, 1, 1), (32, 2, 1))
    assert_close(out, product(x, w, s, b, 64, 4))
    out, _ = launch(wrong, "k", values, ((1, 8), mx.float32), (1, 1, 1), (32, 2, 1))
    assert mx.abs(out - product(x, w, s, b, 64, 4)).max().item() > 0.1
