"""Every architecture with plain or windowed attention runs on pages as mlx-lm itself runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_stock

from mlxserve.config import EngineConfig
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.errors import UnsupportedModelError
from mlxserve.models.loader import load_model
from mlxserve_kernels import ops
from tests.tiny_models import TinyModel, write_tiny_model

from .driving import generate, greedy

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
GRANITE = {
    "attention_bias": False,
    "mlp_bias": False,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
}
GLM = {"attention_bias": False, "partial_rotary_factor": 0.5}
WINDOW_LAYERS = ["sliding_attention", "full_attention"]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 8},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": WINDOW_LAYERS},
    "granite": GRANITE,
    "granitemoe": GRANITE | MOE,
    "starcoder2": {},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": False, "layer_norm_eps": 1e-5},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 2, "logit_scale": 1.0},
    "glm": GLM,
    "glm4": GLM,
    "ernie4_5": {"use_bias": False},
    "smollm3": {},
    "seed_oss": {"attention_bias": False},
    "internlm2": {"bias": False},
    # mlx-lm's helium has a head in any case, and the tied one would not be used.
    "helium": {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    "nemotron": {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "hidden_act": "relu2"},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "n_ctx": 128,
        "layer_norm_epsilon": 1e-5,
    },
    "mixtral": MOE,
    "olmoe": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "gpt_oss": MOE | {"sliding_window": 8, "layer_types": WINDOW_LAYERS},
}

REFUSED: dict[str, dict[str, Any]] = {
    "mamba2": {
        "state_size": 16,
        "expand": 2,
        "num_heads": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
        "layer_norm_epsilon": 1e-5,
    },
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 2,
        "n_inner": 128,
        "n_head": 4,
        "n_positions": 128,
        "layer_norm_epsilon": 1e-5,
    },
    "deepseek_v3": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    | {"routed_scaling_factor": 1.0, "attention_bias": False},
}


def tiny(model_type: str, extra: dict[str, Any], folder: Path) -> Path:
    return write_tiny_model(folder, TinyModel(model_type=model_type, extra_config=extra))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tokens_are_those_that_mlx_lm_would_choose(model_type: str, tmp_path: Path) -> None:
    folder = tiny(model_type, ARCHITECTURES[model_type], tmp_path / model_type)
    core = EngineCore(
        ModelTarget(load_model(folder), 8),
        EngineConfig(page_size=8, kv_pages=24, max_step_tokens=17),
        is_pipelined=ops.supports_steps_in_flight(),
    )
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 96, size).tolist() for size in (40, 3)]
    generated = generate(core, *(greedy(str(i), prompt) for i, prompt in enumerate(prompts)))
    stock, _ = load_stock(folder, strict=True)
    for prompt, given in zip(prompts, generated, strict=True):
        assert len(given) == 12
        check_choices(stock, prompt, given)


def check_choices(stock: Any, prompt: list[int], given: list[int]) -> None:
    """Each token is the best of the stock model's logits after all before it, or within rounding of it."""
    logits = stock(mx.array([prompt + given[:-1]]), make_prompt_cache(stock))[0, len(prompt) - 1 :]
    logits = np.array(logits.astype(mx.float32))
    chosen = logits[np.arange(len(given)), given]
    np.testing.assert_array_less(logits.max(-1) - chosen, 1e-4 * np.abs(logits).max() + 1e-6)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_does_not_fit_pages_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    folder = tiny(model_type, REFUSED[model_type], tmp_path / model_type)
    with pytest.raises(
        UnsupportedModelError, match=f"model_type '{model_type}' is not served yet: "
    ) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_stock_models_are_left_as_they_are(tmp_path: Path) -> None:
    """Loading rebinds a name in mlx-lm's module; a model with mlx-lm's own caches must not notice."""
    folder = tiny("llama", {}, tmp_path / "llama")
    stock, _ = load_stock(folder, strict=True)
    ids = mx.array([[1, 2, 3, 4]])
    before = np.array(stock(ids, make_prompt_cache(stock)))
    load_model(folder)
    np.testing.assert_array_equal(np.array(stock(ids, make_prompt_cache(stock))), before)
