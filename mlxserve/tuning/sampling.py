"""Greedy answers of a model in training, to be looked at: before and after."""

from __future__ import annotations

import mlx.core as mx

from mlxserve.text.chat_template import ChatTemplate
from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.tuning.training_model import TrainingModel


def prompt_ids(tokenizer: FolderTokenizer, template: ChatTemplate | None, prompt: str) -> tuple[int, ...]:
    """A prompt as a user's message, or as it is where there is no chat template."""
    if template is None:
        return tuple(tokenizer.encode(prompt))
    rendered = template.render([{"role": "user", "content": prompt}])
    return tuple(tokenizer.encode_rendered(rendered))


def sample_text(
    model: TrainingModel, tokenizer: FolderTokenizer, ids: tuple[int, ...], *, max_tokens: int
) -> str:
    """What greedy decoding adds to ``ids``, up to an end token, with mlx-lm's caches."""
    model.module.eval()
    caches = model.make_caches()
    tokens, answer = list(ids), list[int]()
    for _ in range(max_tokens):
        logits = model.next_logits(mx.array([tokens], dtype=mx.int32), caches)
        token = int(mx.argmax(logits).item())  # type: ignore[arg-type]
        if token in tokenizer.eos_ids:
            break
        answer.append(token)
        tokens = [token]
    model.module.train()
    return tokenizer.decode(answer)
