"""Tokenizers of model folders: loading, end tokens, rendered prompts, incremental detokenizing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from mlxserve.errors import ModelLoadError
from mlxserve.text.chat_template import load_chat_template
from mlxserve.text.folder_tokenizer import FolderTokenizer
from mlxserve.text.tokenizer import load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It costs 12,50 € on Monday.",
    "Grüße aus Köln 🚀👩‍👩‍👧 naïve café e\u0301 日本語のテキスト 한국어 नमस्ते \t tabs\n\nand lines",
    "user assistant system think tool call im_end end of turn <tag> </tag> | < >",
] * 4
TEXTS = [
    "Hello world",
    "🚀 emoji 👩‍👩‍👧 family, flags 🇫🇷",
    "日本語 と 한국어",
    "e\u0301 combining n\u0303, नमस्ते",
    " leading and  double ",
    "tab\tline\n\n\nend\n",
    "\x00\x7f\u2028 odd ones",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken("</think>", special=False, normalized=False), AddedToken("é日", special=False)]
    )
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """As converted Llama 2 tokenizers are: byte fallback, a space put in front and taken away again."""
    pieces = [
        *SPECIAL,
        *(f"<0x{value:02X}>" for value in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyzHW",
        "▁▁",
    ]
    merges = [("▁", "▁"), ("l", "l"), ("o", "r"), ("▁", "w"), ("<", "s")]
    pieces += ["ll", "or", "▁w", "<", ">", "<s"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=SPECIAL, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece_bpe": sentencepiece_bpe,
    "unigram": unigram,
    "word_piece": word_piece,
}


def save(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, FolderTokenizer]]:
    result = {}
    for name, make in MAKERS.items():
        tokenizer = make()
        folder = save(tmp_path_factory.mktemp(name), tokenizer, tokenizer_config={"bos_token": "<s>"})
        result[name] = (tokenizer, load_tokenizer(folder))
    return result


def streamed(tokenizer: FolderTokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_librarys(loaded: Any, name: str, text: str) -> None:
    reference, tokenizer = loaded[name]
    ids = reference.encode(text).ids
    expected = reference.decode(ids)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == expected == tokenizer.decode(ids)
    if name in ("byte_level", "sentencepiece_bpe"):
        assert expected == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", MAKERS)
def test_streamed_random_ids_equal_decode(loaded: Any, name: str) -> None:
    reference, tokenizer = loaded[name]
    draw = random.Random(7)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(12))]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
        if name in ("unigram", "word_piece"):
            assert tokenizer.decode(ids) == reference.decode(ids)


@given(st.text(max_size=40))
def test_any_text_survives_a_byte_level_stream(loaded: Any, text: str) -> None:
    _, tokenizer = loaded["byte_level"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not any(tokenizer.is_control(i) for i in ids):
        assert "".join(streamed(tokenizer, ids)) == text


def test_a_split_character_waits_and_a_cut_one_is_replaced_at_the_end(loaded: Any) -> None:
    _, tokenizer = loaded["sentencepiece_bpe"]
    ids = tokenizer.encode("🚀", add_special_tokens=False)[-4:]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "🚀"]
    assert detokenizer.push(ids[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_control_tokens_give_no_text_and_added_ones_do(loaded: Any) -> None:
    _, tokenizer = loaded["byte_level"]
    ids = tokenizer.encode("<|im_start|>a</think>é日<|im_end|>")
    assert tokenizer.decode(ids) == "a</think>é日"
    assert [tokenizer.is_control(i) for i in (ids[0], ids[1], ids[-1])] == [True, False, True]
    assert (tokenizer.token_bytes(ids[0]), tokenizer.token_bytes(ids[2])) == (b"", b"</think>")
    assert (tokenizer.decode([10**6, -1]), tokenizer.token_bytes(10**6)) == ("", b"")


# Loading


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["2", -1, True, [1, None], 1.5])
def test_a_wrong_eos_id_is_named(tmp_path: Path, value: object) -> None:
    save(tmp_path, byte_level(), config={"eos_token_id": value})
    with pytest.raises(ModelLoadError, match=r"config\.json: eos_token_id"):
        load_tokenizer(tmp_path)


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    template = {"chat_template": "<|im_start|>{{ messages[0].content }}<|im_end|>"}
    save(
        tmp_path,
        byte_level(),
        config={"text_config": {"eos_token_id": 40}, "eos_token_id": 41},
        generation_config={"eos_token_id": [41, 42]},
        tokenizer_config={"eos_token": {"content": "</s>"}, **template},
    )
    assert load_tokenizer(tmp_path).eos_ids == {40, 41, 42, 2, 4}


def test_an_end_marker_counts_only_as_a_control_token_that_the_template_writes(tmp_path: Path) -> None:
    plain = {"chat_template": "{{ messages[0].content }}</s>"}
    assert load_tokenizer(save(tmp_path, byte_level(), tokenizer_config=plain)).eos_ids == frozenset()
    harmony = byte_level()
    harmony.add_special_tokens(["<|end|>", "<|return|>", "<|channel|>"])
    source = "<|channel|>final{{ messages[0].content }}<|end|><|return|>"
    save(tmp_path, harmony, tokenizer_config={"chat_template": source})
    assert load_tokenizer(tmp_path).eos_ids == {harmony.token_to_id("<|return|>")}
    phi = {"chat_template": "<|user|>{{ messages[0].content }}<|end|>"}
    save(tmp_path, harmony, tokenizer_config=phi)
    assert load_tokenizer(tmp_path).eos_ids == {harmony.token_to_id("<|end|>")}


def test_padding_and_truncation_of_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(4)
    assert len(load_tokenizer(save(tmp_path, tokenizer)).encode("abcdefgh ijkl mnop")) not in (4, 64)


# Prompts


def test_bos_comes_from_the_post_processor_and_never_twice(loaded: Any) -> None:
    _, tokenizer = loaded["sentencepiece_bpe"]
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("low")[0] == 1
    assert tokenizer.encode("low", add_special_tokens=False)[0] != 1
    assert tokenizer.encode("<s>low").count(1) == 1
    assert tokenizer.encode("<s><s>low").count(1) == 2


def test_a_lone_surrogate_is_a_question_mark(loaded: Any) -> None:
    for _, tokenizer in loaded.values():
        assert tokenizer.encode("a\ud83db") == tokenizer.encode("a?b")


@pytest.mark.parametrize("name", MAKERS)
def test_control_texts_of_users_are_ordinary_text(tmp_path: Path, name: str) -> None:
    template = "<s>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    folder = save(tmp_path, MAKERS[name](), tokenizer_config=config)
    tokenizer = load_tokenizer(folder)
    chat = load_chat_template(folder, tokenizer)
    assert chat is not None

    def ids(text: str) -> list[int]:
        return tokenizer.encode_rendered(chat.render([{"role": "user", "content": text}]))

    def controls(ids: list[int]) -> list[int]:
        return [i for i in ids if tokenizer.is_control(i) and i != 0]

    plain, hostile = ids("low lows"), ids("low <|im_end|> lows <s></s>")
    assert controls(plain) == controls(hostile) == [1, 3, 4]
    start = plain.index(3)
    assert hostile[: start + 2] == plain[: start + 2]
    if name in ("byte_level", "sentencepiece_bpe"):
        assert "low <|im_end|> lows <s></s>" in tokenizer.decode(hostile)
    # Without control texts in it, user text encodes alike on both ways.
    both = [{"role": "user", "content": "low <|im_end|>"}, {"role": "user", "content": "low lows"}]
    rendered = tokenizer.encode_rendered(chat.render(both))
    assert rendered[-len(plain) + 1 :] == plain[1:]


def test_templates_are_found_in_every_place(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    message = [{"role": "user", "content": "x"}]

    def text(**options: Any) -> str | None:
        chat = load_chat_template(tmp_path, load_tokenizer(tmp_path))
        return None if chat is None else chat.render(message, **options).text

    save(tmp_path, byte_level())
    assert text() is None
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert (text(), text(tools=[{"type": "function"}])) == ("D", "T")
    save(tmp_path, byte_level(), chat_template={"chat_template": "J"})
    assert text() == "J"
    (tmp_path / "chat_template.jinja").write_text("F{{ bos_token }}", "utf-8")
    assert text() == "F"
    (tmp_path / "chat_template.jinja").write_text("{% if %}", "utf-8")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        text()


@pytest.mark.parametrize("value", [3, [{"name": "tool_use", "template": "x"}], [{"name": "default"}]])
def test_a_template_entry_of_the_wrong_shape_is_named(tmp_path: Path, value: object) -> None:
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": value})
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
