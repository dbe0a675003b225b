"""The source that mx.fast.metal_kernel makes of a body, byte for byte (mlx/backend/common/metal_kernel.cpp).

Its rules: inputs, then outputs, then attributes; an input of fewer than 8 elements is `constant`, others
`device`; one of no dimensions is a reference; `<name>_shape`, `_strides` and `_ndim` follow an input of at
least one dimension where their names occur anywhere in the body; attributes where theirs do, in a fixed
order; template arguments are int, bool or a dtype. tests/metal/test_signature.py compares the text with MLX's
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

TemplateArgument = int | bool | mx.Dtype
MAX_CONSTANT_SIZE = 8

_TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.float64: "double",
    mx.complex64: "complex64_t",
}

_ATTRIBUTE_TYPES = (
    ("dispatch_quadgroups_per_threadgroup", "uint"),
    ("dispatch_simdgroups_per_threadgroup", "uint"),
    ("dispatch_threads_per_threadgroup", "uint3"),
    ("grid_origin", "uint3"),
    ("grid_size", "uint3"),
    ("quadgroup_index_in_threadgroup", "uint"),
    ("quadgroups_per_threadgroup", "uint"),
    ("simdgroup_index_in_threadgroup", "uint"),
    ("simdgroups_per_threadgroup", "uint"),
    ("thread_execution_width", "uint"),
    ("thread_index_in_quadgroup", "uint"),
    ("thread_index_in_simdgroup", "uint"),
    ("thread_index_in_threadgroup", "uint"),
    ("thread_position_in_grid", "uint3"),
    ("thread_position_in_threadgroup", "uint3"),
    ("threadgroup_position_in_grid", "uint3"),
    ("threadgroups_per_grid", "uint3"),
    ("threads_per_grid", "uint3"),
    ("threads_per_simdgroup", "uint"),
    ("threads_per_threadgroup", "uint3"),
)


def type_name(dtype: mx.Dtype) -> str:
    """MLX's name of a dtype in Metal, e.g. `float16_t`."""
    return _TYPE_NAMES[dtype]


@dataclass(frozen=True, slots=True)
class ShapeInfo:
    """Which of `<name>_shape`, `<name>_strides` and `<name>_ndim` the body mentions."""

    has_shape: bool
    has_strides: bool
    has_ndim: bool

    @classmethod
    def of(cls, name: str, body: str) -> ShapeInfo:
        return cls(f"{name}_shape" in body, f"{name}_strides" in body, f"{name}_ndim" in body)


@dataclass(frozen=True, slots=True)
class Body:
    """What mx.fast.metal_kernel is given once."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    atomic_outputs: bool = False

    @property
    def shape_infos(self) -> tuple[ShapeInfo, ...]:
        return tuple(ShapeInfo.of(name, self.source) for name in self.input_names)

    @property
    def attributes(self) -> list[str]:
        return [f"  {kind} {name} [[{name}]]" for name, kind in _ATTRIBUTE_TYPES if name in self.source]


def _template_definition(template: Sequence[tuple[str, TemplateArgument]]) -> str:
    arguments = (type_name(v) if isinstance(v, mx.Dtype) else str(int(v)) for _, v in template)
    return f"<{', '.join(arguments)}>"


def kernel_name(
    body: Body,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, TemplateArgument]],
) -> str:
    """The function's name: it encodes template arguments, dtypes and how each input is passed."""
    name = f"custom_kernel_{body.name}"
    if template:
        definition = _template_definition(template).replace(", ", "_")
        name += "_" + definition.replace("<", "_").replace(">", "_").replace("-", "_")[:-1]
    for array in inputs:
        name += f"_{type_name(array.dtype)}"
        if array.ndim == 0:
            name += "s"
        elif array.size < MAX_CONSTANT_SIZE:
            name += "c"
    return name + "".join(f"_{type_name(dtype)}" for dtype in output_dtypes)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The parts of the source MLX would compile, behind its own `utils.h`."""

    name: str
    header: str
    signature: str
    body: str
    end: str

    @property
    def text(self) -> str:
        """What MLX makes, byte for byte."""
        return self.header + self.signature + self.body + self.end

    def marked(self, label: str) -> str:
        """The same with line markers, so that messages say `label/body.metal:3` or `label/header.metal:7`."""
        parts = [f'#line 1 "{label}/header.metal"\n', self.header]
        if not self.header or self.header.endswith("\n"):
            parts.append(f'#line 1 "{label}/signature"\n')
        parts += [self.signature, f'#line 1 "{label}/body.metal"\n', self.body, self.end]
        return "".join(parts)


def generate(
    body: Body,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, TemplateArgument]],
) -> Wrapped:
    """Wraps a body for these inputs, outputs and template arguments."""
    name = kernel_name(body, inputs, output_dtypes, template)
    signature, end = "", "\n}\n"
    if template:
        kinds = (
            "typename" if isinstance(v, mx.Dtype) else "bool" if isinstance(v, bool) else "int"
            for _, v in template
        )
        arguments = (f"{kind} {n}" for kind, (n, _) in zip(kinds, template, strict=True))
        signature = f"template <{', '.join(arguments)}>\n"
        definition = name + _template_definition(template)
        end += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({definition}) {definition};\n'
    signature += f"[[kernel]] void {name}(\n" + _parameters(body, inputs, output_dtypes)
    return Wrapped(name, body.header, signature, body.source, end)


def _parameters(body: Body, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]) -> str:
    text, index = "", 0
    for name, array, info in zip(body.input_names, inputs, body.shape_infos, strict=True):
        space = "constant" if array.size < MAX_CONSTANT_SIZE else "device"
        mark = "&" if array.ndim == 0 else "*"
        text += f"  const {space} {type_name(array.dtype)}{mark} {name} [[buffer({index})]],\n"
        index += 1
        for kind, suffix, wanted in (
            ("int*", "shape", info.has_shape),
            ("int64_t*", "strides", info.has_strides),
            ("int&", "ndim", info.has_ndim),
        ):
            if wanted and array.ndim > 0:
                text += f"  const constant {kind} {name}_{suffix} [[buffer({index})]],\n"
                index += 1
    attributes = body.attributes
    for name, dtype in zip(body.output_names, output_dtypes, strict=True):
        kind = f"atomic<{type_name(dtype)}>" if body.atomic_outputs else type_name(dtype)
        # MLX compares the buffer's index, shape arguments counted, with the number of arrays.
        is_last = index >= len(inputs) + len(body.output_names) - 1 and not attributes
        text += f"  device {kind}* {name} [[buffer({index})]]" + (") {\n" if is_last else ",\n")
        index += 1
    if attributes:
        text += ",\n".join(attributes) + ") {\n"
    return text
