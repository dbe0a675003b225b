"""Kernel functions as the rewriter finds them, and the entry points through which the runtime calls them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from metal_on_host.errors import MetalSourceError

ATTRIBUTES = (
    "dispatch_quadgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "grid_origin",
    "grid_size",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_threadgroup",
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_simdgroup",
    "threads_per_threadgroup",
)
"""In the order of the runtime's `enum Attribute`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: a buffer (`index`) or a position (`attribute`)."""

    name: str
    type: str
    index: int | None
    attribute: str | None

    @property
    def is_reference(self) -> bool:
        return self.type.endswith("&")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel function; `template` is its template parameter list without the brackets, or None."""

    name: str
    template: str | None
    parameters: tuple[Parameter, ...]

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        return tuple(sorted((p for p in self.parameters if p.index is not None), key=lambda p: p.index or 0))


@dataclass(frozen=True, slots=True)
class Entry:
    """An instantiation that can be launched: `symbol` in the shared object runs `expression`."""

    host_name: str
    kernel: Kernel
    expression: str
    symbol: str


def entry_code(entries: list[Entry]) -> str:
    lines = ['# 1 "<entry points>"']
    for entry in entries:
        kernel = entry.kernel
        if kernel.template is not None and not any(
            kernel is e.kernel for e in entries[: entries.index(entry)]
        ):
            lines.append(
                f"template <{kernel.template}> inline void mtl_call_{kernel.name}() {{ {_call(kernel)} }}"
            )
        body = _call(kernel) if kernel.template is None else f"mtl_call_{entry.expression}();"
        lines.append(f'extern "C" void {entry.symbol}() {{ {body} }}')
    return "\n".join(lines) + "\n"


def _call(kernel: Kernel) -> str:
    arguments = []
    for p in kernel.parameters:
        if p.index is not None:
            kind = p.type[:-1] + "*" if p.is_reference else p.type
            arguments.append(f"{'*' if p.is_reference else ''}(({kind})mtl_argument({p.index}))")
        else:
            arguments.append(_attribute(p))
    names = "" if kernel.template is None else f"<{', '.join(_template_names(kernel.template))}>"
    return f"{kernel.name}{names}({', '.join(arguments)});"


def _attribute(parameter: Parameter) -> str:
    match = re.fullmatch(r"(?:const )?(u?int|u?short)([23]?)", parameter.type)
    if match is None or parameter.attribute is None:
        raise MetalSourceError(f"kernel parameter `{parameter.name}` of type {parameter.type} is no position")
    which = ATTRIBUTES.index(parameter.attribute)
    axes = ", ".join(
        f"({match.group(1)})mtl_attribute({which}, {axis})" for axis in range(int(match.group(2) or 1))
    )
    return f"{match.group(1)}{match.group(2)}{{{axes}}}"


def _template_names(template: str) -> list[str]:
    names, depth, part = [], 0, ""
    for character in template + ",":
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            names.append(re.split(r"\s*=", part)[0].split()[-1])
            part = ""
        else:
            part += character
    return names
