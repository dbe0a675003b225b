"""Training rows through SmolLM2's own tokenizer and template, held against mlx-lm's data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.text.chat_template import load_chat_template
from mlxserve.text.tokenizer import load_tokenizer
from mlxserve.tuning.masking import ExampleMaker, Mask
from mlxserve.tuning.rows import FieldNames, make_reader

pytestmark = pytest.mark.real

ANSWER = "Paris,\n\n1. naïve café 🚀\n```python\nprint('x')\n```  "
LINES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there!"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Capital of France?"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": " and Japan?\n"},
            {"role": "assistant", "content": "Tokyo"},
        ]
    },
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "nothing", "completion": ""},
    {"text": "Once upon a time\n\n there was 日本語 text."},
    {"text": "  leading"},
]


@pytest.mark.parametrize("mask", ["last", "none"])
def test_tokens_and_offsets_are_those_of_mlx_lm(smollm2_folder: Path, mask: Mask) -> None:
    from mlx_lm.tokenizer_utils import load as load_stock
    from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset

    stock = load_stock(smollm2_folder)
    tokenizer = load_tokenizer(smollm2_folder)
    maker = ExampleMaker(tokenizer, load_chat_template(smollm2_folder, tokenizer), mask)
    for line in LINES:
        is_masked = mask == "last"
        if "text" in line:
            ids, start = TextDataset([line], stock).process(line)
        elif "prompt" in line:
            ids, start = CompletionsDataset([line], stock, "prompt", "completion", is_masked).process(line)
        else:
            ids, start = ChatDataset([line], stock, mask_prompt=is_masked).process(line)
        example = maker.make(make_reader(line, FieldNames()).read(line), "x:1")
        assert list(example.token_ids) == list(ids)
        assert list(example.is_trained) == [i >= max(start, 1) for i in range(len(ids))]


def test_a_reply_whose_beginning_melts_into_the_prompts_end(smollm2_folder: Path) -> None:
    """The line end of the prompt and those of the reply are one token, which mlx-lm leaves out."""
    tokenizer = load_tokenizer(smollm2_folder)
    maker = ExampleMaker(tokenizer, load_chat_template(smollm2_folder, tokenizer), "last")
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "\n\nTokyo"}]
    example = maker.make(
        make_reader({"messages": messages}, FieldNames()).read({"messages": messages}), "x:1"
    )
    start = example.is_trained.index(True)
    assert tokenizer.decode(example.token_ids[start:]) == "\n\n\nTokyo\n"
