"""The check that a written folder loads in stock mlx-lm and computes numbers."""

from __future__ import annotations

from pathlib import Path

import psutil

from mlxserve.errors import ConversionError

_MEMORY_SHARE = 0.4
_TOKENS = 4


def verify_folder(folder: Path, num_bytes: int) -> str:
    """Loads the folder with mlx-lm, runs a few tokens in float32 and returns a sentence about it.

    Skipped, and said so, when the model would take a large part of this machine's free memory.
    Raises ConversionError when loading fails or a logit is not finite.
    """
    available = psutil.virtual_memory().available
    if num_bytes * 2 > available * _MEMORY_SHARE:
        return (
            f"not checked: {num_bytes / 1e9:.1f} GB is too large for the {available / 1e9:.1f} GB free here"
        )
    import mlx.core as mx
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(folder, lazy=True)
        # Float16 is emulated on CPUs and overflows earlier: it would test the machine, not the folder.
        model.set_dtype(mx.float32)
        vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or _TOKENS
        step = max(vocabulary // _TOKENS, 1)
        tokens = mx.array([[index * step % vocabulary for index in range(_TOKENS)]])
        logits = model(tokens)
        is_finite = bool(mx.all(mx.isfinite(logits)))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, FileNotFoundError) as error:
        reason = str(error).replace("\n", " ")
        raise ConversionError(f"the result does not load in mlx-lm: {reason[:300]}") from error
    if not is_finite:
        raise ConversionError(
            f"the result is broken: the logits of {_TOKENS} tokens hold NaN or infinite values, nothing "
            "was kept"
        )
    return f"loads in mlx-lm, logits of {_TOKENS} tokens are finite"
