"""The kernels: one public function an op. Each runs what ``dispatch`` picked, the C++ extension or the Metal
kernels, where the arguments are of a kind that it has; all else runs the twin in ``reference``, that is mlx's
own ops.

The extension has: activations of float32, float16 or bfloat16, the last two computed in float32 and rounded
once, at the end; affine weights of 2, 3, 4, 5, 6 or 8 bits with groups of 32, 64 or 128; mxfp4, mxfp8 and
nvfp4 weights (K a multiple of 32); dense weights and KV pools of float32, float16 or bfloat16, and quantized
KV pools. There the result of a row does not depend on the other rows of the call, on its place among them, on
page placement or on the number of threads: its bits are equal. quantized_matmul, tiled_matmul, linear,
rms_norm, silu_mul and gelu_mul have gradients; one of quantized weights raises ValueError.

The Metal kernels have: add and RMS norm, products of affine, mxfp4, mxfp8 and nvfp4 weights, also of gate
and up together and of experts, adapters, attention over pages of floats and of 8- and 4-bit integers, and the
ways of ``dispatch.page_route`` to write pages; all for float32, float16 and bfloat16. A row's bits depend on
nothing beside it as long as the same kernels run: see ``many_rows`` in docs/decisions.md. They have no
gradients.

All functions are lazy as mlx ops are. The extension raises ValueError at the call for wrong shapes and
dtypes, and RuntimeError when the result is evaluated for wrong *values* of index arrays, such as a slot
outside the pool (``reference`` cannot see those: there the caller must be right).
"""

from mlxserve_kernels.dispatch import num_threads
from mlxserve_kernels.ops.attention import paged_attention
from mlxserve_kernels.ops.expert_products import gated_experts, gather_matmul, route
from mlxserve_kernels.ops.low_rank import lora_delta
from mlxserve_kernels.ops.page_routes import copy_through, order_behind, write_tails, write_through
from mlxserve_kernels.ops.pages import copy_pages, resize_rows, rope_and_write_pages, rotate, write_pages
from mlxserve_kernels.ops.products import embed_rows, linear, quantized_matmul
from mlxserve_kernels.ops.projections import gate_up, own_rows, project
from mlxserve_kernels.ops.quantization import SEARCH_EFFORT, quantize
from mlxserve_kernels.ops.rows import gelu_mul, rms_norm, silu_mul
from mlxserve_kernels.ops.sampling import greedy_tokens, sample_tokens
from mlxserve_kernels.ops.state import implementation, release_thread, supports_steps_in_flight
from mlxserve_kernels.ops.tiles import can_tile, pack_tiles, tiled_matmul, tiled_rows, unpack_tiles
from mlxserve_kernels.ops.training import (
    adapted_linear,
    causal_attention,
    cross_entropy_head,
    matmul,
    rotate_heads,
)

__all__ = [
    "SEARCH_EFFORT",
    "adapted_linear",
    "can_tile",
    "causal_attention",
    "copy_pages",
    "copy_through",
    "cross_entropy_head",
    "embed_rows",
    "gate_up",
    "gated_experts",
    "gather_matmul",
    "gelu_mul",
    "greedy_tokens",
    "implementation",
    "linear",
    "lora_delta",
    "matmul",
    "num_threads",
    "order_behind",
    "own_rows",
    "pack_tiles",
    "paged_attention",
    "project",
    "quantize",
    "quantized_matmul",
    "release_thread",
    "resize_rows",
    "rms_norm",
    "rope_and_write_pages",
    "rotate",
    "rotate_heads",
    "route",
    "sample_tokens",
    "silu_mul",
    "supports_steps_in_flight",
    "tiled_matmul",
    "tiled_rows",
    "unpack_tiles",
    "write_pages",
    "write_tails",
    "write_through",
]
