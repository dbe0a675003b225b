"""The tokenizer and the templates of the case "prompts that are masked, rows that are cut"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from mlxserve.text.chat_template import ChatTemplate, load_chat_template
from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.text.tokenizer import load_tokenizer
from mlxserve.tuning.examples import Example

CONTROLS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|think|>", "<|/think|>", "<|eos|>")
ADDS_THOUGHT = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|><|think|><|/think|>{%- endif -%}"
)
DROPS_OLD_THOUGHTS = (
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.role == 'assistant' and not loop.last and '</think>' in m.content -%}"
    "{{ m.content.split('</think>')[1] }}{%- else -%}{{ m.content }}{%- endif -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def write_model(
    folder: Path, template: str | None, *, eos: str = "<|eos|>", controls: tuple[str, ...] = CONTROLS
) -> Path:
    """Each control text is one token, every other character is one token."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*characters, *controls])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"eos_token": eos} if eos else {})))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def text_tools(
    folder: Path, template: str | None, **options: Any
) -> tuple[FolderTokenizer, ChatTemplate | None]:
    write_model(folder, template, **options)
    tokenizer = load_tokenizer(folder)
    return tokenizer, load_chat_template(folder, tokenizer)


def names(folder: Path, ids: Any) -> list[str]:
    """The tokens of some ids, by name."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.id_to_token(i) for i in ids]


def trained(folder: Path, example: Example) -> list[str]:
    pairs = zip(example.token_ids, example.is_trained, strict=True)
    return names(folder, [token_id for token_id, is_trained in pairs if is_trained])


def offset(example: Example) -> int:
    """Where the trained tokens begin; they must go on to the end."""
    start = example.is_trained.index(True)
    assert all(example.is_trained[start:])
    return start
