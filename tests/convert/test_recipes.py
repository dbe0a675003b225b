"""Roles by name, named recipes, and bits for modules under a bound on their size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.errors import UsageError
from mlxserve_convert import ConvertOptions
from mlxserve_convert.allocation import Option, allocate
from mlxserve_convert.recipes import Choice, Module, recipe_of
from mlxserve_convert.roles import layer_of, role_of


@pytest.mark.parametrize(
    ("path", "role", "layer"),
    [
        ("model.embed_tokens", "embedding", None),
        ("language_model.model.embed_tokens", "embedding", None),
        ("transformer.wte", "embedding", None),
        ("lm_head", "head", None),
        ("output", "head", None),
        ("model.layers.0.self_attn.q_proj", "query_key", 0),
        ("model.layers.11.self_attn.k_proj", "query_key", 11),
        ("model.layers.3.self_attn.v_proj", "value", 3),
        ("model.layers.3.self_attn.qkv_proj", "value", 3),
        ("model.layers.3.self_attn.kv_b_proj", "value", 3),
        ("model.layers.3.self_attn.o_proj", "output", 3),
        ("transformer.h.5.attn.c_attn", "value", 5),
        ("transformer.h.5.attn.c_proj", "output", 5),
        ("transformer.h.5.mlp.c_proj", "down", 5),
        ("transformer.h.5.mlp.c_fc", "up", 5),
        ("model.layers.2.self_attn.dense", "output", 2),
        ("model.layers.2.mlp.down_proj", "down", 2),
        ("model.layers.2.mlp.gate_proj", "up", 2),
        ("model.layers.2.mlp.gate_up_proj", "up", 2),
        ("model.layers.2.mlp.gate", "router", 2),
        ("model.layers.2.block_sparse_moe.gate", "router", 2),
        ("model.layers.2.mlp.router", "router", 2),
        ("model.layers.2.mlp.shared_expert_gate", "router", 2),
        ("model.layers.2.mlp.switch_mlp.down_proj", "expert", 2),
        ("model.layers.2.mlp.experts.gate_proj", "expert", 2),
        ("model.layers.2.mlp.shared_experts.down_proj", "down", 2),
        ("model.layers.2.mixer.in_proj", "other", 2),
    ],
)
def test_roles_are_told_by_names(path: str, role: str, layer: int | None) -> None:
    assert role_of(path) == role
    assert layer_of(path) == layer


PATHS = [
    "model.embed_tokens",
    "lm_head",
    *(
        f"model.layers.{layer}.{name}"
        for layer in range(3)
        for name in (
            "self_attn.q_proj",
            "self_attn.v_proj",
            "mlp.down_proj",
            "mlp.gate",
            "mlp.switch_mlp.up_proj",
        )
    ),
]
MODULES = {path: Module(path, (64, 64), True) for path in PATHS}


def _bits(options: ConvertOptions) -> dict[str, int]:
    recipe = recipe_of(options, MODULES)
    choices = {path: recipe(module) for path, module in MODULES.items()}
    return {path: choice.bits for path, choice in choices.items() if choice is not None}


def test_named_recipes() -> None:
    uniform = _bits(ConvertOptions(bits=4, recipe="uniform"))
    assert set(uniform.values()) == {4}
    default = _bits(ConvertOptions(bits=4))
    assert default == _bits(ConvertOptions(bits=4, recipe="default"))
    assert default["model.embed_tokens"] == default["lm_head"] == 6
    assert default["model.layers.1.self_attn.v_proj"] == 4
    mixed = _bits(ConvertOptions(bits=4, recipe="mixed"))
    assert mixed["model.layers.1.self_attn.v_proj"] == mixed["model.layers.1.mlp.down_proj"] == 6
    assert [mixed[f"model.layers.{layer}.self_attn.q_proj"] for layer in range(3)] == [6, 4, 6]
    experts = _bits(ConvertOptions(bits=4, recipe="experts-low"))
    assert experts["model.layers.1.mlp.switch_mlp.up_proj"] == 3
    assert experts["model.layers.1.self_attn.q_proj"] == 6
    for found in (default, mixed, experts):
        assert found["model.layers.1.mlp.gate"] == 8


def test_no_recipe_takes_bits_away_and_wishes_of_the_architecture_stand() -> None:
    for name in ("default", "mixed"):
        assert min(_bits(ConvertOptions(bits=8, recipe=name)).values()) == 8
    module = Module("model.layers.0.mlp.gate", (8, 64), {"bits": 8, "group_size": 32})
    for name in ("uniform", "default", "mixed", "experts-low"):
        recipe = recipe_of(ConvertOptions(bits=3, recipe=name), {module.path: module})
        assert recipe(module) == Choice("affine", 8, 32)
        assert recipe(Module("model.layers.0.mlp.gate", (8, 64), False)) is None
    assert recipe_of(ConvertOptions(mode="mxfp4"), MODULES)(MODULES["lm_head"]) == Choice("mxfp4", 4, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "best"}, "--recipe best is not possible, only: default, uniform"),
        ({"recipe": "mixed", "mode": "mxfp4"}, "--recipe mixed is for --mode affine, not mxfp4"),
        ({"recipe": "auto", "bits": 4}, "--bits and --group-size do not go with it"),
        ({"recipe": "auto", "group_size": 64}, "--bits and --group-size do not go with it"),
        ({"target_bpw": 4.5}, "--target-bpw is for --recipe auto"),
        ({"recipe": "mixed", "target_bpw": 4.5}, "--target-bpw is for --recipe auto"),
        ({"recipe": "auto", "target_bpw": 1.5}, "--target-bpw 1.5 is not possible, only: 2 to 16"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConvertOptions(**options)  # type: ignore[arg-type]


ITEMS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.lists(
        st.builds(Option, st.integers(0, 9), st.integers(1, 1000), st.floats(0, 100, allow_subnormal=False)),
        min_size=1,
        max_size=6,
        unique_by=lambda option: option.choice,
    ),
    min_size=1,
    max_size=8,
)


@given(ITEMS, st.integers(0, 9000))
def test_what_is_allocated_fits_and_nothing_that_fits_is_better(
    items: dict[str, list[Option]], budget: int
) -> None:
    chosen = allocate(items, budget)
    if chosen is None:
        assert sum(min(option.num_bytes for option in options) for options in items.values()) > budget
        return
    assert all(chosen[name] in options for name, options in items.items())
    size = sum(option.num_bytes for option in chosen.values())
    cost = sum(option.cost for option in chosen.values())
    assert size <= budget
    for name, options in items.items():
        for option in options:
            fits = size - chosen[name].num_bytes + option.num_bytes <= budget
            assert not (fits and option.cost < chosen[name].cost)
    for choice in range(10):
        shared = [next((o for o in options if o.choice == choice), None) for options in items.values()]
        found = [option for option in shared if option is not None]
        if len(found) == len(items) and sum(option.num_bytes for option in found) <= budget:
            assert cost <= sum(option.cost for option in found) + 1e-9


def test_bits_go_where_they_are_worth_most() -> None:
    options = {
        "deaf": [Option(bits, bits * 100, 1.0 / bits) for bits in (2, 4, 8)],
        "keen": [Option(bits, bits * 100, 100.0 / bits) for bits in (2, 4, 8)],
    }
    chosen = allocate(options, 1000)
    assert chosen is not None
    assert (chosen["deaf"].choice, chosen["keen"].choice) == (2, 8)
    assert allocate(options, 399) is None
