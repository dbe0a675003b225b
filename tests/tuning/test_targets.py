"""Which layers are trained."""

from __future__ import annotations

import pytest

from mlxserve.errors import UsageError
from mlxserve.tuning.targets import chosen_layers

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
KINDS = {
    "model.embed_tokens": "embedding",
    "lm_head": "linear",
    **{f"model.layers.{i}.self_attn.{name}": "linear" for i in range(3) for name in ATTENTION},
    **{f"model.layers.{i}.mlp.{name}": "linear" for i in range(2) for name in MLP},
    **{f"model.layers.2.mlp.switch_mlp.{name}": "experts" for name in MLP},
    "model.layers.2.mlp.gate": "linear",
}


def chosen(*wanted: str, last: int | None = None) -> tuple[str, ...]:
    return chosen_layers(KINDS, wanted, 3, last)


def test_linear_is_every_layer_but_routers_embeddings_and_heads() -> None:
    found = chosen("linear")
    assert set(found) == {p for p in KINDS if ".layers." in p and not p.endswith("mlp.gate")}
    assert [path for path in found if ".layers.0." in path] == list(found[:7])


def test_presets_and_names() -> None:
    assert {path.rsplit(".", 1)[-1] for path in chosen("attention")} == set(ATTENTION)
    assert {path.rsplit(".", 1)[-1] for path in chosen("qv")} == {"q_proj", "v_proj"}
    assert all(".layers.2.mlp.switch_mlp." in path for path in chosen("experts"))
    assert chosen("self_attn.q_proj") == chosen("q_proj")
    assert chosen("model.layers.1.mlp.up_proj") == ("model.layers.1.mlp.up_proj",)
    assert chosen("lm_head") == ("lm_head",)
    assert chosen("gate") == ("model.layers.2.mlp.gate",)
    assert len(chosen("q_proj", "qv")) == 6


def test_the_last_layers_alone() -> None:
    assert {path.split(".")[2] for path in chosen("attention", last=2)} == {"1", "2"}
    assert chosen("attention", last=-1) == chosen("attention", last=3) == chosen("attention")
    with pytest.raises(UsageError, match="layers is 99, but the model has only 3"):
        chosen("attention", last=99)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qproj", "target 'qproj' matches no layer that is trained, did you mean 'q_proj'"),
        ("proj", "this model has "),
        ("", "target '' matches no layer"),
        ("self_attn", "target 'self_attn' matches no layer"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        chosen("q_proj", name)
    assert message in str(error.value)


def test_a_target_outside_the_last_layers_is_an_error() -> None:
    with pytest.raises(UsageError, match="'experts' matches no layer"):
        chosen_layers({p: k for p, k in KINDS.items() if ".2." not in p}, ["experts"], 3, None)
    with pytest.raises(UsageError, match="matches no layer"):
        chosen("model.layers.0.mlp.up_proj", last=1)
