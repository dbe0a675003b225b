"""Names in checkpoints: tied heads, experts, text parts of multimodal models, and what has no place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError, UnsupportedModelError
from mlxserve_convert import ConvertOptions, ConvertReport, convert
from tests.convert.checkpoints import Arrays, logits, random_weights, reference_model, write_folder

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
UNTIED = {**BASE, "tie_word_embeddings": False}
TIED = {**BASE, "tie_word_embeddings": True}
MOE = {
    **UNTIED,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = "model.layers.0.mlp.experts"
SWITCH = "model.layers.0.mlp.switch_mlp"
TOKENS = [3, 60, 17, 42, 5, 11, 9]
VISION: Arrays = {
    "model.visual.patch_embed.proj.weight": np.ones((4, 4), np.float32),
    "model.visual.blocks.0.norm1.weight": np.ones(4, np.float32),
}


def run(folder: Path, config: dict[str, Any], weights: Arrays, **options: Any) -> ConvertReport:
    """Floats are kept by ``dtype``-less ``dequantize``, so that logits can be compared exactly."""
    write_folder(folder / "source", config, weights)
    return convert(folder / "source", folder / "out", ConvertOptions(**{"dequantize": True, **options}))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "config.json").read_text())


def written(folder: Path) -> dict[str, mx.array]:
    arrays: dict[str, mx.array] = {}
    for file in (folder / "out").glob("*.safetensors"):
        arrays |= mx.load(str(file))
    return arrays


def assert_same_logits(folder: Path, config: dict[str, Any], weights: Arrays) -> None:
    """The output, loaded by mlx-lm, against a model that was given the weights by name."""
    model, _ = load_model(folder / "out")
    expected = logits(reference_model(config, weights), TOKENS)
    assert np.array_equal(logits(model, TOKENS), expected)


def refused(folder: Path, config: dict[str, Any], weights: Arrays) -> str:
    with pytest.raises((ConversionError, UnsupportedModelError)) as error:
        run(folder, config, weights)
    assert not (folder / "out").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def per_expert(stacked: Arrays) -> Arrays:
    found: Arrays = {}
    for name, values in stacked.items():
        if ".switch_mlp." not in name:
            found[name] = values
            continue
        for number in range(len(values)):
            found[name.replace("switch_mlp", f"experts.{number}")] = values[number]
    return found


def moved(weights: Arrays, *, prefix: str, head: str = HEAD) -> Arrays:
    """A text model's weights under a wrapper's names."""
    return {
        head if name == HEAD else prefix + name.removeprefix("model."): values
        for name, values in weights.items()
    }


def test_a_tied_and_the_head_equals_the_embedding(tmp_path: Path) -> None:
    weights = random_weights(TIED)
    report = run(tmp_path, TIED, {**weights, HEAD: weights[EMBEDDING]})
    assert HEAD not in written(tmp_path)
    assert config_of(tmp_path)["tie_word_embeddings"] is True
    assert report.warnings == ()
    assert_same_logits(tmp_path, TIED, weights)


def test_b_tied_and_the_head_differs(tmp_path: Path) -> None:
    weights = random_weights(UNTIED)
    report = run(tmp_path, TIED, weights)
    assert config_of(tmp_path)["tie_word_embeddings"] is False
    assert any("differs from the embedding" in warning for warning in report.warnings)
    assert_same_logits(tmp_path, UNTIED, weights)


def test_c_not_tied_and_no_head(tmp_path: Path) -> None:
    assert HEAD in refused(tmp_path, UNTIED, random_weights(TIED))


@pytest.mark.parametrize("wrapper", ["wrap", "qwen3_vl", "mistral3"])
@pytest.mark.parametrize("top", [None, False, True])
def test_d_the_tie_flag_of_the_nested_config_counts(tmp_path: Path, wrapper: str, top: bool | None) -> None:
    inner = {**TIED, "model_type": "qwen3" if wrapper == "qwen3_vl" else "llama", "head_dim": 8}
    config: dict[str, Any] = {"model_type": wrapper, "text_config": inner}
    if top is not None:
        config["tie_word_embeddings"] = top
    weights = random_weights(inner)
    run(tmp_path, config, moved(weights, prefix="model.language_model."))
    assert not any(name.endswith(HEAD) for name in written(tmp_path))
    assert_same_logits(tmp_path, inner, weights)


@pytest.mark.parametrize("wrapper", ["wrap", "qwen3_vl", "mistral3"])
def test_d_a_tie_flag_above_the_nested_config_counts_where_that_has_none(
    tmp_path: Path, wrapper: str
) -> None:
    inner = {**BASE, "model_type": "qwen3" if wrapper == "qwen3_vl" else "llama", "head_dim": 8}
    untied, tied = {**inner, "tie_word_embeddings": False}, {**inner, "tie_word_embeddings": True}
    for flags, folder in ((untied, tmp_path / "untied"), (tied, tmp_path / "tied")):
        weights = random_weights(flags)
        config = {
            "model_type": wrapper,
            "text_config": inner,
            "tie_word_embeddings": flags["tie_word_embeddings"],
        }
        run(folder, config, moved(weights, prefix="model.language_model."))
        assert_same_logits(folder, flags, weights)


@pytest.mark.parametrize("wrapper", ["wrap", "qwen3_vl", "mistral3"])
def test_a_and_b_in_a_nested_config(tmp_path: Path, wrapper: str) -> None:
    inner = {**TIED, "model_type": "qwen3" if wrapper == "qwen3_vl" else "llama", "head_dim": 8}
    config = {"model_type": wrapper, "text_config": inner}
    weights = random_weights(inner)
    names = moved(weights, prefix="model.language_model.")
    run(tmp_path / "equal", config, {**names, HEAD: weights[EMBEDDING]})
    assert not any(name.endswith(HEAD) for name in written(tmp_path / "equal"))
    assert_same_logits(tmp_path / "equal", inner, weights)
    head = weights[EMBEDDING][::-1].copy()
    report = run(tmp_path / "other", config, {**names, HEAD: head})
    assert any("differs from the embedding" in warning for warning in report.warnings)
    assert_same_logits(tmp_path / "other", {**inner, "tie_word_embeddings": False}, {**weights, HEAD: head})


@pytest.mark.parametrize("has_head", [True, False])
def test_e_no_flag(tmp_path: Path, has_head: bool) -> None:
    same = UNTIED if has_head else TIED
    weights = random_weights(same)
    report = run(tmp_path, BASE, weights)
    assert config_of(tmp_path)["tie_word_embeddings"] is not has_head
    assert any("does not say whether the head is tied" in warning for warning in report.warnings)
    assert_same_logits(tmp_path, same, weights)


@pytest.mark.parametrize("num_experts", [4, 12])
def test_f_and_i_experts_are_stacked_by_number(tmp_path: Path, num_experts: int) -> None:
    config = {**MOE, "num_experts": num_experts}
    stacked = random_weights(config)
    # 0, 1, 3, 2 and 0, 1, 10, 11, 2, ...: neither is the order of numbers.
    names = per_expert(stacked)
    order = sorted(names, reverse=num_experts == 4)
    run(tmp_path, config, {name: names[name] for name in order})
    arrays = written(tmp_path)
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert np.array_equal(np.array(arrays[f"{SWITCH}.{part}.weight"]), stacked[f"{SWITCH}.{part}.weight"])
    assert_same_logits(tmp_path, config, stacked)


@pytest.mark.parametrize("expert", range(4))
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_g_an_expert_lacks_a_tensor(tmp_path: Path, expert: int, part: str) -> None:
    weights = per_expert(random_weights(MOE))
    name = f"{EXPERT}.{expert}.{part}.weight"
    del weights[name]
    assert f"tensor {name!r} is missing: expert {expert} of 4" in refused(tmp_path, MOE, weights)


def test_g_an_expert_lacks_all_or_there_is_one_too_many(tmp_path: Path) -> None:
    weights = per_expert(random_weights(MOE))
    less = {name: values for name, values in weights.items() if f"{EXPERT}.3." not in name}
    assert f"{EXPERT}.3.down_proj.weight' is missing" in refused(tmp_path / "less", MOE, less)
    extra = {name.replace("experts.3", "experts.4"): v for name, v in weights.items() if "experts.3" in name}
    message = refused(tmp_path / "more", MOE, weights | extra)
    assert f"{EXPERT}.4.down_proj.weight' (and 2 more) has no place" in message


def fused_case() -> np.ndarray:
    row = np.arange(4)[:, None] * 10 + np.arange(3)
    return np.stack([row, row + 100]).astype(np.float32)


GATE = [[[0, 1, 2], [10, 11, 12]], [[100, 101, 102], [110, 111, 112]]]
UP = [[[20, 21, 22], [30, 31, 32]], [[120, 121, 122], [130, 131, 132]]]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "olmoe"])
def test_h_fused_gate_and_up(tmp_path: Path, model_type: str) -> None:
    config = {
        **MOE,
        "model_type": model_type,
        "hidden_size": 3,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_experts": 2,
        "intermediate_size": 2,
        "moe_intermediate_size": 2,
        "shared_expert_intermediate_size": 2,
    }
    if model_type != "qwen3_moe":
        # These have no head_dim: it follows from the hidden size.
        config |= {"hidden_size": 4}
    stacked = random_weights(config)
    fused = fused_case()
    if model_type != "qwen3_moe":
        fused = np.concatenate([fused, np.zeros((2, 4, 1), np.float32)], axis=-1)
    weights = {name: values for name, values in stacked.items() if ".switch_mlp." not in name}
    weights[f"{EXPERT}.gate_up_proj"] = fused
    weights[f"{EXPERT}.down_proj"] = stacked[f"{SWITCH}.down_proj.weight"]
    run(tmp_path, config, weights)
    arrays = written(tmp_path)
    gate, up = (
        np.array(arrays[f"{SWITCH}.{part}.weight"])[..., :3].tolist() for part in ("gate_proj", "up_proj")
    )
    assert gate == GATE
    assert up == UP
    expected = {**stacked}
    expected |= {f"{SWITCH}.gate_proj.weight": fused[:, :2], f"{SWITCH}.up_proj.weight": fused[:, 2:]}
    assert_same_logits(tmp_path, config, expected)


def test_h_fused_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    stacked = random_weights(MOE)
    weights = {name: values for name, values in stacked.items() if ".switch_mlp." not in name}
    weights[f"{EXPERT}.gate_up_proj"] = np.ones((4, 30, 32), np.float32)
    weights[f"{EXPERT}.down_proj"] = stacked[f"{SWITCH}.down_proj.weight"]
    assert f"{EXPERT}.gate_up_proj' has no place" in refused(tmp_path, MOE, weights)


def test_h_fused_experts_are_quantized_like_separate_ones(tmp_path: Path) -> None:
    config = {**MOE, "moe_intermediate_size": 32}
    stacked = random_weights(config)
    weights = {name: values for name, values in stacked.items() if ".switch_mlp." not in name}
    halves = [stacked[f"{SWITCH}.{part}.weight"] for part in ("gate_proj", "up_proj")]
    weights[f"{EXPERT}.gate_up_proj"] = np.concatenate(halves, axis=1)
    weights[f"{EXPERT}.down_proj"] = stacked[f"{SWITCH}.down_proj.weight"]
    options = {"dequantize": False, "bits": 4, "group_size": 32}
    run(tmp_path / "fused", config, weights, **options)
    run(tmp_path / "separate", config, per_expert(stacked), **options)
    fused, separate = written(tmp_path / "fused"), written(tmp_path / "separate")
    assert set(fused) == set(separate)
    assert all(mx.array_equal(fused[name], separate[name]) for name in fused)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("wrapper", ["wrap", "qwen2_vl", "qwen3_vl", "mistral3", "pixtral", "gemma3"])
@pytest.mark.parametrize("has_vision", [True, False])
def test_j_the_text_part_of_a_multimodal_model(
    tmp_path: Path, wrapper: str, prefix: str, has_vision: bool
) -> None:
    inner_type = {"qwen2_vl": "qwen2", "qwen3_vl": "qwen3", "gemma3": "gemma3_text"}.get(wrapper, "llama")
    inner = {**UNTIED, "model_type": inner_type, "head_dim": 8}
    if wrapper == "gemma3":
        inner |= {"sliding_window": 16, "query_pre_attn_scalar": 8, "sliding_window_pattern": 1}
    config = {"model_type": wrapper, "text_config": inner, "vision_config": {"depth": 2}, "vocab_size": 64}
    weights = random_weights(inner)
    head = "language_model.lm_head.weight" if prefix.startswith("language") else HEAD
    report = run(tmp_path, config, moved(weights, prefix=prefix, head=head) | (VISION if has_vision else {}))
    told = [warning for warning in report.warnings if "only the text part is converted" in warning]
    assert told == (
        ["only the text part is converted: 2 tensors of visual are left out"] if has_vision else []
    )
    if wrapper == "wrap":
        assert "model_type 'wrap' is not supported: only its text part, a llama model" in report.warnings[0]
        assert config_of(tmp_path)["model_type"] == "llama"
    assert not any("visual" in name for name in written(tmp_path))
    assert_same_logits(tmp_path, inner, weights)


def test_j_other_unknown_tensors_are_refused_there_too(tmp_path: Path) -> None:
    config = {"model_type": "wrap", "text_config": UNTIED, "vision_config": {}}
    weights = moved(random_weights(UNTIED), prefix="model.language_model.") | VISION
    weights["model.language_model.layers.0.cross_attn.weight"] = np.ones((4, 4), np.float32)
    assert "cross_attn.weight' has no place" in refused(tmp_path, config, weights)


def test_j_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "wrap", "text_config": UNTIED}
    weights = random_weights(UNTIED)
    both = moved(weights, prefix="model.language_model.") | moved(weights, prefix="language_model.model.")
    assert "two tensors are 'model." in refused(tmp_path, config, both)


def test_vision_tensors_of_a_text_model_are_refused(tmp_path: Path) -> None:
    """Only a config with a text part says that there are others."""
    assert "model.visual." in refused(tmp_path, UNTIED, random_weights(UNTIED) | VISION)


@pytest.mark.parametrize(
    "changes",
    [{"auto_map": {"AutoModel": "modeling_x.X"}}, {"text_config": BASE | {"model_type": "no_such_text"}}],
)
def test_a_text_part_that_is_unknown_or_may_be_changed_by_code(tmp_path: Path, changes: dict) -> None:
    config = {"model_type": "wrap", "text_config": UNTIED, **changes}
    message = refused(tmp_path, config, moved(random_weights(UNTIED), prefix="model.language_model."))
    assert "model_type 'wrap' is not supported" in message


def test_k_harmless_extras(tmp_path: Path) -> None:
    weights = random_weights(UNTIED)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    report = run(tmp_path, UNTIED, weights | extra)
    assert report.warnings == ()
    assert_same_logits(tmp_path, UNTIED, weights)


def test_l_an_unknown_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.mystery"
    message = refused(tmp_path, UNTIED, random_weights(UNTIED) | {name: np.ones(4, np.float32)})
    assert f"tensor {name!r} has no place" in message


def test_what_an_architecture_leaves_out_is_said(tmp_path: Path) -> None:
    """mlx-lm's mimo has no layers for the prediction of further tokens, and leaves them out in silence."""
    config = {**UNTIED, "model_type": "mimo"}
    weights = random_weights(config)
    extra = {f"model.mtp_layers.{n}.input_proj.weight": np.ones((4, 4), np.float32) for n in range(2)}
    report = run(tmp_path, config, weights | extra)
    assert report.warnings == (
        "tensor 'model.mtp_layers.0.input_proj.weight' (and 1 more) is not used by a mimo model and left out",
    )
    assert_same_logits(tmp_path, config, weights)


def test_m_and_n_unknown_types_and_code(tmp_path: Path) -> None:
    source = {"x": np.ones(4, np.float32)}
    message = refused(tmp_path / "m", {**BASE, "model_type": "no_such_arch"}, source)
    assert "'no_such_arch' is not supported" in message
    assert "llama" in message
    config = {
        **BASE,
        "model_type": "custom_x",
        "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    }
    (tmp_path / "n" / "source").mkdir(parents=True)
    (tmp_path / "n" / "source" / "modeling_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "own code (auto_map) is never run" in refused(tmp_path / "n", config, source)
    assert not (tmp_path / "ran").exists()
