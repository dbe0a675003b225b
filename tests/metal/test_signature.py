"""The wrapped source, byte for byte what the installed MLX makes: exporting a call prints it on Linux."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_on_host import Host, MetalCallError, Settings
from metal_on_host.signature import Body, generate, kernel_name

EVERY_ATTRIBUTE = """
uint n = dispatch_quadgroups_per_threadgroup + dispatch_simdgroups_per_threadgroup + grid_origin.x;
n += dispatch_threads_per_threadgroup.x + quadgroup_index_in_threadgroup + quadgroups_per_threadgroup;
n += simdgroup_index_in_threadgroup + simdgroups_per_threadgroup + thread_execution_width + grid_size.x;
n += thread_index_in_quadgroup;
n += thread_index_in_simdgroup + thread_index_in_threadgroup + thread_position_in_threadgroup.x;
n += threadgroup_position_in_grid.x + threadgroups_per_grid.x + threads_per_grid.x + threads_per_simdgroup;
"""


def mlx_source(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    body: Body,
    inputs: Sequence[mx.array],
    dtypes: Sequence[mx.Dtype],
    template: list[tuple[str, Any]],
) -> str:
    kernel = mx.fast.metal_kernel(
        body.name,
        list(body.input_names),
        list(body.output_names),
        body.source,
        body.header,
        True,
        body.atomic_outputs,
    )

    def call(*arrays: mx.array) -> list[mx.array]:
        result: list[mx.array] = kernel(
            inputs=list(arrays),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(dtypes),
            output_dtypes=list(dtypes),
            template=template,
            verbose=True,
        )
        return result

    capfd.readouterr()
    mx.export_function(str(tmp_path / "kernel.mlxfn"), call, *inputs)
    printed = capfd.readouterr().out
    return printed.split("```\n", 1)[1].rsplit("\n```", 1)[0]


BODIES = [
    ("y[thread_position_in_grid.x] = x[0] + w[0];", False),
    ("y[0] = x[x_shape[0]];", False),
    ("y[0] = x[x_strides[0]] + w[w_ndim];", False),
    ("y[0] = x_shape[0] + x_strides[0] + x_ndim + w_shape[0] + w_strides[0] + w_ndim;", True),
    (EVERY_ATTRIBUTE + "y[thread_position_in_grid.x] = n;", False),
    ("int my_x_shape_is_no_shape = 0; y[0] = 1;", False),
]
TEMPLATES: list[list[tuple[str, Any]]] = [
    [],
    [("T", mx.bfloat16)],
    [("N", -3), ("B", True), ("C", False), ("T", mx.uint32), ("U", mx.complex64)],
]
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((8,), (7,)),
    ((), (2, 4)),
    ((1,), ()),
    ((3, 5), (2, 2, 2)),
]


@pytest.mark.parametrize(("body_text", "atomic"), BODIES)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shapes", SHAPES)
def test_source_is_mlx_s_own(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    body_text: str,
    atomic: bool,
    template: list[tuple[str, Any]],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    body = Body("probe", ("x", "w"), ("y", "z"), body_text, "// header\n", atomic)
    inputs = [mx.zeros(shapes[0], mx.float16), mx.zeros(shapes[1], mx.int64)]
    dtypes = [mx.float32, mx.uint8]
    assert generate(body, inputs, dtypes, template).text == mlx_source(
        capfd, tmp_path, body, inputs, dtypes, template
    )


def test_every_dtype_has_mlx_s_name(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    dtypes = [mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64]
    dtypes += [mx.float16, mx.bfloat16, mx.float32, mx.complex64]
    for dtype, size in itertools.product(dtypes, (1, 9)):
        body = Body("probe", ("x",), ("y",), "y[0] = x[0];")
        inputs = [mx.zeros((size,), dtype)]
        assert generate(body, inputs, [dtype], []).text == mlx_source(
            capfd, tmp_path, body, inputs, [dtype], []
        )


def test_name_encodes_how_inputs_are_passed() -> None:
    body = Body("k", ("a", "b", "c"), ("y",), "")
    inputs = [mx.array(1.0), mx.zeros((7,)), mx.zeros((8,))]
    assert kernel_name(body, inputs, [mx.float16], [("N", 4), ("B", True)]) == (
        "custom_kernel_k__4_1_float" + "s_floatc_float_float16_t"
    )


def test_wrong_calls_are_refused_as_by_mlx(cache_dir: Path) -> None:
    host = Host(Settings(cache_dir=cache_dir))
    with pytest.raises(MetalCallError, match="at least one output"):
        host.metal_kernel("k", ["x"], [], "")
    with pytest.raises(MetalCallError, match="Unknown compile option `fast`"):
        host.metal_kernel("k", ["x"], ["y"], "", compile_options={"fast": "yes"})
    with pytest.raises(MetalCallError, match="'safe', 'relaxed', or 'fast'"):
        host.metal_kernel("k", ["x"], ["y"], "", compile_options={"math_mode": "wild"})
    kernel = host.metal_kernel("k", ["x"], ["y"], "y[0] = x;")
    call: dict[str, Any] = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    call |= {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    with pytest.raises(MetalCallError, match="Expected `inputs` to have size 1 but got size 2"):
        kernel(inputs=[1.0, 2.0], **call)
    with pytest.raises(MetalCallError, match="Expected `output_shapes` to have size 1 but got size 0"):
        kernel(inputs=[1.0], **(call | {"output_shapes": []}))
    with pytest.raises(MetalCallError, match=r"Thread group size \(2048\)"):
        kernel(inputs=[1.0], **(call | {"threadgroup": (64, 32, 1)}))
    with pytest.raises(MetalCallError, match="must be at least 1"):
        kernel(inputs=[1.0], **(call | {"grid": (0, 1, 1)}))
