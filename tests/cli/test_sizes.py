from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.cli.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12G", 12 * 2**30),
        ("12g", 12 * 2**30),
        ("12GB", 12 * 2**30),
        ("12 GiB", 12 * 2**30),
        ("1.5M", 3 * 2**19),
        ("800K", 800 * 1024),
        ("2T", 2**41),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "0.0001K", "12X", "G", "-1G", "1,5G", "12G!", "1e9", "٣G", "nan", "9" * 400]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size; write one like 12G"):
        parse_size(text)


@given(st.integers(1, 2**49), st.sampled_from(["", "K", "M", "G"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[unit]


@given(st.text(alphabet="0123456789.KMGTiB -+e", max_size=24))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        size = parse_size(text)
    except typer.BadParameter:
        assert not (text.isdecimal() and 0 < int(text) < 10**15)
    else:
        assert 1 <= size < 10**15 * 2**40
