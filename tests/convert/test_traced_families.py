"""mlx-lm's ``sanitize`` recorded on weights gives the bits that it gives on real arrays, family by family."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxserve.models.architectures import build_model
from mlxserve_convert.naming import split_fused_experts
from mlxserve_convert.tracing import Traced, _recording, sanitized
from mlxserve_convert.weights import Leaf, Weight

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "sliding_window": 16,
    "attention_bias": False,
    "mlp_bias": False,
    "use_cache": True,
    "hidden_act": "silu",
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "state_size": 4,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_rank": 4,
    "use_qkv_bias": False,
    "logits_scaling": 1.0,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": True,
    "dim_model_base": 32,
    "scale_depth": 1.0,
    "scale_emb": 1.0,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "num_layers": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "sliding_window_pattern": 2,
    "shared_intermediate_size": 16,
    "rotary_dim": 8,
    "post_norm": False,
    "qk_norm": True,
}
GPT2 = {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
FAMILIES: dict[str, dict[str, Any]] = {name: {} for name in (
    "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "starcoder2", "stablelm", "olmo2",
    "olmo3", "granite", "cohere", "cohere2", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2",
    "deepseek_v3",
    "dots1", "glm4", "glm4_moe", "gpt_oss", "mamba", "mamba2", "olmoe", "phimoe", "ernie4_5", "exaone4",
    "smollm3", "seed_oss", "internlm2", "internlm3", "qwen3_next", "helium", "minicpm", "nemotron", "phi",
    "gpt_neox", "granitemoe", "hunyuan_v1_dense", "mistral3", "gemma3", "bailing_moe", "apertus", "gpt2",
    "lfm2", "jamba", "falcon_h1", "minimax", "afmoe", "llama4_text", "recurrent_gemma", "rwkv7", "nemotron_h",
    "granitemoehybrid", "exaone", "bitnet", "minicpm3", "plamo", "qwen", "telechat3", "youtu_llm",
    "qwen3_5_moe", "qwen3_vl_moe", "llama4", "ernie4_5_moe", "lfm2_moe", "mimo", "gemma4_text",
)}  # fmt: skip
FAMILIES["gpt2"] = GPT2
FAMILIES["deepseek_v2"] = {"rope_scaling": {"type": "yarn", "factor": 2.0}}
FAMILIES["mistral3"] = {"text_config": {**COMMON, "model_type": "llama"}}
FAMILIES["gemma3"] = {"text_config": {**COMMON, "model_type": "gemma3_text"}}
SLIDING = ["sliding_attention", "full_attention"]
FAMILIES["olmo3"] = {"layer_types": SLIDING}
FAMILIES["afmoe"] = {"layer_types": SLIDING, "num_dense_layers": 0}
FAMILIES["exaone4"] = {"sliding_window_pattern": "LG"}
FAMILIES["minicpm3"] = {
    "rope_scaling": {
        "type": "longrope",
        "long_factor": [1.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 32,
    }
}
FAMILIES["gemma4_text"] = {"layer_types": SLIDING, "num_kv_shared_layers": 0}
FAMILIES["ernie4_5_moe"] = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 0,
    "moe_num_shared_experts": 1,
}
FAMILIES["mamba2"] = {"num_heads": 8, "n_groups": 1, "time_step_limit": [0.0, 1.0]}
FAMILIES["lfm2"] = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_ff_dim": 48,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}
FAMILIES["lfm2_moe"] = {
    **FAMILIES["lfm2"],
    "layer_types": ["conv", "full_attention"],
    "num_dense_layers": 0,
    "use_expert_bias": True,
}
FAMILIES["jamba"] = {
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 0,
    "expert_layer_period": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 4,
    "mamba_expand": 2,
}
FAMILIES["llama4_text"] = {"intermediate_size_mlp": 48, "no_rope_layers": [1, 0]}
FAMILIES["llama4"] = {
    "text_config": {
        **COMMON,
        "model_type": "llama4_text",
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
    }
}
FAMILIES["qwen3_vl_moe"] = {"text_config": {**COMMON, "model_type": "qwen3_moe"}}
FAMILIES["qwen3_5_moe"] = {"text_config": {**COMMON, "model_type": "qwen3_5_moe_text"}}
FAMILIES["recurrent_gemma"] = {
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "attention_window_size": 16,
    "block_types": ["recurrent", "attention"],
}
FAMILIES["rwkv7"] = {
    "a_low_rank_dim": 4,
    "v_low_rank_dim": 4,
    "gate_low_rank_dim": 4,
    "decay_low_rank_dim": 4,
}
FAMILIES["nemotron_h"] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 4,
    "n_groups": 1,
    "hybrid_override_pattern": "M*",
    "time_step_limit": [0.0, 1.0],
}
FAMILIES["granitemoehybrid"] = {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 4,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
MIN_FAMILIES = 55
NEEDED = {"llama", "gemma2", "phi3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "mamba"}
W_FAMILIES = ("mixtral", "phimoe", "minimax", "lfm2_moe")
"""Families whose files call the three matrices of an expert w1, w3 and w2."""
W_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PER_EXPERT = (
    "mixtral", "phimoe", "minimax", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2",
    "deepseek_v3", "dots1", "glm4_moe", "bailing_moe", "afmoe", "lfm2_moe", "jamba", "ernie4_5_moe",
)  # fmt: skip
FUSED_ROWS = ("qwen3_5_moe", "qwen3_moe", "qwen2_moe", "glm4_moe")
FUSED_COLUMNS = ("qwen3_vl_moe", "llama4")


def built(model_type: str) -> Any | None:
    try:
        return build_model({**COMMON, "model_type": model_type, **FAMILIES[model_type]}, Path(model_type))
    except Exception:  # noqa: BLE001 - the table is one for all; the count below keeps it honest
        return None


def checkpoint_of(model: Any) -> dict[str, mx.array]:
    """Arrays as a checkpoint has them: the model's own names and shapes, experts one by one."""
    mx.random.seed(0)
    found: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):
        array = mx.random.normal(value.shape).astype(mx.float16)
        if ".switch_mlp." in name:
            for expert in range(array.shape[0]):
                found[name.replace("switch_mlp", f"experts.{expert}")] = array[expert]
        else:
            found[name] = array
    mx.eval(list(found.values()))
    return found


def is_expert(name: str) -> bool:
    return any(part in name for part in (".switch_mlp.", ".feed_forward.experts.", ".mlp.experts."))


def one_by_one(model_type: str, model: Any) -> dict[str, mx.array]:
    """The files of a mixture of experts: each matrix of each expert, under the family's names."""
    found: dict[str, mx.array] = {}
    for name, array in random_arrays(model).items():
        if not is_expert(name):
            found[name] = array
            continue
        place = re.sub(r"switch_mlp|experts", "experts.{}", name)
        if model_type in W_FAMILIES:
            part = name.split(".")[-2]
            place = place.replace(part, W_NAMES[part])
        found |= {place.format(expert): array[expert] for expert in range(array.shape[0])}
    return found


def fused(model: Any, *, is_transposed: bool) -> dict[str, mx.array]:
    """The files with ``gate_up_proj`` of all experts in one tensor: the gate's half first."""
    found: dict[str, mx.array] = {}
    arrays = random_arrays(model)
    for name, array in arrays.items():
        if not is_expert(name):
            found[name] = array
            continue
        place = name.replace("switch_mlp", "experts").removesuffix(".weight")
        if place.endswith("down_proj"):
            found[place] = array.swapaxes(1, 2) if is_transposed else array
        elif place.endswith("gate_proj"):
            both = mx.concatenate([array, arrays[name.replace("gate_proj", "up_proj")]], axis=1)
            found[place.replace("gate_proj", "gate_up_proj")] = both.swapaxes(1, 2) if is_transposed else both
    return found


def random_arrays(model: Any) -> dict[str, mx.array]:
    mx.random.seed(0)
    return {
        name: mx.random.normal(value.shape).astype(mx.float16)
        for name, value in tree_flatten(model.parameters())
    }


def outcome(model: Any, arrays: dict[str, mx.array], *, is_traced: bool) -> dict[str, mx.array] | str:
    try:
        if is_traced:
            weights: dict[str, Weight] = {name: Leaf(array, "x") for name, array in arrays.items()}
            return {name: in_blocks(weight) for name, weight in sanitized(model, weights).items()}
        return dict(model.sanitize(dict(arrays)) if hasattr(model, "sanitize") else arrays)
    except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        return type(error).__name__


def in_blocks(weight: Weight, step: int = 3) -> mx.array:
    """Read by an odd number of rows."""
    blocks = [weight.read(row, min(row + step, weight.num_rows)) for row in range(0, weight.num_rows, step)]
    return (mx.concatenate(blocks) if blocks else weight.value()).reshape(weight.shape)


def same_bits(first: mx.array, second: mx.array) -> bool:
    return first.dtype == second.dtype and bool(mx.array_equal(first, second, equal_nan=True).item())


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_recorded_is_what_sanitize_does(model_type: str) -> None:
    model = built(model_type)
    if model is None:
        pytest.skip("needs a config of its own")
    arrays = checkpoint_of(model)
    expected = outcome(model, arrays, is_traced=False)
    found = outcome(model, arrays, is_traced=True)
    assert isinstance(found, dict) == isinstance(expected, dict), (expected, found)
    if isinstance(expected, dict) and isinstance(found, dict):
        assert set(found) == set(expected)
        assert all(same_bits(found[name], expected[name]) for name in expected)


def assert_all_found(model: Any, arrays: dict[str, mx.array]) -> None:
    """Through all the steps of a conversion, every parameter gets the values that its module has."""
    weights: dict[str, Weight] = {name: Leaf(array, "x") for name, array in arrays.items()}
    shapes = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    found = split_fused_experts(sanitized(model, weights), shapes)
    expected = random_arrays(model)
    assert set(found) == set(expected)
    experts = [name for name in expected if is_expert(name)]
    assert experts
    assert all(same_bits(in_blocks(found[name]), expected[name]) for name in experts)


@pytest.mark.parametrize("model_type", PER_EXPERT)
def test_experts_one_by_one(model_type: str) -> None:
    model = built(model_type)
    assert model is not None
    assert_all_found(model, one_by_one(model_type, model))


@pytest.mark.parametrize("model_type", [*FUSED_ROWS, *FUSED_COLUMNS])
def test_experts_in_fused_tensors(model_type: str) -> None:
    model = built(model_type)
    assert model is not None
    assert_all_found(model, fused(model, is_transposed=model_type in FUSED_COLUMNS))


def test_enough_families_are_built() -> None:
    running = [name for name in FAMILIES if (model := built(name)) is not None
               and isinstance(outcome(model, checkpoint_of(model), is_traced=False), dict)]  # fmt: skip
    assert len(running) >= MIN_FAMILIES
    assert set(running) >= NEEDED


OPERATIONS = {
    "T": lambda mx_, x: x.T,
    "swap": lambda mx_, x: mx_.swapaxes(x, 0, -1),
    "move": lambda mx_, x: mx_.moveaxis(x, -1, 0),
    "flat": lambda mx_, x: x.reshape(-1, x.shape[-1]),
    "fold": lambda mx_, x: x.reshape(-1),
    "half": lambda mx_, x: mx_.split(x, [x.shape[0] // 2], axis=0)[1] if x.shape[0] > 1 else x,
    "even": lambda mx_, x: x[..., ::2],
    "odd rows": lambda mx_, x: x[1::2] if x.shape[0] > 1 else x,
    "columns": lambda mx_, x: x[..., : max(1, x.shape[-1] - 1)],
    "stack": lambda mx_, x: mx_.stack([x, x * 2]),
    "join": lambda mx_, x: mx_.concatenate([x, x + 1], axis=-1),
    "join rows": lambda mx_, x: mx_.concatenate([x, -x], axis=0),
    "first": lambda mx_, x: x[0] if x.ndim > 1 else x,
    "new": lambda mx_, x: x[None],
    "expand": lambda mx_, x: mx_.expand_dims(x, -1),
    "squeeze": lambda mx_, x: mx_.squeeze(x),
    "cast": lambda mx_, x: x.astype(mx.float16),
    "scale": lambda mx_, x: x * 0.5 + 1,
    "exp": lambda mx_, x: -mx_.exp(x),
    "pad": lambda mx_, x: mx_.pad(x, [(0, 1)] * x.ndim),
    "flatten": lambda mx_, x: x.flatten(),
}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_any_chain_read_by_odd_blocks_equals_the_whole(shape: list[int], chain: list[str], step: int) -> None:
    from mlxserve_convert.tracing import _Recorder

    array = mx.array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    expected: Any = array
    found: Any = Traced(Leaf(array, "float32"))
    recorder = _Recorder()
    for name in chain:
        expected = OPERATIONS[name](mx, expected)
        with _recording():
            found = OPERATIONS[name](recorder, found)
        if expected.ndim == 0 or expected.size > 20_000:
            return
    assert found.shape == expected.shape
    assert same_bits(in_blocks(found.weight, step), expected)
