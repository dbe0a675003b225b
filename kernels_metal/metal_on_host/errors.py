"""What the harness raises.

MetalHostError
├── MetalSourceError    the source does not compile, or Metal would refuse it; the text is the compiler's
├── MetalCallError      the call's arguments are wrong (what mx.fast.metal_kernel answers with ValueError)
└── MetalFault          the kernel ran and did something wrong; `kind` says what
"""

from __future__ import annotations


class MetalHostError(Exception):
    """Base of everything the harness raises."""


class MetalSourceError(MetalHostError):
    """The source does not compile, or Metal would refuse it."""


class MetalCallError(MetalHostError, ValueError):
    """Wrong arguments: sizes, dtypes, grid or threadgroup."""


class MetalFault(MetalHostError):
    """A kernel broke a rule while it ran.

    `kind` is one of FAULT_KINDS; the message names kernel, buffer, index, thread and line.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


FAULT_KINDS = (
    "none",
    "out of bounds",
    "race",
    "uninitialised read",
    "misaligned access",
    "write to an input",
    "divergent barrier",
    "divergent simdgroup function",
    "wrong lane",
    "threadgroup memory limit",
    "access limit",
    "undefined arithmetic",
    "unwritten output",
    "schedule dependence",
)
"""In the order of the runtime's `enum Fault`."""
