"""Runs Metal kernels on a CPU, and finds what a GPU would only sometimes show.

    host = Host()
    body = "y[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];"
    double = host.metal_kernel("double", ["x"], ["y"], body)
    (y,) = double(
        inputs=[x], grid=(x.size, 1, 1), threadgroup=(256, 1, 1),
        output_shapes=[x.shape], output_dtypes=[x.dtype],
    )
    print(host.reports[-1].table())

`Host.metal_kernel` has the signature of mx.fast.metal_kernel and wraps a body as MLX does. A kernel that
breaks a rule raises MetalFault, whose `kind` and message say what, where and by which thread.
"""

from metal_on_host.errors import FAULT_KINDS, MetalCallError, MetalFault, MetalHostError, MetalSourceError
from metal_on_host.kernel import Host, metal_kernel
from metal_on_host.library import Library, compile_library, mlx_include
from metal_on_host.machine import Argument, Settings
from metal_on_host.report import BufferCost, Report, summary

__all__ = [
    "FAULT_KINDS",
    "Argument",
    "BufferCost",
    "Host",
    "Library",
    "MetalCallError",
    "MetalFault",
    "MetalHostError",
    "MetalSourceError",
    "Report",
    "Settings",
    "compile_library",
    "metal_kernel",
    "mlx_include",
    "summary",
]
