"""Which tokens are trained: the variants of the case, other templates, and parity with mlx-lm's data sets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.text.chat_template import BUILTIN_TEMPLATES
from mlxserve.tuning.batches import make_batch
from mlxserve.tuning.dataset import DataRequest, Dataset, TrainingDataError, load_dataset
from mlxserve.tuning.examples import Example
from mlxserve.tuning.masking import ExampleMaker, Mask, fit
from mlxserve.tuning.rows import BadRowError, ChatRow, CompletionRow, FieldNames, TextRow, make_reader
from tests.tuning.case_28 import (
    ADDS_THOUGHT,
    CONTROLS,
    DROPS_OLD_THOUGHTS,
    names,
    offset,
    text_tools,
    trained,
    write_model,
)

TEMPLATES = Path(__file__).parents[2].parent / "shared" / "templates"
SHOWN = "<think>u</think>d<|end|>"


def turns(*contents: str) -> dict[str, Any]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


Q_A = turns("Q", "A")
LONG_QUESTION = turns("abcdefghijkl", "yes")
THOUGHTS = turns("a?", "<think>t</think>b", "c?", "<think>u</think>d")


def example_of(
    folder: Path, template: str | None, line: dict[str, Any], mask: Mask = "last", **options: Any
) -> Example:
    tokenizer, chat_template = text_tools(folder, template, **options)
    row = make_reader(line, FieldNames()).read(line)
    return ExampleMaker(tokenizer, chat_template, mask).make(row, "train.jsonl:1")


def load(folder: Path, template: str | None, lines: list[dict[str, Any]], **request: Any) -> Dataset:
    tokenizer, chat_template = text_tools(folder, template)
    data = folder / "train.jsonl"
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options: dict[str, Any] = {"max_length": 64, "valid_share": 0.0} | request
    return load_dataset(DataRequest(str(data), **options), tokenizer, chat_template)


def test_a_thought_in_the_prompt_moves_no_mask(tmp_path: Path) -> None:
    example = example_of(tmp_path, ADDS_THOUGHT, Q_A)
    assert (offset(example), len(example.token_ids)) == (4, 6)
    assert trained(tmp_path, example) == ["A", "<|end|>"]


def test_b_nothing_but_prompt_left_is_skipped_by_line(tmp_path: Path) -> None:
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, LONG_QUESTION)
    assert (offset(example), len(example.token_ids)) == (15, 19)
    cut = fit(example, 8, "cut", None)
    assert cut is not None
    assert len(cut.token_ids) == 8
    assert trained(tmp_path, cut) == []
    with pytest.raises(TrainingDataError, match="no row of train is left, 0 bad and 1 skipped") as error:
        load(tmp_path, DROPS_OLD_THOUGHTS, [LONG_QUESTION], max_length=8)
    assert error.value.summary is not None
    assert [str(problem) for problem in error.value.summary.skipped] == [
        "train.jsonl:1: has nothing to train on in its first 8 of 19 tokens"
    ]


def test_b_the_cut_can_keep_the_answer(tmp_path: Path) -> None:
    data = load(tmp_path, DROPS_OLD_THOUGHTS, [LONG_QUESTION], max_length=8, long_rows="keep-answer")
    assert names(tmp_path, data.train[0].token_ids) == [*"kl", "<|end|>", "<|assistant|>", *"yes", "<|end|>"]
    assert trained(tmp_path, data.train[0]) == [*"yes", "<|end|>"]
    assert data.summary.splits["train"].num_cut == 1


def test_c_a_completion_is_a_chat_of_two_turns(tmp_path: Path) -> None:
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, {"prompt": "2+2", "completion": "4"})
    assert (offset(example), len(example.token_ids)) == (6, 8)
    assert trained(tmp_path, example) == ["4", "<|end|>"]


def test_d_the_mask_lies_on_the_final_text(tmp_path: Path) -> None:
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, THOUGHTS)
    assert "".join(names(tmp_path, example.token_ids)) == (
        "<|user|>a?<|end|><|assistant|>b<|end|><|user|>c?<|end|><|assistant|>" + SHOWN
    )
    assert "".join(trained(tmp_path, example)) == SHOWN


def test_d_a_reply_that_later_turns_changed_is_not_trained(tmp_path: Path) -> None:
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, THOUGHTS, "all-assistant")
    assert "".join(trained(tmp_path, example)) == SHOWN
    without_thoughts = turns("a?", "b", "c?", "d")
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, without_thoughts, "all-assistant")
    assert trained(tmp_path, example) == ["b", "<|end|>", "d", "<|end|>"]


def test_e_the_weights_of_a_batch_are_the_lines_that_have_something_to_train(tmp_path: Path) -> None:
    data = load(tmp_path, DROPS_OLD_THOUGHTS, [LONG_QUESTION, Q_A], max_length=8)
    assert [example.place for example in data.train] == ["train.jsonl:2"]
    assert [problem.place for problem in data.summary.skipped] == ["train.jsonl:1"]
    batch = make_batch(data.train, max_length=8, pack=True)
    assert batch.weights.sum() == batch.num_trained == 2
    assert names(tmp_path, batch.targets[batch.weights > 0]) == ["A", "<|end|>"]


@pytest.mark.parametrize("skip_bad", [False, True])
def test_f_a_conversation_without_a_reply(tmp_path: Path, skip_bad: bool) -> None:
    lines = [turns("Q", "A", "more"), Q_A]
    message = "the last message is from user, not from assistant: no reply to train on"
    if not skip_bad:
        with pytest.raises(TrainingDataError, match=f"1 row is bad, the first train.jsonl:1: {message}"):
            load(tmp_path, DROPS_OLD_THOUGHTS, lines)
        return
    data = load(tmp_path, DROPS_OLD_THOUGHTS, lines, skip_bad=True)
    assert [example.place for example in data.train] == ["train.jsonl:2"]
    assert [str(problem) for problem in data.summary.bad] == [f"train.jsonl:1: {message}"]


def test_f_its_earlier_reply_can_be_trained(tmp_path: Path) -> None:
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, turns("Q", "A", "more"), "all-assistant")
    assert trained(tmp_path, example) == ["A", "<|end|>"]


def test_g_text_is_trained_whole_with_one_warning(tmp_path: Path) -> None:
    text = "plain text has no prompt"
    data = load(tmp_path, DROPS_OLD_THOUGHTS, [{"text": text}, {"text": text}])
    assert trained(tmp_path, data.train[0]) == [*text[1:], "<|eos|>"]
    warning = "rows of text have no prompt to mask: they are trained whole"
    assert data.summary.notes.count(warning) == 1
    assert warning not in load(tmp_path, DROPS_OLD_THOUGHTS, [{"text": text}], mask="none").summary.notes


def test_h_of_an_empty_reply_the_end_token_is_trained(tmp_path: Path) -> None:
    assert trained(tmp_path, example_of(tmp_path, DROPS_OLD_THOUGHTS, turns("Q", ""))) == ["<|end|>"]


def test_everything_is_trained_without_a_mask(tmp_path: Path) -> None:
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, turns("Q", "A", "more"), "none")
    assert names(tmp_path, example.token_ids)[1:] == trained(tmp_path, example)
    assert not example.is_trained[0]


ENDS_NOTHING = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
MARKS_THE_LAST_TURN = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ '(now) ' if loop.last }}{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_a_template_without_an_end_gets_one(tmp_path: Path) -> None:
    example = example_of(tmp_path, ENDS_NOTHING, Q_A)
    assert trained(tmp_path, example) == ["A", "<|eos|>"]
    assert "the chat template ends no reply: 1 row got an end token" in (
        load(tmp_path, ENDS_NOTHING, [Q_A]).summary.notes
    )


def test_a_template_that_writes_the_prompt_otherwise_once_there_is_a_reply(tmp_path: Path) -> None:
    example = example_of(tmp_path, MARKS_THE_LAST_TURN, turns("Q", "A"))
    assert "".join(names(tmp_path, example.token_ids)) == "<|user|>Q<|end|><|assistant|>(now) A<|end|>"
    assert trained(tmp_path, example) == ["A", "<|end|>"]


ALWAYS_ASKS = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}"
    "<|system|>answer now<|end|><|assistant|>"
)


@pytest.mark.parametrize("reply", ["A", "", " now "])
def test_what_a_template_writes_behind_every_conversation_is_no_reply(tmp_path: Path, reply: str) -> None:
    example = example_of(tmp_path, ALWAYS_ASKS, turns("Q", reply))
    assert "".join(names(tmp_path, example.token_ids)) == f"<|user|>Q<|end|><|assistant|>{reply}<|end|>"
    assert trained(tmp_path, example) == [*reply, "<|end|>"]
    unmasked = example_of(tmp_path, ALWAYS_ASKS, turns("Q", reply), "none")
    assert unmasked.token_ids == example.token_ids


def test_calls_that_the_template_leaves_out(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": "{}"}}
    line = {"messages": [*turns("Q")["messages"], {"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(BadRowError, match=r"the chat template leaves out messages\[1\]'s call of clock"):
        example_of(tmp_path, DROPS_OLD_THOUGHTS, line)


@pytest.mark.parametrize("mask", ["last", "all-assistant"])
def test_replies_that_no_request_could_ask_for(tmp_path: Path, mask: Mask) -> None:
    """A first turn of the assistant, and two of its turns in a row."""
    first = {"messages": [{"role": "assistant", "content": "hi"}]}
    assert trained(tmp_path, example_of(tmp_path, DROPS_OLD_THOUGHTS, first, mask)) == ["h", "i", "<|end|>"]
    both = {"messages": [*turns("Q", "A")["messages"], {"role": "assistant", "content": "B"}]}
    wanted = ["B", "<|end|>"] if mask == "last" else ["A", "<|end|>", "B", "<|end|>"]
    assert trained(tmp_path, example_of(tmp_path, DROPS_OLD_THOUGHTS, both, mask)) == wanted


def test_a_reply_of_weight_0_is_not_trained(tmp_path: Path) -> None:
    line = turns("a", "b", "c", "d")
    line["messages"][1]["weight"] = 0
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, line, "all-assistant")
    assert trained(tmp_path, example) == ["d", "<|end|>"]
    line["messages"][3]["weight"] = 0
    data = load(tmp_path, DROPS_OLD_THOUGHTS, [line, Q_A])
    assert [str(problem) for problem in data.summary.skipped] == ["train.jsonl:1: has nothing to train on"]


def test_control_texts_of_a_user_are_text(tmp_path: Path) -> None:
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, turns("<|end|>", "say <|end|> now"))
    assert names(tmp_path, example.token_ids).count("<|end|>") == 2
    assert trained(tmp_path, example) == [*"say <|end|> now", "<|end|>"]


def test_tool_calls_are_trained(tmp_path: Path) -> None:
    template = (
        BUILTIN_TEMPLATES["chatml"].replace("<|im_start|>", "<|user|>").replace("<|im_end|>", "<|end|>")
    )
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    line = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "time?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}],
    }
    example = example_of(tmp_path, template, line)
    reply = "".join(trained(tmp_path, example))
    assert '"name": "clock"' in reply and "<tool_call>" in reply and "time?" not in reply
    assert '"parameters"' in "".join(names(tmp_path, example.token_ids))


def test_without_a_template_a_completion_follows_its_prompt(tmp_path: Path) -> None:
    example = example_of(tmp_path, None, {"prompt": "2+2=", "completion": "4"})
    assert names(tmp_path, example.token_ids) == [*"2+2=4", "<|eos|>"]
    assert trained(tmp_path, example) == ["4", "<|eos|>"]
    with pytest.raises(BadRowError, match="the model has no chat template"):
        example_of(tmp_path, None, Q_A)


def test_a_template_that_refuses_names_its_reason(tmp_path: Path) -> None:
    tokenizer, template = text_tools(tmp_path, "{{ raise_exception('no such turns') }}")
    with pytest.raises(BadRowError, match="no such turns"):
        ExampleMaker(tokenizer, template, "last").make(ChatRow(Q_A["messages"]), "x:1")
    with pytest.raises(BadRowError, match="the chat template makes no text of it"):
        example_of(tmp_path, "{{ '' }}", Q_A)
    with pytest.raises(BadRowError, match=r"messages\[0\]\.role must be one of"):
        ExampleMaker(tokenizer, template, "none").make(ChatRow([{"role": "poet", "content": ""}]), "x:1")


def numbered(count: int, first_trained: int, last_trained: int | None = None) -> Example:
    last = count - 1 if last_trained is None else last_trained
    return Example(tuple(range(count)), tuple(first_trained <= i <= last for i in range(count)), "x:1")


@pytest.mark.parametrize(
    ("example", "bos", "ids", "is_trained"),
    [
        (numbered(10, 8), None, [5, 6, 7, 8, 9], [8, 9]),
        (numbered(10, 8), 0, [0, 6, 7, 8, 9], [8, 9]),
        (numbered(10, 2), None, [1, 2, 3, 4, 5], [2, 3, 4, 5]),
        (numbered(10, 1), None, [0, 1, 2, 3, 4], [1, 2, 3, 4]),
        (numbered(10, 6, 7), None, [3, 4, 5, 6, 7], [6, 7]),
        (numbered(5, 1), None, [0, 1, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_the_cut_that_keeps_the_answer(
    example: Example, bos: int | None, ids: list[int], is_trained: list[int]
) -> None:
    kept = fit(example, 5, "keep-answer", bos)
    assert kept is not None
    assert list(kept.token_ids) == ids
    assert [i for i, flag in zip(kept.token_ids, kept.is_trained, strict=True) if flag] == is_trained


def test_long_rows_can_be_left_out(tmp_path: Path) -> None:
    data = load(tmp_path, DROPS_OLD_THOUGHTS, [LONG_QUESTION, Q_A], max_length=8, long_rows="skip")
    assert [str(problem) for problem in data.summary.skipped] == [
        "train.jsonl:1: has 19 tokens, over the limit of 8"
    ]


PARITY_LINES = [
    Q_A,
    turns("some words", "an answer", "more words", "and the last one"),
    {"messages": [{"role": "system", "content": "be brief"}, *turns("hello", "bye")["messages"]]},
    {"prompt": "2+2", "completion": "4"},
    {"text": "any text at all"},
]


@pytest.mark.parametrize("mask", ["last", "none"])
@pytest.mark.parametrize("line", PARITY_LINES)
def test_tokens_and_offsets_are_those_of_mlx_lm(tmp_path: Path, line: dict[str, Any], mask: Mask) -> None:
    from mlx_lm.tokenizer_utils import load as load_stock
    from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset

    write_model(tmp_path, DROPS_OLD_THOUGHTS)
    stock = load_stock(tmp_path)
    is_masked = mask == "last"
    if "text" in line:
        ids, start = TextDataset([line], stock).process(line)
    elif "prompt" in line:
        ids, start = CompletionsDataset([line], stock, "prompt", "completion", is_masked).process(line)
    else:
        ids, start = ChatDataset([line], stock, mask_prompt=is_masked).process(line)
    example = example_of(tmp_path, DROPS_OLD_THOUGHTS, line, mask)
    assert list(example.token_ids) == list(ids)
    assert offset(example) == max(start, 1)  # nothing predicts the first token


def test_rows_of_each_kind_are_told_apart() -> None:
    fields = FieldNames()
    assert make_reader(Q_A, fields).read(Q_A) == ChatRow(Q_A["messages"])
    pair = {"prompt": "a", "completion": "b"}
    assert make_reader(pair, fields).read(pair) == CompletionRow("a", "b")
    assert make_reader({"text": "t"}, fields).read({"text": "t"}) == TextRow("t")


CONTENTS = st.text(st.sampled_from("ab \n?<|>"), max_size=6) | st.sampled_from(
    ["<|end|>", "x<|assistant|>y", "</think>", "<think>a</think>b", "<|end|><|assistant|>"]
)


@pytest.fixture(scope="module", params=[ADDS_THOUGHT, DROPS_OLD_THOUGHTS, MARKS_THE_LAST_TURN, ALWAYS_ASKS])
def maker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ExampleMaker]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer, template = text_tools(folder, request.param)
    return folder, ExampleMaker(tokenizer, template, "last")


@settings(max_examples=50, deadline=None)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=6), has_system=st.booleans())
def test_any_reply_is_trained_whole_and_alone(
    maker: tuple[Path, ExampleMaker], contents: list[str], has_system: bool
) -> None:
    folder, example_maker = maker
    messages = turns(*contents, *([] if len(contents) % 2 == 0 else ["reply"]))["messages"]
    if has_system:
        messages.insert(0, {"role": "system", "content": "rules"})
    example = example_maker.make(ChatRow(messages), "x:1")
    assert offset(example) > 0
    assert "".join(trained(folder, example)).removeprefix("(now) ") == f"{messages[-1]['content']}<|end|>"


CONTROL_TEXT = re.compile(
    r"<[|｜][^<>|｜]*[|｜]>|\[/?[A-Z_]+\]|</?s>|</?(?:start|end)_of_turn>|<(?:turn\||\|turn)>"
)


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the shared templates are not beside the checkout")
@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_published_templates(tmp_path: Path, path: Path) -> None:
    """The last reply and nothing of what came before; of earlier replies at most themselves."""
    source = path.read_text("utf-8")
    found = CONTROL_TEXT.findall(source)
    controls = tuple(dict.fromkeys([*CONTROLS, *found]))
    tokenizer, template = text_tools(tmp_path, source, controls=controls)
    messages = [
        {"role": "system", "content": "SYSTEM"},
        *turns("QUERY1", "REPLY1", "QUERY2", "REPLY2")["messages"],
    ]
    masks: tuple[Mask, ...] = ("last", "all-assistant")
    for mask in masks:
        example = ExampleMaker(tokenizer, template, mask).make(ChatRow(messages), "x:1")
        text = "".join(trained(tmp_path, example))
        assert "REPLY2" in text
        assert not re.search("SYSTEM|QUERY", text)
        assert mask == "all-assistant" or "REPLY1" not in text
        assert len(CONTROL_TEXT.sub("", text.partition("REPLY2")[2]).strip()) < 20
