"""mlx-lm's layers with experts compute on our kernels what they compute by themselves."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gemma4_text, granitemoe, mixtral, olmoe, qwen2_moe, qwen3_moe
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP

from mlxserve.models.experts import gated_experts
from mlxserve.models.layers import use_kernels
from mlxserve.models.loader import _convert_parameters
from mlxserve_kernels import ops

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 32,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
BLOCKS = {
    "granitemoe": granitemoe.GraniteMoeMoE,
    "mixtral": mixtral.MixtralSparseMoeBlock,
    "olmoe": olmoe.OlmoeSparseMoeBlock,
    "qwen2_moe": qwen2_moe.Qwen2MoeSparseMoeBlock,
    "qwen3_moe": qwen3_moe.Qwen3MoeSparseMoeBlock,
    "qwen3_moe-raw": qwen3_moe.Qwen3MoeSparseMoeBlock,
}


@pytest.fixture(autouse=True)
def on_kernels() -> None:
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")
    mx.random.seed(11)


def new_block(family: str) -> nn.Module:
    kind = BLOCKS[family]
    file = {"granitemoe": granitemoe, "mixtral": mixtral, "olmoe": olmoe, "qwen2_moe": qwen2_moe}
    args = file.get(family, qwen3_moe).ModelArgs
    given = SIZES | {"model_type": family, "norm_topk_prob": family != "qwen3_moe-raw"}
    known = {name: value for name, value in given.items() if name in args.__dataclass_fields__}
    block: nn.Module = kind(args(**known))
    return block


def switch(module: nn.Module) -> nn.Module:
    """On our kernels, as the loader brings a model there."""
    holder = nn.Sequential(module)
    use_kernels(holder, mx.float32)
    for _, layer in holder.named_modules():
        _convert_parameters(layer, mx.float32)
    return module


def assert_close(got: mx.array, want: mx.array) -> None:
    assert got.shape == want.shape
    limit = 1e-5 * float(mx.max(mx.abs(want)).item())  # type: ignore[arg-type]
    assert float(mx.max(mx.abs(got - want)).item()) <= limit  # type: ignore[arg-type]


def run(module: nn.Module, *arguments: mx.array) -> mx.array:
    result: mx.array = module(*arguments)
    mx.eval(result)
    return result


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_is_what_it_was(family: str, bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    block = new_block(family)
    if bits is not None:
        nn.quantize(block, group_size=32, bits=bits)
    inputs = [mx.random.normal(shape) for shape in ((1, 1, 64), (5, 1, 64), (1, 40, 64))]
    wanted = [run(block, x) for x in inputs]
    switch(block)
    calls: list[Any] = []
    ours = ops.gated_experts
    monkeypatch.setattr(ops, "gated_experts", lambda *a, **k: calls.append(k["shares"]) or ours(*a, **k))
    for x, want in zip(inputs, wanted, strict=True):
        assert_close(run(block, x), want)
    assert len(calls) == len(inputs)
    assert all(shares is not None for shares in calls)


@pytest.mark.parametrize("activation", [SwiGLU, gemma4_text.GeGLU])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_glu_by_itself(activation: type[nn.Module], bits: int | None) -> None:
    glu = SwitchGLU(64, 96, 5, activation(), bias=True)
    for name in ("gate_proj", "up_proj", "down_proj"):
        glu[name].bias = mx.random.normal(glu[name].bias.shape)
    if bits is not None:
        nn.quantize(glu, group_size=32, bits=bits)
    for rows in (1, 3, 50):
        x = mx.random.normal((rows, 1, 64))
        ids = mx.random.randint(0, 5, (rows, 1, 3)).astype(mx.uint32)
        want = run(glu, x, ids)
        assert_close(run(switch(glu), x, ids), want)
    assert gated_experts(glu) is not None


@pytest.mark.parametrize("bits", [4, 6])
def test_other_activations_and_formats(bits: int) -> None:
    class Other(nn.Module):
        def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
            return mx.tanh(gate) * x

    for module in (SwitchGLU(64, 96, 5, Other()), SwitchMLP(64, 96, 5, bias=True)):
        nn.quantize(module, group_size=32, bits=bits)
        for rows in (1, 3, 50):
            x, ids = mx.random.normal((rows, 2, 64)), mx.random.randint(0, 5, (rows, 2, 3))
            want = run(module, x, ids)
            assert_close(run(switch(module), x, ids), want)
        assert gated_experts(module) is None


def test_rows_that_share_an_index() -> None:
    layer = SwitchGLU(64, 96, 5).up_proj
    x, ids = mx.random.normal((4, 1, 7, 64)), mx.random.randint(0, 5, (4, 2))
    want = run(layer, x, ids)
    assert_close(run(switch(layer), x, ids), want)


def test_scales_are_narrowed_where_that_is_exact_and_dense_weights_stay_narrow() -> None:
    glu = SwitchGLU(64, 64, 3)
    quantized = SwitchGLU(64, 64, 3)
    nn.quantize(quantized, group_size=32, bits=4)
    for name in ("gate_proj", "up_proj", "down_proj"):
        glu[name].weight = glu[name].weight.astype(mx.bfloat16)
        for part in ("scales", "biases"):
            quantized[name][part] = quantized[name][part].astype(mx.float16).astype(mx.float32)
    quantized.up_proj.scales[0, 0, 0] = 1 + 2**-20
    switch(glu), switch(quantized)
    assert glu.up_proj.weight.dtype == mx.bfloat16
    dtypes = [(layer.scales.dtype, layer.biases.dtype) for layer in (quantized.gate_proj, quantized.up_proj)]
    assert dtypes == [(mx.float16, mx.float16), (mx.float32, mx.float32)]
    x, ids = mx.random.normal((2, 64)), mx.array([[0, 2], [1, 0]], dtype=mx.int32)
    assert bool(mx.all(mx.isfinite(run(quantized, x, ids))).item())
