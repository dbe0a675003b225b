"""Custom Metal kernels, a method each: templates, grid, threadgroup and output shapes are computed here.

``MetalKernels()`` runs them on the Mac's GPU. Given another maker with the signature of mx.fast.metal_kernel,
as metal_on_host has, the same Python runs elsewhere.
"""

from __future__ import annotations

from mlxserve_kernels.metal_kernels.adapters import AdapterKernels
from mlxserve_kernels.metal_kernels.attention import AttentionKernels
from mlxserve_kernels.metal_kernels.experts import ExpertKernels
from mlxserve_kernels.metal_kernels.maker import KernelMaker, mlx_maker
from mlxserve_kernels.metal_kernels.matmul import MatmulKernels
from mlxserve_kernels.metal_kernels.norms import NormKernels
from mlxserve_kernels.metal_kernels.pages import PageKernels


class MetalKernels:
    """All kernels, by what they do."""

    def __init__(self, make: KernelMaker | None = None) -> None:
        make = make or mlx_maker()
        self.adapters = AdapterKernels(make)
        self.experts = ExpertKernels(make)
        self.matmul = MatmulKernels(make)
        self.attention = AttentionKernels(make)
        self.norms = NormKernels(make)
        self.pages = PageKernels(make)
