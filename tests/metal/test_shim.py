"""The shim of Metal's standard library against numpy, and the positions and sizes a dispatch gives."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_on_host import Host, MetalSourceError, Settings
from tests.metal.conftest import RunBody

LANES = np.arange(32)
VALUES = np.array([((i * 7) % 13) - 5 for i in range(32)])


def lanes(body: str, run_body: RunBody, dtype: mx.Dtype = mx.float32) -> list[float]:
    return run_body(f"y[i] = {body};", mx.array(VALUES).astype(dtype)).astype(mx.float32).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.int8])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("simd_sum(x[i])", np.full(32, VALUES.sum())),
        ("simd_max(x[i])", np.full(32, VALUES.max())),
        ("simd_min(x[i])", np.full(32, VALUES.min())),
        ("simd_prefix_inclusive_sum(x[i])", np.cumsum(VALUES)),
        ("simd_prefix_exclusive_sum(x[i])", np.cumsum(VALUES) - VALUES),
        ("simd_shuffle(x[i], 31 - i % 32)", VALUES[::-1]),
        ("simd_shuffle_xor(x[i], 5)", VALUES[LANES ^ 5]),
        ("simd_shuffle_up(x[i], 3)", VALUES[np.where(LANES < 3, LANES, LANES - 3)]),
        ("simd_shuffle_down(x[i], 3)", VALUES[np.where(LANES > 28, LANES, LANES + 3)]),
        ("simd_broadcast(x[i], 9)", np.full(32, VALUES[9])),
    ],
)
def test_simd_functions(run_body: RunBody, dtype: mx.Dtype, call: str, expected: np.ndarray) -> None:  # type: ignore[type-arg]
    assert lanes(call, run_body, dtype) == expected.tolist()


def test_lanes_exchange_32_bits_and_mlx_adds_64_by_shuffles(run_body: RunBody) -> None:
    assert lanes("simd_shuffle(x[i], 31 - i % 32)", run_body, mx.int64) == VALUES[::-1].tolist()
    with pytest.raises(MetalSourceError, match="lanes exchange up to 32 bits"):
        lanes("simd_sum(x[i])", run_body, mx.int64)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("simd_product(x[i] == 0 ? 2.0f : 1.0f)", np.full(32, 2.0 ** (VALUES == 0).sum())),
        ("simd_shuffle_rotate_up(x[i], 3)", np.roll(VALUES, 3)),
        ("simd_shuffle_rotate_down(x[i], 3)", np.roll(VALUES, -3)),
        ("simd_shuffle_and_fill_up(x[i], 99.0f, 2)", np.concatenate([[99, 99], VALUES[:-2]])),
        ("simd_shuffle_and_fill_down(x[i], 99.0f, 2)", np.concatenate([VALUES[2:], [99, 99]])),
        ("simd_broadcast_first(x[i])", np.full(32, VALUES[0])),
        ("simd_any(x[i] == 3)", np.full(32, float((VALUES == 3).any()))),
        ("simd_all(x[i] < 8)", np.full(32, float((VALUES < 8).all()))),
        ("popcount(uint(ulong(simd_ballot(x[i] > 0))))", np.full(32, (VALUES > 0).sum())),
        ("ulong(simd_active_threads_mask()) == 0xffffffffu", np.ones(32)),
        ("simd_is_first()", LANES == 0),
        ("quad_sum(x[i])", VALUES.reshape(8, 4).sum(1).repeat(4)),
        ("quad_shuffle_xor(x[i], 1)", VALUES[LANES ^ 1]),
        ("quad_broadcast(x[i], 2)", VALUES.reshape(8, 4)[:, 2].repeat(4)),
        ("simd_sum(float2(x[i], 1)).x + simd_sum(float2(x[i], 1)).y", np.full(32, VALUES.sum() + 32)),
    ],
)
def test_simd_functions_of_float(run_body: RunBody, call: str, expected: np.ndarray) -> None:  # type: ignore[type-arg]
    assert lanes(call, run_body) == expected.tolist()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("float4(float2(1, 2), 3, 4).wzyx.y", 3),
        ("float(int4(float4(1.9f, -1.9f, 0, 0)).y)", -1),
        ("float4(2).z + vec<float, 3>(1, 2, 3).z", 5),
        ("dot(float3(1, 2, 3), float3(4, 5, 6))", 32),
        ("as_type<float>(0x40490fdbu)", np.float32(np.pi)),
        ("as_type<half2>(0x3c004000u).x", 2),
        ("float(65504.0h) + float(0.5bf)", 65504.5),
        ("float(half(0.1f))", float(np.float16(0.1))),
        ("float(bfloat(0.1f))", 0.10009765625),
        ("float(half(2048) + half(1))", 2048),
        ("float(bfloat(256) + bfloat(1))", 256),
        ("min(3, max(1, 2)) + clamp(5.0f, 0.0f, 1.0f)", 3),
        ("fmax(NAN, 1.0f) + metal::fmin(2.0f, NAN)", 3),
        ("select(1.0f, 2.0f, true) + popcount(255u) + clz(1u) + ctz(8u)", 44),
        ("extract_bits(0xabcdu, 4, 8)", 0xBC),
        ("metal::exp(1.0f)", np.float32(np.e)),
        ("fast::exp2(3.0f) + precise::rsqrt(4.0f) + sqrt(9.0f)", 11.5),
        ("rint(2.5f) + round(2.5f) + trunc(-1.5f) + floor(-1.5f) + ceil(1.2f)", 4),
        ("float(numeric_limits<half>::max()) + numeric_limits<uchar>::max()", 65759),
        ("sizeof(float3) + sizeof(packed_float3) + sizeof(half3) + sizeof(packed_half3)", 42),
        ("is_same_v<T, half> + conditional_t<true, integral_constant<int, 7>, int>::value", 8),
        ("isnan(NAN) + isinf(-INFINITY) + isfinite(1.0f)", 3),
        ("frexp(10.0f, e) + e", 4.625),
    ],
)
def test_values(run_body: RunBody, expression: str, expected: float) -> None:
    y = run_body(f"int e = 0; y[i] = {expression};", mx.zeros((1,)), template=[("T", mx.float16)])
    assert y.item() == pytest.approx(float(expected), rel=1e-7)


def test_matrices(run_body: RunBody) -> None:
    body = """
    threadgroup half tile[64];
    tile[i] = half(x[i]); tile[i + 32] = half(x[i + 32]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_half8x8 a; simdgroup_float8x8 b, c(1.0f), d;
    simdgroup_load(a, tile, 8);
    simdgroup_load(b, x + 64, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(d, a, b, c);
    simdgroup_store(d, y, 8);
    """
    x = mx.array(np.arange(128) % 11 - 4.0).astype(mx.float32)
    y = run_body(body, x, threads=32, output=((8, 8), mx.float32))
    a, b = np.array(x).reshape(2, 8, 8)
    assert np.array_equal(np.array(y), a @ b.T + np.eye(8))


def test_positions_with_clipped_threadgroups(cache_dir: Path) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    body = """
    uint3 p = thread_position_in_grid;
    uint at = (p.z * threads_per_grid.y + p.y) * grid_size.x + p.x;
    device uint* o = y + at * 8;
    o[0] = threads_per_threadgroup.x; o[1] = threads_per_threadgroup.y; o[2] = thread_index_in_threadgroup;
    o[3] = simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup; o[4] = threadgroups_per_grid.x;
    o[5] = threadgroup_position_in_grid.x * 4 + thread_position_in_threadgroup.x;
    o[6] = dispatch_threads_per_threadgroup.y; o[7] = simdgroups_per_threadgroup;
    """
    kernel = host.metal_kernel("positions", [], ["y"], body)
    (y,) = kernel(
        inputs=[],
        grid=(6, 17, 2),
        threadgroup=(4, 16, 4),
        output_shapes=[(2, 17, 6, 8)],
        output_dtypes=[mx.uint32],
    )
    for z, row, column in np.ndindex(2, 17, 6):
        width, height = (4 if column < 4 else 2), (16 if row < 16 else 1)
        index = (z * height + row % 16) * width + column % 4
        simdgroups = -(-width * height * 2 // 32)
        assert y[z, row, column].tolist() == [width, height, index, index, 2, column, 16, simdgroups]
    assert host.reports[-1].groups == 4


def test_inputs_as_mlx_passes_them(cache_dir: Path) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)] * s + few[1] + flags[i];
    """
    x = mx.arange(24, dtype=mx.float32).reshape(4, 6).T
    flags = mx.arange(24) % 2 == 0
    expected = np.array(x).reshape(-1) * 2 + 7 + np.array(flags)
    for is_contiguous in (True, False):
        kernel = host.metal_kernel("inputs", ["x", "s", "few", "flags"], ["y"], body, "", is_contiguous)
        (y,) = kernel(
            inputs=[x, 2.0, mx.array([6, 7]), flags],
            grid=(24, 1, 1),
            threadgroup=(24, 1, 1),
            output_shapes=[(24,)],
            output_dtypes=[mx.float32],
        )
        assert np.array_equal(np.array(y), expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.uint32, mx.int32])
def test_init_value_and_atomic_outputs(cache_dir: Path, dtype: mx.Dtype) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    body = "atomic_fetch_add_explicit(&y[thread_position_in_grid.x % 4], T(1), memory_order_relaxed);"
    kernel = host.metal_kernel("count", [], ["y"], body, atomic_outputs=True)
    (y,) = kernel(
        inputs=[],
        grid=(100, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(4,)],
        output_dtypes=[dtype],
        template=[("T", dtype)],
        init_value=3,
    )
    assert y.tolist() == [28, 28, 28, 28]


def test_every_dtype_goes_through(run_body: RunBody) -> None:
    for dtype in (mx.bool_, mx.uint8, mx.int16, mx.uint64, mx.float16, mx.bfloat16, mx.complex64):
        x = (mx.arange(12) - 3).astype(dtype)
        assert mx.array_equal(run_body("y[i] = x[i];", x), x).item()


def test_function_of_the_header_and_a_template(run_body: RunBody) -> None:
    header = """
    template <typename T, int N>
    struct Scaled {
      T factor;
      Scaled(T f) thread : factor(f) {}
      T of(const device T* p, uint i) const thread { return p[i] * factor * T(N); }
    };
    """
    y = run_body(
        "Scaled<T, N> s(T(3)); y[i] = s.of(x, i);",
        mx.ones((9,)),
        header=header,
        template=[("T", mx.float32), ("N", 2)],
    )
    assert y.tolist() == [6.0] * 9


@pytest.mark.parametrize(
    ("body", "header", "expected"),
    [
        ("y[i] = t[3];", "constant float t[4] = {1, 2, 3, 5};\n", 5),
        (
            "y[i] = t[2] + K;",
            "static constant constexpr float t[4] = {1, 2, 3, 5};\nconstexpr constant int K = 4;\n",
            7,
        ),
        (
            "float a[4]; f(a); y[i] = a[3];",
            "template <int N> void f(thread float (&a)[N]) { a[3] = N; }\n",
            4,
        ),
        ("float a[4]; f(a); y[i] = a[3];", "void f(thread float* a) { a[3] = 9; }\n", 9),
        ("uint4 v = reinterpret_cast<const device uint4*>(x)[0]; y[i] = as_type<float>(v[3]);", "", 3),
        ("float4 f = as_type<float4>(((const device uint4*)x)[0]); y[i] = f[1];", "", 1),
        ("auto f = [&](float a) { return a * x[2]; }; y[i] = f(4);", "", 8),
        ("float s = 0;\n#pragma unroll\nfor (int k = 0; k < 4; k++) s += k;\ny[i] = s;", "", 6),
        (
            "y[i] = U<half>::v * 10 + U<float>::v;",
            "template <typename T> struct U { static constexpr constant int v = 1; };\n"
            "template <> struct U<half> { static constexpr constant int v = 2; };\n",
            21,
        ),
        (
            "half4 v = half4(x[1], 1, 2, 3); v = v * half(2) + half4(1); y[i] = dot(float4(v), float4(1));",
            "",
            18,
        ),
        ("vec<bfloat, 4> v = vec<bfloat, 4>(bfloat(x[1])); float4 f = float4(v); y[i] = f.x + f.w;", "", 2),
        ("float4 v = 0; v.xy = float2(1, 2); v.zw += 3.0f; y[i] = v.x + v.y + v.z + v.w;", "", 9),
        (
            "P p; p.v = float2(2, 3); P q = p; y[i] = q.sum();",
            "struct P { float2 v; float sum() const thread { return v.x + v.y; } };\n",
            5,
        ),
        (
            "threadgroup float s[1]; s[0] = 3; y[i] = g(x + 2) + g(s);",
            "float g(const device float* p) { return *p; }\n"
            "float g(const threadgroup float* p) { return *p * 10; }\n",
            32,
        ),
        (
            "threadgroup float s[1]; s[0] = 3; y[i] = g(x + 2) + g(s);",
            "template <typename P> float g(P p) { return *p; }\n",
            5,
        ),
        ("float4 v = select(float4(1), float4(2), float4(4) > 3.0f); y[i] = v.x;", "", 2),
        ("threadgroup half s[2][9]; s[1][8] = 6; y[i] = s[1][8];", "", 6),
        ("threadgroup P s[4]; s[3].a = 6; y[i] = s[3].a;", "struct P { int a; };\n", 6),
        (
            "threadgroup atomic_uint c; atomic_store_explicit(&c, 2, memory_order_relaxed);"
            "y[i] = atomic_fetch_add_explicit(&c, 1, memory_order_relaxed) * 10;"
            "y[i] += atomic_load_explicit(&c, memory_order_relaxed);",
            "",
            23,
        ),
        ("union { uint u; float f; } z; z.f = 1; y[i] = z.u >> 23;", "", 127),
        ("packed_float3 p = float3(1, 2, 3); float3 q = p; y[i] = q.z + p[0];", "", 4),
        ("int local = 3, global = 4; y[i] = local + global;", "", 7),
        ("y[i] = float(mulhi(0x80000000u, 4u) + uint(mad24(1, 2, 3)));", "", 7),
        ("bfloat b = static_cast<bfloat>(half(1.5h)); y[i] = float(b) + float(bfloat(half(2)));", "", 3.5),
    ],
)
def test_constructs_that_kernels_use(run_body: RunBody, body: str, header: str, expected: float) -> None:
    x = mx.arange(8).astype(mx.float32)
    y = run_body(body, x, header=header, threads=1, output=((1,), mx.float32))
    assert y.item() == expected


def test_costs(cache_dir: Path) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = whole[i] + strided[i * 32] + one[3];
    """
    kernel = host.metal_kernel("costs", ["whole", "strided", "one"], ["y"], body)
    kernel(
        inputs=[mx.zeros((64,)), mx.zeros((64 * 32,)), mx.zeros((8,))],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    report = host.reports[-1]
    whole, strided, one, y = (report.buffer(n) for n in ("whole", "strided", "one", "y"))
    assert (whole.thread_read, whole.simd_read, whole.unique_read, whole.coalescing) == (256, 256, 256, 1.0)
    assert (strided.unique_read, strided.line_bytes, strided.coalescing) == (256, 64 * 64, 4 / 64)
    assert (whole.line_use, strided.line_use, one.line_use) == (1.0, 4 / 64, 4 / 32)
    assert (one.thread_read, one.simd_read, one.unique_read) == (256, 8, 4)
    assert (y.simd_written, y.unique_written, y.simd_read, y.coalescing) == (256, 256, 0, 1.0)
    with pytest.raises(KeyError, match="there are whole, strided, one, y"):
        report.buffer("z")
    assert "strided" in report.table()


def test_compiled_once(cache_dir: Path, tmp_path: Path) -> None:
    for _ in range(2):
        host = Host(Settings(cache_dir=tmp_path))
        kernel = host.metal_kernel("once", [], ["y"], "y[0] = 1;")
        kernel(
            inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32]
        )
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_products_in_conditions_are_no_pointers(run_body: RunBody) -> None:
    header = (
        "template <int N> int all() { if constexpr (N * sizeof(int) % 8 == 0) { return N; } return 0; }\n"
    )
    y = run_body("y[i] = all<4>();", mx.zeros((4,)), header=header)
    assert y.tolist() == [4] * 4
