"""Imported GGUF files through the loader, against a forward in numpy of what the files hold.

The weights of the reference come from the ``gguf`` package, its arithmetic from the papers: names, row
orders, norm conventions, windows, rope bases and block formats are judged at once.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.models.loader import LoadedModel, load_model
from mlxserve.models.paged import ModelPages, PagedMetadata
from mlxserve.text.tokenizer import load_tokenizer
from tests.real.numpy_reference import NumpyModel

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

LIMIT = 1e-3
PAGE = 32
CHUNK = 200
"""No multiple of a page: chunks end inside of one."""
SHOWN = 16
"""Positions at the end of a prompt whose logits are compared."""
LONG = "The ship left the harbour at dawn, and the crew sang as they hauled the lines aboard. " * 40
PROMPTS = (
    "The capital city of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:",
    "Die Würde des Menschen ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
    "  Two spaces, a\ttab and an emoji: 🚢",
    "Q: Why do cats purr?\nA:",
    "日本の首都は",
    LONG,
)


def paged_logits(model: LoadedModel, tokens: list[int], last: int) -> np.ndarray:
    """Of the last positions, computed in chunks over pages that do not lie in order."""
    count = -(-len(tokens) // PAGE)
    pages = ModelPages(model.layers, PAGE)
    pages.resize(count + 1)
    table = list(range(count, 0, -1))
    results = []
    for start in range(0, len(tokens), CHUNK):
        stop = min(start + CHUNK, len(tokens))
        positions = range(start, stop)
        slots = [table[p // PAGE] * PAGE + p % PAGE for p in positions]
        metadata = PagedMetadata(
            positions=mx.array(list(positions), dtype=mx.int32),
            slot_mapping=mx.array(slots, dtype=mx.int32),
            block_tables=mx.array([table], dtype=mx.int32),
            q_starts=mx.array([0, stop - start], dtype=mx.int32),
            kv_lens=mx.array([stop], dtype=mx.int32),
        )
        rows = [p - start for p in positions if p >= len(tokens) - last]
        logits = model.logits(
            mx.array(tokens[start:stop], dtype=mx.int32),
            pages,
            metadata,
            mx.array(rows or [0], dtype=mx.int32),
        )
        results.append(np.array(logits)[: len(rows)])
    return np.concatenate(results)


def check(folder: Path, reference: NumpyModel, window: int | None) -> None:
    tokenizer = load_tokenizer(folder)
    model = load_model(folder)
    assert model.num_fused_layers == reference.settings.layers
    lengths = []
    for prompt in PROMPTS:
        tokens = list(tokenizer.encode(prompt))
        lengths.append(len(tokens))
        expected = reference.logits(tokens, last=SHOWN)
        found = paged_logits(model, tokens, SHOWN)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < LIMIT, prompt[:40]
    assert window is None or max(lengths) > window + 2 * SHOWN


def test_smollm2(smollm2_folder: Path, smollm2_reference: NumpyModel) -> None:
    check(smollm2_folder, smollm2_reference, None)


def test_gemma3_within_and_beyond_its_window(gemma3_folder: Path, gemma3_reference: NumpyModel) -> None:
    check(gemma3_folder, gemma3_reference, gemma3_reference.settings.window)
