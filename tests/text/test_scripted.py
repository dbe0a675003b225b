"""Scripted models: ids, templates, replies, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import InvalidRequestError, UsageError
from mlxserve.text.scripted import ScriptedReply, load_scripted


def write(folder: Path, spec: Any, name: str = "harbour.json") -> Path:
    path = folder / name
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec), "utf-8")
    return path


def replies(*pieces: Any, **more: Any) -> dict[str, Any]:
    return {"replies": [{"pieces": list(pieces), **more}]}


def test_the_documented_example(tmp_path: Path) -> None:
    spec = load_scripted(
        write(
            tmp_path,
            {
                "template": "chatml",
                "context_length": 4096,
                "replies": [
                    {
                        "match": "harbour",
                        "pieces": ["Cape", " Town", ".", {"hex": "f09f"}, {"hex": "9a80"}],
                        "end": "eos",
                    },
                    {"match": "", "pieces": ["ok"], "end": "eos"},
                ],
            },
        )
    )
    assert (spec.id, spec.context_length, spec.tool_format, spec.reasoning_format) == (
        "harbour",
        4096,
        "hermes",
        None,
    )
    reply = spec.select("Which harbour?")
    assert reply == ScriptedReply("harbour", pieces=((258,), (259,), (260,), (261,), (262,)))
    assert spec.select("other").pieces == ((263,),)
    assert spec.tokenizer.decode([258, 259, 260, 261, 262]) == "Cape Town.🚀"
    assert [spec.tokenizer.token_bytes(i) for i in (65, 256, 257, 261)] == [b"A", b"", b"", b"\xf0\x9f"]


def test_ids_follow_first_appearance_and_one_byte_pieces_have_their_own(tmp_path: Path) -> None:
    pieces = ["a", "bc", "a", {"hex": "61"}, {"any": ["bc", "d", "bc"]}, {"special": "<|x|>"}, "<|x|>"]
    spec = load_scripted(write(tmp_path, replies(*pieces)))
    assert spec.select("").pieces == ((258,), (259,), (258,), (258,), (259, 260), (261,), (262,))
    assert spec.tokenizer.vocab_size == 263
    assert spec.tokenizer.encode("abc") == [97, 98, 99]
    assert spec.tokenizer.decode([261, 262, 256]) == "<|x|>"
    assert [spec.tokenizer.is_control(i) for i in (97, 256, 257, 258, 261, 262)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    assert (spec.tokenizer.bos_id, spec.tokenizer.eos_ids) == (257, frozenset({256}))


def test_control_texts_are_ids_in_the_template_and_bytes_in_user_text(tmp_path: Path) -> None:
    template = "<bos>{% for m in messages %}<|u|>{{ m.content }}<eos>{% endfor %}"
    spec = load_scripted(write(tmp_path, {"template": template, **replies({"special": "<|u|>"})}))

    def ids(text: str) -> list[int]:
        return spec.tokenizer.encode_rendered(spec.template.render([{"role": "user", "content": text}]))

    assert ids("hi") == [257, 258, *b"hi", 256]
    assert ids("<eos>é<|u|>") == [257, 258, *"<eos>é<|u|>".encode(), 256]
    assert spec.tokenizer.encode("<bos><eos>") == list(b"<bos><eos>")


def test_reply_options(tmp_path: Path) -> None:
    timing = {"delay_ms": 20, "prefill_delay_ms": 1.5, "burst": 3, "end": "run"}
    spec = load_scripted(write(tmp_path, replies("x", match="m", **timing)))
    assert spec.replies == (ScriptedReply("m", "pieces", ((258,),), "run", 0.02, 0.0015, 3),)
    with pytest.raises(InvalidRequestError, match="harbour"):
        spec.select("no such word")


@pytest.mark.parametrize("mode", ["prompt", "hash"])
def test_modes(tmp_path: Path, mode: str) -> None:
    spec = load_scripted(write(tmp_path, {"replies": [{"pieces": mode}]}))
    assert (spec.select("").mode, spec.select("").pieces) == (mode, ())


def test_template_file_is_relative_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_text("{{ messages[0].content.upper() }}", "utf-8")
    spec = load_scripted(write(tmp_path, {"template": {"file": "x.jinja"}, **replies("a")}))
    assert spec.template.render([{"role": "user", "content": "hi"}]).text == "HI"
    assert spec.tool_format is None


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("{", "not valid JSON"),
        ([], "JSON object"),
        ({}, "replies"),
        ({"replies": []}, "replies"),
        ({"replies": {}}, "replies"),
        ({**replies("a"), "tempalte": "chatml"}, "tempalte"),
        ({**replies("a"), "template": 3}, "template"),
        ({**replies("a"), "template": "chatmll"}, "chatmll"),
        ({**replies("a"), "template": "{% if %}"}, "template"),
        ({**replies("a"), "template": {"file": "none.jinja"}}, "template.file"),
        ({**replies("a"), "template": {"path": "x"}}, "template.path"),
        ({**replies("a"), "context_length": 0}, "context_length"),
        ({**replies("a"), "context_length": True}, "context_length"),
        ({**replies("a"), "tool_format": "hermes2"}, "tool_format: must be one of"),
        ({**replies("a"), "tool_format": "harmony"}, "tool_format: this version has no parser"),
        ({**replies("a"), "reasoning_format": "think"}, "reasoning_format: this version has no parser"),
        ({**replies("a"), "reasoning_format": None}, "reasoning_format"),
        ({"replies": ["a"]}, "replies[0]"),
        ({"replies": [{"pieces": ["a"]}, {"match": ""}]}, "replies[1].pieces"),
        ({"replies": [{"pieces": ["a"]}, {"pieces": [7]}]}, "replies[1].pieces[0]"),
        (replies({"hex": "f"}), "replies[0].pieces[0].hex"),
        (replies({"hex": "zz"}), "replies[0].pieces[0].hex"),
        (replies({"special": ""}), "replies[0].pieces[0].special"),
        (replies("a", {"any": []}), "replies[0].pieces[1].any"),
        (replies({"any": ["a", {"any": ["b"]}]}), "replies[0].pieces[0].any[1]"),
        (replies({"any": ["a"], "hex": "00"}), "replies[0].pieces[0].hex"),
        (replies("\ud83d"), "replies[0].pieces[0]"),
        (replies("a", match=None), "replies[0].match"),
        (replies("a", end="stop"), "replies[0].end"),
        (replies(end="run"), "replies[0].pieces"),
        (replies("a", delay_ms=-1), "replies[0].delay_ms"),
        (replies("a", prefill_delay_ms="5"), "replies[0].prefill_delay_ms"),
        (replies("a", burst=0), "replies[0].burst"),
        (replies("a", brust=2), "replies[0].brust"),
    ],
)
def test_mistakes_are_one_line_that_names_the_place(tmp_path: Path, spec: Any, place: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_scripted(write(tmp_path, spec))
    message = str(caught.value)
    assert "harbour.json" in message and place in message and "\n" not in message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json"):
        load_scripted(tmp_path / "absent.json")
