"""mlx-lm's ``sanitize`` recorded on weights gives the bits that it gives on real arrays, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxserve.models.architectures import build_model
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
    "granitemoehybrid", "exaone", "bitnet", "minicpm3", "plamo", "qwen", "olmo", "telechat3", "youtu_llm",
)}  # fmt: skip
FAMILIES["gpt2"] = GPT2
FAMILIES["deepseek_v2"] = {"rope_scaling": {"type": "yarn", "factor": 2.0}}
FAMILIES["mistral3"] = {"text_config": {**COMMON, "model_type": "llama"}}
FAMILIES["gemma3"] = {"text_config": {**COMMON, "model_type": "gemma3_text"}}
MIN_FAMILIES = 25
NEEDED = {"llama", "gemma2", "phi3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "mamba"}


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
