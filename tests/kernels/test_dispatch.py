from __future__ import annotations

import json
import os
import platform

import mlx.core as mx
import pytest

from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import Selection, decoder_kind, extension, metal, using

from .conftest import RunPython

STATE = """
from mlxserve_kernels import ops
print(ops.implementation(), ops.num_threads(), ops.supports_steps_in_flight())
"""

KINDS = "reference, cpu, metal, metal-host"

# Digests of results: equal for every number of threads, and the ops run on each instruction set.
RESULTS = """
import hashlib, json
import mlx.core as mx, numpy as np
from mlxserve_kernels import ops, reference

mx.random.seed(1)
results = []
for bits, group in ((4, 32), (8, 64)):
    w, scales, biases = mx.quantize(mx.random.normal((210, 640)), group_size=group, bits=bits)
    dense = mx.dequantize(w, scales, biases, group_size=group, bits=bits)
    for rows in (1, 5, 8, 9, 70):
        x = mx.random.normal((rows, 640))
        y = ops.quantized_matmul(x, w, scales, biases, group_size=group, bits=bits)
        assert mx.array_equal(y, ops.linear(x, dense))
        assert mx.array_equal(y[-1:], ops.linear(x[-1:], dense))
        assert mx.allclose(y, x @ dense.T, rtol=1e-4, atol=1e-4)
        results.append(y)
for dtype in (mx.float16, mx.bfloat16):
    x, w = mx.random.normal((11, 77)), mx.random.normal((30, 77)).astype(dtype)
    results.append(ops.linear(x, w))
    assert mx.allclose(results[-1], x @ w.astype(mx.float32).T, rtol=1e-4, atol=1e-4)
x, w = mx.random.normal((300, 577)), mx.random.normal((577,))
results += [ops.rms_norm(x, w, 1e-5), ops.silu_mul(x, x + 1)]
assert mx.allclose(results[-2], reference.rms_norm(x, w, 1e-5), atol=1e-5)
assert mx.allclose(results[-1], reference.silu_mul(x, x + 1), atol=1e-5)
for dtype, dim in ((mx.float32, 64), (mx.bfloat16, 21)):
    keys = mx.random.normal((60, 2, dim, 32)).astype(dtype)
    values = mx.random.normal((60, 2, 32, dim)).astype(dtype)
    args = [mx.array(ids, dtype=mx.int32) for ids in (np.arange(60).reshape(2, 30), [0, 1, 30], [900, 640])]
    for options in ({}, {"window": 50, "softcap": 3.0, "sinks": mx.ones((6,))}):
        q = mx.random.normal((30, 6, dim))
        results.append(ops.paged_attention(q, keys, values, *args, scale=0.1, **options))
        want = reference.paged_attention(q, keys, values, *args, scale=0.1, **options)
        assert mx.allclose(results[-1], want, rtol=1e-4, atol=1e-5)
logits = 3 * mx.random.normal((6, 5003))
rows = {
    "temperature": [0.0, 1.0, 0.7, 1.0, 1.5, 1.0],
    "top_k": [0, 0, 40, 0, 0, 3000],
    "top_p": [1.0, 1.0, 1.0, 0.95, 1.0, 0.8],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.05, 0.0],
}
for seed in range(4):
    keys = [(seed, 7919 * row) for row in range(6)]
    results.append(ops.sample_tokens(logits, **rows, keys=keys))
    assert mx.array_equal(results[-1], reference.sample_tokens(logits, **rows, keys=keys))
digests = [hashlib.sha256(np.array(y).tobytes()).hexdigest() for y in results]
print(json.dumps([ops.implementation(), digests]))
"""


def test_extension_accepts_an_array_of_the_installed_mlx(cpu_kernels: None) -> None:
    assert ops.rms_norm(mx.ones((1, 4)), None, 0.0).tolist() == [[1.0] * 4]


@pytest.mark.skipif(platform.system() != "Linux", reason="the extension is built on Linux only")
def test_linux_has_the_extension(run_python: RunPython) -> None:
    result = run_python(STATE)
    assert result.stdout.startswith("cpu-"), result.stderr
    assert result.stdout.split()[1:] == [str(len(os.sched_getaffinity(0))), "True"]


def test_reference_by_choice(run_python: RunPython) -> None:
    assert run_python(STATE, MLXSERVE_KERNELS="reference", MLXSERVE_THREADS="3").stdout.split() == [
        "reference",
        "3",
        "False",
    ]


def test_metal_on_the_host_by_choice(run_python: RunPython) -> None:
    result = run_python(STATE, MLXSERVE_KERNELS="metal-host")
    assert result.stdout.split()[0] == "metal-host", result.stderr


def test_metal_on_the_host_without_the_compiler(run_python: RunPython) -> None:
    program = "import sys; sys.modules['ziglang'] = None" + STATE
    result = run_python(program, MLXSERVE_KERNELS="metal-host")
    assert "MLXSERVE_KERNELS is metal-host, which needs a checkout and the test extra" in result.stderr


@pytest.mark.skipif(mx.metal.is_available(), reason="this is a Mac")
def test_metal_needs_a_mac(run_python: RunPython) -> None:
    result = run_python(STATE, MLXSERVE_KERNELS="metal")
    assert result.stderr.strip().endswith(
        "ValueError: MLXSERVE_KERNELS is metal, but mlx does not compute on a Mac's GPU here"
    )


@pytest.mark.parametrize(
    ("kernels", "wanted", "kind"),
    [
        ("cpu", None, "fused"),
        ("cpu", "ops", "ops"),
        ("cpu", "blocks", "blocks"),
        ("reference", None, "blocks"),
        ("reference", "ops", "ops"),
        ("metal-host", None, "ops"),
    ],
)
def test_how_decoder_layers_run(
    cpu_kernels: None, run_python: RunPython, kernels: str, wanted: str | None, kind: str
) -> None:
    program = "from mlxserve_kernels import dispatch; print(dispatch.decoder_kind())"
    variables = {"MLXSERVE_KERNELS": kernels} | ({} if wanted is None else {"MLXSERVE_DECODER": wanted})
    assert run_python(program, **variables).stdout.strip() == kind


@pytest.mark.parametrize(
    ("kernels", "wanted", "message"),
    [
        ("reference", "fused", "MLXSERVE_DECODER is fused, which the reference kernels have not"),
        ("reference", "all", "MLXSERVE_DECODER must be one of fused, ops, blocks, got 'all'"),
    ],
)
def test_ways_of_decoder_layers_that_there_are_not(
    run_python: RunPython, kernels: str, wanted: str, message: str
) -> None:
    program = "from mlxserve_kernels import dispatch; print(dispatch.decoder_kind())"
    result = run_python(program, MLXSERVE_KERNELS=kernels, MLXSERVE_DECODER=wanted)
    assert result.stderr.strip().endswith(f"ValueError: {message}")


def test_no_metal_kernel_runs_before_it_is_proven() -> None:
    kernels = object()
    chosen = Selection("metal", metal=kernels, proven=frozenset({"add_rms_norm"}))  # type: ignore[arg-type]
    before = ops.implementation()
    with using(chosen):
        assert ops.implementation() == "metal"
        assert metal("add_rms_norm") is kernels
        assert metal("paged_attention") is None
        assert extension() is None
    assert ops.implementation() == before
    with using(Selection("metal", metal=kernels, proven=frozenset())):  # type: ignore[arg-type]
        assert decoder_kind() == "blocks"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MLXSERVE_KERNELS", "gpu", f"MLXSERVE_KERNELS must be one of {KINDS}, got 'gpu'"),
        ("MLXSERVE_KERNELS", "", f"MLXSERVE_KERNELS must be one of {KINDS}, got ''"),
        ("MLXSERVE_CPU_MATMUL", "bf16", "MLXSERVE_CPU_MATMUL must be one of exact, int16, int8, got 'bf16'"),
        ("MLXSERVE_CPU_MATMUL", "", "MLXSERVE_CPU_MATMUL must be one of exact, int16, int8, got ''"),
        ("MLXSERVE_THREADS", "0", "MLXSERVE_THREADS must be a whole number from 1 to 1024, got '0'"),
        ("MLXSERVE_THREADS", "two", "MLXSERVE_THREADS must be a whole number from 1 to 1024, got 'two'"),
        ("MLXSERVE_THREADS", "1025", "MLXSERVE_THREADS must be a whole number from 1 to 1024, got '1025'"),
    ],
)
def test_wrong_values_are_refused(run_python: RunPython, name: str, value: str, message: str) -> None:
    result = run_python(STATE, **{name: value})
    assert result.returncode == 1
    assert result.stderr.strip().endswith(f"ValueError: {message}")


def test_unknown_instruction_set_is_refused(cpu_kernels: None, run_python: RunPython) -> None:
    result = run_python(STATE, MLXSERVE_CPU_ISA="sse9")
    assert "ValueError: MLXSERVE_CPU_ISA must be one of portable" in result.stderr
    assert result.stderr.strip().endswith("on this CPU, got 'sse9'")


def test_every_instruction_set_is_right_and_threads_change_no_bit(
    cpu_kernels: None, run_python: RunPython
) -> None:
    module = extension()
    assert module is not None
    for isa in module.available_isas():
        runs = [
            run_python(RESULTS, MLXSERVE_CPU_ISA=isa, MLXSERVE_THREADS=str(threads)) for threads in (1, 2, 5)
        ]
        for result in runs:
            assert result.returncode == 0, result.stderr
        assert json.loads(runs[0].stdout)[0] == f"cpu-{isa}"
        assert runs[0].stdout == runs[1].stdout == runs[2].stdout


def test_a_fork_and_an_exit_do_not_hang(cpu_kernels: None, run_python: RunPython) -> None:
    program = """
import os
import mlx.core as mx
from mlxserve_kernels import ops
x = mx.ones((64, 4096))
mx.eval(ops.rms_norm(x, None, 0.0))
child = os.fork()
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = run_python(program, MLXSERVE_THREADS="4")
    assert (result.returncode, result.stdout.strip()) == (0, "0"), result.stderr
