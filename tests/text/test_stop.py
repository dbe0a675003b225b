"""Stop strings: every split of a text gives the same cut, and no more is held back than must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.errors import InvalidRequestError
from mlxserve.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    deltas = []
    matched = None
    for piece in pieces:
        result = matcher.push(piece)
        deltas.append(result.text)
        matched = result.matched
        if matched is not None:
            break
    if matched is None:
        deltas.append(matcher.finish())
    return deltas, matched


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """Look at every beginning of the text, shortest first, for a stop that ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["two, three"], ["count: on", "e, tw", "o, th", "ree", " done"], "count: one, ", "two, three"),
        (["END of line"], ["the EN", "D o"], "the END o", None),
        (["###"], ["a", "b###tail"], "ab", "###"),
        (["###"], ["##", "#rest"], "", "###"),
        (["aab"], ["aa", "aa", "ab", "z"], "aaa", "aab"),
        (["lambda and more words", "mu nu"], ["kappa m", "u n", "u lamb", "da"], "kappa ", "mu nu"),
        (["<|im_end|>"], ["fine ", "<|", "im_", "end", "|>", " extra"], "fine ", "<|im_end|>"),
        (["\n"], ["first", "\n\nsecond"], "first", "\n"),
        (["user: please stop"], ["plea", "se"], "please", None),
        ([], ["any", "thing"], "anything", None),
        (["🚀🚀"], ["🚀", "x🚀", "🚀"], "🚀x", "🚀🚀"),
        (["b", "abc"], ["ab", "c"], "a", "b"),
        (["bc", "abc"], ["xab", "c"], "x", "abc"),
    ],
)
def test_cut(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    deltas, found = run(stops, pieces)
    assert ("".join(deltas), found) == (text, matched)


def test_text_is_held_only_while_it_may_become_a_stop() -> None:
    matcher = StopMatcher(["END of line"])
    assert matcher.push("the EN").text == "the "
    assert matcher.push("D o").text == ""
    assert matcher.push("ver").text == "END over"
    assert matcher.finish() == ""


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b").matched == "."
    assert matcher.push("more").text == ""
    assert matcher.finish() == ""


def test_an_empty_stop_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(["x", ""])
    assert caught.value.param == "stop"


@given(
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("ab<", max_size=5), max_size=12),
)
def test_equals_the_oracle_whatever_the_split(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected, stop = oracle(stops, text)
    deltas, matched = run(stops, pieces)
    assert ("".join(deltas), matched) == (expected, stop)
    # Before the match every push gives all but the longest end that begins a stop.
    matcher = StopMatcher(stops)
    seen = sent = ""
    for piece in pieces:
        result = matcher.push(piece)
        seen, sent = seen + piece, sent + result.text
        if result.matched is not None:
            break
        held = max((n for n in range(len(seen) + 1) if n == 0 or begins_stop(seen[-n:], stops)), default=0)
        assert sent == seen[: len(seen) - held]


def begins_stop(text: str, stops: list[str]) -> bool:
    return any(stop.startswith(text) for stop in stops)
