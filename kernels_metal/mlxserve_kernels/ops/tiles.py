"""Affine weights in the order in which the CPU's integer kernels read them."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels.dispatch import TILE_ROWS, extension, reads_quantized


def can_tile(
    scales: mx.array | None,
    biases: mx.array | None,
    num_rows: int,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
) -> bool:
    """Whether ``pack_tiles`` takes these weights here, and kernels for tiles are what runs."""
    cpu = extension()
    is_read = reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    has_tiles = mode == "affine" and bits in (4, 8) and num_rows % TILE_ROWS == 0
    return cpu is not None and bool(cpu.has_tiles()) and is_read and has_tiles


def pack_tiles(w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int) -> mx.array:
    """Affine weights of 4 or 8 bits (see ``quantized_matmul``) in the order in which the integer kernels read
    them: uint8 [N / 16, K / group_size, bytes], evaluated. Nothing is rounded. Needs ``can_tile``."""
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    tiles: mx.array = cpu.pack_tiles(w, scales, biases, group_size, bits)
    return tiles


def unpack_tiles(
    tiles: mx.array, *, group_size: int, bits: int, scale_dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """What ``pack_tiles`` was given: w, scales, biases."""
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    parts: tuple[mx.array, mx.array, mx.array] = cpu.unpack_tiles(tiles, group_size, bits, scale_dtype)
    return parts


def tiled_matmul(
    x: mx.array, tiles: mx.array, *, group_size: int, bits: int, scale_dtype: mx.Dtype
) -> mx.array:
    """``quantized_matmul`` with weights in tiles: x [..., K], returns [..., N] in the dtype of x. The
    gradient of x is that of ``quantized_matmul``, in float32.

    Activations become integers, 32 values sharing a power of two, and products are summed exactly; a block's
    sum is rounded to float32 once. By default the integers have 23 bits, and results are nearer to the true
    ones than float32 sums are (see docs/decisions.md); ``MLXSERVE_CPU_MATMUL`` makes them 15 or 7 bits. A
    block that holds an infinity or a NaN gives NaN.
    """
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    y: mx.array = cpu.tiled_matmul(x, tiles, group_size, bits, scale_dtype)
    return y


def tiled_rows(
    ids: mx.array, tiles: mx.array, *, group_size: int, bits: int, scale_dtype: mx.Dtype
) -> mx.array:
    """``embed_rows`` of weights in tiles."""
    cpu = extension()
    assert cpu is not None, "tiles need the extension"
    rows: mx.array = cpu.tiled_rows(ids, tiles, group_size, bits, scale_dtype)
    return rows
