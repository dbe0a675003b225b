"""What goes into KV pages: rows, the pages themselves, and the pieces that tails are made of.

A tail is a page outside the pools, of the same layout. Tails are what a step writes where the pools cannot be
written while another step is in flight: each step makes its tails anew from those of the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxserve_kernels.decoder import Rope

NO_SOURCE = 0x7FFFFFFF
"""Source of a tail that begins empty."""
PIECE_SIZE = 8
"""Entries of a piece, of which four are used: Metal passes smaller inputs in another address space."""
TOKEN_SIZE = 8
"""Entries of a token, for the same reason."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """Keys and values in the layout of a pool (``ops.write_pages``): the pools themselves, or tails."""

    keys: mx.array
    values: mx.array


@dataclass(frozen=True, slots=True)
class KvRows:
    """New rows: k [T, H, D], v [T, H, Dv] of one dtype. With a rope k is rotated before it is written, and so
    is q [T, H_q, D] by positions int32 [T]; the two come with it."""

    k: mx.array
    v: mx.array
    q: mx.array | None = None
    positions: mx.array | None = None
    rope: Rope | None = None
