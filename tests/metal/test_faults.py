"""Faults that a GPU would only sometimes show: each planted one is caught, and its sound twin passes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from metal_on_host import MetalFault, MetalSourceError
from tests.metal.conftest import RunBody

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SHARED = "threadgroup float s[64];"

FAULTS = [
    (
        "out of bounds",
        "y[i] = x[i + 1];",
        r"x\[64\] \(byte 256 of 256\); thread \(63, 0, 0\).*body/body.metal:2",
    ),
    ("out of bounds", "y[i] = x[int(i) - 1];", r"x\[-1\] \(byte -4 of 256\); thread \(0, 0, 0\)"),
    ("out of bounds", "y[i + 1] = 0;", r"write of 4 bytes at y\[64\]"),
    ("out of bounds", f"{SHARED} s[i] = 0; {BARRIER} y[i] = s[i + 1];", r"index 64 of an array"),
    ("out of bounds", "y[i] = 0; ((device float*)0x1000ul)[i] = 1;", "address 0x1000"),
    ("out of bounds", "y[i] = x[i * 100000000u];", r"x\["),
    (
        "out of bounds",
        "float a[4] = {1, 2, 3, 4}; y[i] = a[i / 8];",
        r"index 4 of an array of type '__private float\[4\]'.*body.metal:2",
    ),
    ("out of bounds", f"{SHARED} threadgroup float* p = s; s[i] = 0; {BARRIER} y[i] = p[i + 1];", r"s\[64\]"),
    ("out of bounds", "threadgroup float t[4][33]; t[i % 4][i] = 0; y[i] = 0;", r"index 33 of an array"),
    ("undefined arithmetic", "y[i] = 7 / int(i);", "an integer division by zero"),
    ("race", f"{SHARED} s[0] = i; {BARRIER} y[i] = s[0];", "two writes; the other by thread"),
    (
        "race",
        f"{SHARED} s[i] = x[i]; {BARRIER} y[i] = s[63 - i]; s[i] = 0;",
        "(read after a write|write after a read)",
    ),
    (
        "race",
        f"{SHARED} s[i] = 0; threadgroup_barrier(mem_flags::mem_none); y[i] = s[63 - i];",
        "the other by thread",
    ),
    (
        "race",
        f"{SHARED} s[i] = 0; threadgroup_barrier(mem_flags::mem_device); y[i] = s[63 - i];",
        "the other by thread",
    ),
    (
        "race",
        f"{SHARED} s[i] = 0; {BARRIER} s[i] = 1;"
        "simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[63 - i];",
        "the other by",
    ),
    ("race", "y[i] = 0; y[i ^ 1] = 1;", "two writes"),
    (
        "uninitialised read",
        f"{SHARED} if (i != 5) s[i] = 0; {BARRIER} y[i] = s[i];",
        r"s\[5\].*thread \(5, 0, 0\)",
    ),
    ("uninitialised read", "y[i] += 1;", r"y\[0\]"),
    ("divergent barrier", f"y[i] = 0; if (i < 40) {{ {BARRIER} }}", "waits at line 2, thread .* has ended"),
    (
        "divergent barrier",
        f"y[i] = 0; if (i < 32) {{ {BARRIER} }}\nelse {{ {BARRIER} }}",
        "waits at the barrier of line 3",
    ),
    ("divergent barrier", f"y[i] = 0; for (uint k = 0; k < i; k++) {BARRIER}", "has ended"),
    ("wrong lane", "y[i] = simd_shuffle(x[i], 32);", "not active, or out of range"),
    (
        "wrong lane",
        "y[i] = 0; if (i % 32 < 8) y[i] = 1; else return; y[i] = simd_broadcast(x[i], 9);",
        "not active",
    ),
    (
        "divergent simdgroup function",
        "y[i] = 0; if (i % 2) y[i] = simd_sum(1);\ny[i] += simd_max(2);",
        "thread 0 waits at line 3, thread 1 is at line 2",
    ),
    (
        "divergent simdgroup function",
        f"y[i] = 0; if (i % 2) y[i] = simd_sum(1);\n{BARRIER}",
        "waits at the barrier of line 3",
    ),
    (
        "misaligned access",
        "y[i] = 0; y[i] = ((const device float2*)(x + 1))[i / 4].x;",
        r"read of 8 bytes at x\[1\]",
    ),
    (
        "misaligned access",
        f"threadgroup float s[64]; s[i] = 0; {BARRIER} y[i] = ((threadgroup float4*)s)[i / 4].x;",
        r"s\[\d+\]",
    ),
    ("unwritten output", "if (i != 7) y[i] = 0;", r"y\[7\]"),
    ("write to an input", "y[i] = 0; ((device float*)x)[i] = 0;", r"x\[0\]"),
    ("threadgroup memory limit", "threadgroup float s[8193]; s[i] = 0; y[i] = s[i];", "32768"),
    (
        "access limit",
        "y[i] = 0; while (x[0] < 10) { y[i] = i; threadgroup_barrier(mem_flags::mem_device); }",
        r"[xy]\[",
    ),
]


@pytest.mark.parametrize(("kind", "body", "message"), FAULTS)
def test_planted_fault_is_caught(run_body: RunBody, kind: str, body: str, message: str) -> None:
    limit = {"access_limit": 100_000}
    with pytest.raises(MetalFault, match=message) as caught:
        run_body(body, mx.zeros((64,)), settings=limit)
    assert caught.value.kind == kind
    assert "custom_kernel_body" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        f"{SHARED} s[i] = x[i]; {BARRIER} y[i] = s[63 - i];",
        f"{SHARED} s[i] = x[i]; {BARRIER} float v = s[63 - i]; {BARRIER} s[i] = v; {BARRIER} y[i] = s[i];",
        f"{SHARED} s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[i ^ 31];",
        "y[i ^ 1] = 0; threadgroup_barrier(mem_flags::mem_device); y[i] += 1;",
        f"for (uint k = 0; k < 3; k++) {{ {BARRIER} }} y[i] = simd_sum(x[i]);",
        "if (i % 32 >= 8) { y[i] = 0; return; } y[i] = simd_sum(x[i]);",
        f"if (true) {{ threadgroup float s[64]; s[i] = 0; {BARRIER} y[i] = s[63 - i]; }}",
        f"threadgroup alignas(16) float s[64]; s[i] = 0; {BARRIER} y[i] = ((threadgroup float4*)s)[i / 4].x;",
        "y[i] = i < 16 ? ((const device float4*)x)[i].w : 0;",
        "if (i < 16) ((device packed_float4*)y)[i] = float4(1);",
    ],
)
def test_sound_twin_passes(run_body: RunBody, body: str) -> None:
    for threadgroup in (None, 64):
        run_body(body, mx.zeros((64,)), threadgroup=threadgroup, settings={"seeds": (0, 1, 2, 3)})


def test_race_between_threadgroups(run_body: RunBody) -> None:
    with pytest.raises(MetalFault, match="another threadgroup") as caught:
        run_body("y[i] = 0; y[0] = i;", mx.zeros((64,)), threadgroup=1)
    assert caught.value.kind == "race"


def test_atomics_do_not_race_but_plain_accesses_beside_them_do(run_body: RunBody) -> None:
    add = "atomic_fetch_add_explicit((device atomic_uint*)y + i % 2, 1u, memory_order_relaxed);"
    y = run_body(add, mx.zeros((64,), mx.uint32), threadgroup=8, output=((2,), mx.uint32), init_value=5)
    assert y.tolist() == [37, 37]
    with pytest.raises(MetalFault, match="the other by") as caught:
        run_body(
            add + "y[0] = 1;",
            mx.zeros((64,), mx.uint32),
            threadgroup=8,
            output=((2,), mx.uint32),
            init_value=0,
        )
    assert caught.value.kind == "race"


def test_result_that_depends_on_the_schedule(run_body: RunBody) -> None:
    ticket = "y[i] = atomic_fetch_add_explicit((device atomic_uint*)y + 64, 1u, memory_order_relaxed);"
    call: dict[str, Any] = {"x": mx.zeros((64,), mx.uint32), "output": ((65,), mx.uint32), "init_value": 0}
    with pytest.raises(MetalFault) as caught:
        run_body(ticket, **call)
    assert caught.value.kind == "schedule dependence"
    run_body(ticket, **call, settings={"is_order_free": True})


def test_thread_variable_never_written_is_no_number(run_body: RunBody) -> None:
    y = run_body("float a[2]; if (x[i] > 0) a[i % 2] = 1; y[i] = a[0];", mx.zeros((8,)))
    assert mx.isnan(y).all().item()


def test_output_may_be_left_unwritten_by_name(run_body: RunBody) -> None:
    settings = {"may_leave_unwritten": frozenset({"y"})}
    y = run_body("if (i != 7) y[i] = 0;", mx.zeros((64,)), settings=settings)
    assert mx.isnan(y).tolist() == [i == 7 for i in range(64)]


def test_divergent_simdgroups_may_be_allowed(run_body: RunBody) -> None:
    body = "y[i] = 0; if (i % 2) y[i] = simd_sum(1);\ny[i] += simd_sum(1);"
    y = run_body(body, mx.zeros((64,)), settings={"divergent_simd": True})
    assert y.tolist() == [32.0, 48.0] * 32


def test_input_written_through_by_name(run_body: RunBody) -> None:
    x = mx.zeros((64,))
    run_body("y[i] = 0; ((device float*)x)[i] = i;", x, settings={"writable_inputs": frozenset({"x"})})
    assert x.tolist() == list(range(64))


SOURCE_FAULTS = [
    (
        "y[i] = f(x);",
        "float f(threadgroup const float* p) { return *p; }\n",
        "'__global' as a pointer to address space '__local'",
    ),
    (
        "y[i] = f(x);",
        "float f(const float* p) { return *p; }\n",
        r"body/header.metal:1: error: `const float\* p` needs an address",
    ),
    ("const float* p = x; y[i] = p[i];", "", "needs an address space"),
    ("x[i] = 0; y[i] = 0;", "", "read-only variable is not assignable"),
    ("threadgroup float* p = y; y[i] = *p;", "", "__local float"),
    (
        "y[i] = f();",
        "float f() { threadgroup float s[4]; return s[0]; }\n",
        "must stand in a kernel's own body",
    ),
    ("bfloat b = x[i]; y[i] = b;", "", "Metal needs a cast here: .*float' to 'bfloat'"),
    ("float4 v = float4(1, 2, 3); y[i] = v.x;", "", "as many elements as the vector has"),
    ("y[i] = max(1u, -1);", "", "ambiguous"),
    ("y[i] = 0;", '#include "mlx/backend/metal/kernels/erf.h"\n', "the device compiler has no such path"),
    ("y[i] = no_such_function(x[i]);", "", "undeclared identifier 'no_such_function'"),
]


@pytest.mark.parametrize(("body", "header", "message"), SOURCE_FAULTS)
def test_source_that_metal_refuses(run_body: RunBody, body: str, header: str, message: str) -> None:
    with pytest.raises(MetalSourceError, match=message):
        run_body(body, mx.zeros((64,)), header=header)
