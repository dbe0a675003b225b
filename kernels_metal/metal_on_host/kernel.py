"""A callable with the signature of mx.fast.metal_kernel that runs the kernel on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from metal_on_host.arrays import from_bytes, to_bytes, write_back
from metal_on_host.errors import MetalCallError, MetalSourceError
from metal_on_host.library import Library, compile_library, mlx_include
from metal_on_host.machine import Argument, Settings, Triple
from metal_on_host.report import Report
from metal_on_host.signature import Body, TemplateArgument, Wrapped, generate

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"', re.MULTILINE)

Scalar = bool | int | float
KernelCall = Callable[..., list[mx.array]]

_PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n'
"""MLX compiles every custom kernel behind these declarations."""


@dataclass(slots=True)
class Host:
    """Runs kernels under `settings` and keeps the report of every launch in `reports`, oldest first."""

    settings: Settings = field(default_factory=Settings)
    reports: list[Report] = field(default_factory=list)

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: Mapping[str, str] | None = None,
    ) -> KernelCall:
        """mx.fast.metal_kernel, here. The call it returns takes keywords alone: `inputs`, `output_shapes`,
        `output_dtypes`, `grid` (threads), `threadgroup`, and optionally `template`, `init_value`, `verbose`,
        `stream`.

        The call raises MetalSourceError, MetalCallError or MetalFault. `compile_options["math_mode"]` is
        checked; all modes compute alike here. `stream` is accepted: a launch is done when the call returns.
        """
        if not output_names:
            raise MetalCallError("[metal_kernel] Must specify at least one output.")
        _check_options(compile_options)
        for text in (header, source):
            if _INCLUDE.search(text):
                raise MetalSourceError(f'{name}: error: #include "...": the device compiler has no such path')
        body = Body(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs)
        return _Call(self, body, ensure_row_contiguous)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
) -> KernelCall:
    """Host().metal_kernel: default settings, reports not kept."""
    return Host().metal_kernel(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
    )


def _check_options(options: Mapping[str, str] | None) -> None:
    for key, value in (options or {}).items():
        if key != "math_mode":
            raise MetalCallError(f"[metal_kernel] Unknown compile option `{key}`.")
        if value not in ("safe", "relaxed", "fast"):
            raise MetalCallError("[metal_kernel] Expected math_mode to be 'safe', 'relaxed', or 'fast'.")


@dataclass(frozen=True, slots=True)
class _Call:
    host: Host
    body: Body
    ensure_row_contiguous: bool

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | Scalar],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Triple,
        threadgroup: Triple,
        template: Sequence[tuple[str, TemplateArgument]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        for given, expected, what in (
            (len(arrays), len(self.body.input_names), "inputs"),
            (len(output_shapes), len(self.body.output_names), "output_shapes"),
            (len(output_dtypes), len(self.body.output_names), "output_dtypes"),
        ):
            if given != expected:
                raise MetalCallError(
                    f"[metal_kernel] Expected `{what}` to have size {expected} but got size {given}."
                )
        wrapped = generate(self.body, arrays, output_dtypes, template or ())
        if verbose:
            # As MLX does, to the same place.
            print(f"Generated source code for `{self.body.name}`:\n```\n{wrapped.text}\n```")  # noqa: T201
        library = self._library(wrapped)
        bound = self._inputs(arrays)
        outputs = [
            _output(n, shape, dtype, init_value)
            for n, shape, dtype in zip(self.body.output_names, output_shapes, output_dtypes, strict=True)
        ]
        report = library.launch(
            wrapped.name,
            [*bound, *outputs],
            _triple(grid),
            _triple(threadgroup),
            self.host.settings,
            label=self.body.name,
        )
        self.host.reports.append(report)
        for array, argument in zip(arrays, (a for a in bound if a.is_counted), strict=True):
            if argument.is_written:
                write_back(array, argument.data)
        return [
            from_bytes(o.data, shape, dtype)
            for o, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _library(self, wrapped: Wrapped) -> Library:
        return compile_library(
            _PREAMBLE + wrapped.marked(self.body.name),
            include_dirs=(mlx_include(),),
            cache_dir=self.host.settings.cache_dir,
        )

    def _inputs(self, arrays: Sequence[mx.array]) -> list[Argument]:
        bound: list[Argument] = []
        for name, array, info in zip(self.body.input_names, arrays, self.body.shape_infos, strict=True):
            data, strides = to_bytes(array, make_contiguous=self.ensure_row_contiguous)
            is_written = name in self.host.settings.writable_inputs
            bound.append(Argument(name, data, array.itemsize, is_written=is_written))
            for suffix, wanted, values, kind in (
                ("shape", info.has_shape, array.shape, np.int32),
                ("strides", info.has_strides, strides, np.int64),
                ("ndim", info.has_ndim, (array.ndim,), np.int32),
            ):
                if wanted and array.ndim > 0:
                    numbers = np.array(values, kind)
                    bound.append(
                        Argument(
                            f"{name}_{suffix}", numbers.view(np.uint8), numbers.itemsize, is_counted=False
                        )
                    )
        return bound


def _triple(values: Sequence[int]) -> Triple:
    x, y, z = (int(v) for v in values)
    return x, y, z


def _output(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Argument:
    if init_value is None:
        size = int(np.prod(tuple(shape), dtype=np.int64)) * dtype.size
        return Argument(name, np.empty(size, np.uint8), dtype.size, is_written=True, is_initialised=False)
    data, _ = to_bytes(mx.full(tuple(shape), init_value, dtype=dtype), make_contiguous=True)
    return Argument(name, data, dtype.size, is_written=True)
