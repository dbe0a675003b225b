"""Settings: files, flags over them, limits, and the learning rate that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.errors import UsageError
from mlxserve.tuning.settings import LearningRate, TrainSettings, check_same, make_settings


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    for name, text in (
        ("a.yaml", "rank: 4\nlearning_rate: 1e-4\ntargets: [q_proj, v_proj]\nbetas: [0.8, 0.9]\n"),
        ("a.toml", 'rank = 4\nlearning_rate = 1e-4\ntargets = ["q_proj", "v_proj"]\nbetas = [0.8, 0.9]\n'),
    ):
        (tmp_path / name).write_text(text)
        settings = make_settings(tmp_path / name, {"rank": 16, "alpha": None, "iters": 7})
        assert (settings.rank, settings.iters, settings.learning_rate) == (16, 7, 1e-4)
        assert (settings.targets, settings.betas) == (("q_proj", "v_proj"), (0.8, 0.9))
        assert settings.batch_size == TrainSettings().batch_size


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "ranks: 4", "there is no setting `ranks`"),
        ("a.yaml", "rank: four", "Expected `int`, got `str`, at `rank`"),
        ("a.yaml", "- rank", "expected settings by name, found a list"),
        ("a.yaml", "rank: [", "a.yaml: while parsing"),
        ("a.toml", "rank = ", "a.toml: Invalid value"),
        ("a.toml", "schedule = 'steps'", "Invalid enum value 'steps', at `schedule`"),
        ("a.json", "{}", "settings are read from .yaml, .yml or .toml files"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as error:
        make_settings(tmp_path / name, {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        make_settings(tmp_path / "none.yaml", {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("iters", 0),
        ("batch_size", 0),
        ("accumulate", 0),
        ("max_length", 1),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("learning_rate", 0.0),
        ("alpha", 0.0),
        ("clip", -1.0),
        ("layers", 0),
        ("layers", -2),
        ("warmup", -1),
        ("betas", (0.9, 1.0)),
        ("weight_decay", -0.1),
        ("patience", 0),
        ("epochs", 0.0),
        ("report_every", 0),
        ("end_rate", 1.5),
    ],
)
def test_limits_name_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(UsageError) as error:
        TrainSettings(**{field: value})
    shown = value[1] if isinstance(value, tuple) else value
    assert str(shown) in str(error.value)
    assert field.rstrip("s") in str(error.value)


def test_scale_is_alpha_over_rank_or_its_root() -> None:
    assert TrainSettings(rank=8).scale == 2.0
    assert TrainSettings(rank=16, alpha=8).scale == 0.5
    assert TrainSettings(rank=16, alpha=8, rslora=True).scale == 2.0


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.floats(0, 1),
    st.integers(1, 200),
)
def test_the_rate_rises_to_its_peak_and_never_rises_again(
    schedule: Any, warmup: int, end_rate: float, num_steps: int
) -> None:
    rate = LearningRate(1e-3, schedule, warmup, end_rate, num_steps)
    values = [rate.at(step) for step in range(num_steps)]
    assert all(0 < value <= 1e-3 for value in values[: warmup or 1])
    rising, falling = values[: warmup + 1], values[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if num_steps > warmup:
        assert values[warmup] == pytest.approx(1e-3)
        is_whole = schedule == "constant" or num_steps == warmup + 1
        assert values[-1] == pytest.approx(1e-3 if is_whole else 1e-3 * end_rate, abs=1e-12)


def test_a_run_goes_on_with_its_own_settings_alone() -> None:
    saved = msgspec.json.decode(msgspec.json.encode(TrainSettings(rank=8)))
    check_same(saved, TrainSettings(rank=8, eval_every=7, save_every=3), ignore=frozenset())
    with pytest.raises(UsageError, match="has rank 8, it cannot go on with 16"):
        check_same(saved, TrainSettings(rank=16), ignore=frozenset())
    check_same(saved, TrainSettings(iters=9), ignore=frozenset({"iters"}))
