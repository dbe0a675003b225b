"""Sizes from a config alone, against counts by the published formulas of each architecture."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import pytest

from mlxserve.cli import run as run_command
from mlxserve.errors import UnsupportedModelError
from mlxserve.models.apple_chips import CHIPS, working_set
from mlxserve_convert import ConvertOptions, convert
from mlxserve_convert.fit import Budget, Footprint, footprint, gguf_footprint, macs, tokens_per_second
from tests.convert.checkpoints import LLAMA, random_weights, write_folder, write_gguf

PLACE = Path("config.json")


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama kind and its relatives: numbers of its public config. ``billions`` as its maker
    states them."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    billions: float
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: int = 0
    chosen: int = 0
    extra: tuple[tuple[str, Any], ...] = ()

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }
        return config | dict(self.extra)

    def matrices(self) -> int:
        """Elements of all matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = 3 * self.hidden * self.inner * max(self.experts, 1) + self.hidden * self.experts
        return self.layers * (attention + feed_forward) + self.vocab * self.hidden * (1 if self.tied else 2)

    def vectors(self) -> int:
        width = self.head_dim * (self.heads + 2 * self.kv_heads)
        each = self.norms * self.hidden + 2 * self.head_dim * self.qk_norm + width * self.qkv_bias
        return self.layers * each + self.hidden

    def read(self) -> int:
        """Matrix elements that one token needs."""
        idle = 3 * self.hidden * self.inner * (self.experts - self.chosen) * self.layers
        return self.matrices() - idle - (0 if self.tied else self.vocab * self.hidden)

    def kv_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


QWEN_MOE = (
    ("num_experts", 128),
    ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 768),
    ("decoder_sparse_step", 1),
    ("mlp_only_layers", []),
    ("norm_topk_prob", True),
)
GEMMA = (("query_pre_attn_scalar", 256), ("sliding_window", 1024), ("sliding_window_pattern", 6))
GEMMA2 = (
    ("query_pre_attn_scalar", 256),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
)
PHI = (("original_max_position_embeddings", 4096),)
SHAPES = {
    "Llama 3.1 8B": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 8.03),
    "Llama 3.1 70B": Shape("llama", 8192, 80, 64, 8, 128, 28672, 128256, 70.6),
    "Qwen 2.5 7B": Shape("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 7.62, qkv_bias=True),
    "Qwen 3 8B": Shape("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 8.2, qk_norm=True),
    "Qwen 3 30B A3B": Shape(
        "qwen3_moe",
        2048,
        48,
        32,
        4,
        128,
        768,
        151936,
        30.5,
        qk_norm=True,
        experts=128,
        chosen=8,
        extra=QWEN_MOE,
    ),
    "Mistral 7B": Shape("mistral", 4096, 32, 32, 8, 128, 14336, 32768, 7.25),
    "Gemma 2 9B": Shape(
        "gemma2", 3584, 42, 16, 8, 256, 14336, 256000, 9.24, tied=True, norms=4, extra=GEMMA2
    ),
    "Gemma 3 27B": Shape(
        "gemma3_text",
        5376,
        62,
        32,
        16,
        128,
        21504,
        262208,
        27.0,
        tied=True,
        norms=4,
        qk_norm=True,
        extra=GEMMA,
    ),
    "Phi 3 mini": Shape("phi3", 3072, 32, 32, 32, 96, 8192, 32064, 3.82, extra=PHI),
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rope_theta": 150000,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
}


def near(found: float, expected: float) -> bool:
    return abs(found - expected) <= 0.03 * expected


@pytest.mark.parametrize("name", SHAPES)
def test_public_configs_have_the_bytes_that_their_formulas_count(name: str) -> None:
    shape = SHAPES[name]
    model = footprint(shape.config(), PLACE, (None, 8, 4))
    matrices, vectors = shape.matrices(), shape.vectors()
    assert near(model.weights[0].num_parameters, shape.billions * 1e9)
    assert near(model.weights[0].num_parameters, matrices + vectors)
    for weights, bits in zip(model.weights, (16, 8.5, 4.5), strict=True):
        # A scale and a bias of 16 bits for 64 values are half a bit a value.
        assert near(weights.num_bytes, matrices * bits / 8 + vectors * 2), weights
        assert near(weights.read_bytes, shape.read() * bits / 8 + vectors * 2), weights
    assert model.kv_token_bytes() == shape.kv_token()
    assert model.kv_token_bytes(8) == pytest.approx(shape.kv_token() * 9 / 16)
    assert model.kv_token_bytes(4) == pytest.approx(shape.kv_token() * 6 / 16)


def test_latent_attention_and_experts_of_deepseek_v3() -> None:
    hidden, heads = 7168, 128
    attention = (
        hidden * 1536 + 1536 * heads * 192 + hidden * (512 + 64) + 512 * heads * 256 + heads * 128 * hidden
    )
    expert = 3 * hidden * 2048
    dense = 3 * (attention + 3 * hidden * 18432)
    sparse = 58 * (attention + 257 * expert + 256 * hidden)
    tables = 2 * 129280 * hidden
    model = footprint(DEEPSEEK, PLACE, (4,))
    assert near(model.weights[0].num_parameters, 671e9)
    assert near(model.weights[0].num_bytes, (dense + sparse + tables) * 4.5 / 8)
    active = dense + 58 * (attention + 9 * expert + 256 * hidden) + tables / 2
    assert near(model.weights[0].read_bytes, active * 4.5 / 8)
    assert {layer.kind for layer in model.layers} == {"latent"}
    assert model.kv_token_bytes() == 61 * (512 + 64) * 2


def test_windows_and_experts_of_gpt_oss() -> None:
    hidden, inner, wide = 2880, 2880, 64 * 64
    attention = hidden * (2 * wide + 2 * 8 * 64)
    layer = attention + 32 * 3 * hidden * inner + 32 * hidden
    model = footprint(GPT_OSS, PLACE, (4,))
    total = 24 * layer + 2 * 201088 * hidden
    # The experts' biases stay as floats.
    biases = 24 * 32 * (2 * inner + hidden)
    assert near(model.weights[0].num_parameters, 20.9e9)
    assert near(model.weights[0].num_bytes, total * 4.5 / 8 + biases * 2)
    assert [layer.window for layer in model.layers] == [128, None] * 12
    assert model.kv_token_bytes() == 24 * 2 * 8 * 64 * 2
    # Attention reads the window of half the layers; the server keeps all of them.
    assert model.windowed_kv_bytes(8192) == 12 * 2 * 8 * 64 * 2 * (8192 + 128)
    assert model.kv_bytes(8192) == 8192 * model.kv_token_bytes()


def test_recurrent_layers_keep_a_state_that_does_not_grow() -> None:
    config = {
        "model_type": "mamba",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    }
    model = footprint(config, PLACE, (None,))
    assert [layer.kind for layer in model.layers] == ["recurrent"] * 2
    assert model.kv_token_bytes() == 0
    # Of each layer: the last three inputs of the convolution and the state, 16-bit.
    assert model.state_bytes == 2 * (3 * 128 + 128 * 8) * 2
    assert model.kv_bytes(10) == model.kv_bytes(10_000)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_the_converter_writes_what_was_computed(bits: int, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", LLAMA, random_weights(LLAMA))
    report = convert(source, tmp_path / "out", ConvertOptions(bits=bits, recipe="uniform", check="never"))
    computed = footprint(LLAMA | {"torch_dtype": "float32"}, PLACE, (bits,))
    assert computed.weights[0].num_bytes == report.num_bytes
    config = json.loads((tmp_path / "out" / "config.json").read_text()) | {"torch_dtype": "float32"}
    assert footprint(config, PLACE, ()).weights[0].num_bytes == report.num_bytes


def test_a_gguf_header_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, LLAMA, random_weights(LLAMA), gguf.GGMLQuantizationType.Q4_1)
    report = convert(path, tmp_path / "out", ConvertOptions(check="never"))
    model, resident = gguf_footprint(path, (8,))
    assert [weights.name for weights in model.weights] == ["as it is", "8-bit"]
    assert model.weights[0].num_bytes == report.num_bytes
    # Loading narrows the scales.
    from mlxserve.models.loader import load_model

    if mx.default_device().type == mx.DeviceType.cpu:
        assert resident == load_model(tmp_path / "out").weight_bytes


def llama8() -> Footprint:
    return footprint(SHAPES["Llama 3.1 8B"].config(), PLACE, (4,))


def test_context_and_parallel_fill_the_memory_and_no_more() -> None:
    model, budget = llama8(), Budget.of_mac(16 << 30)
    (weights,) = model.weights
    assert budget.engine_bytes == int(int((16 << 30) * 2 / 3) * 0.8)
    assert Budget.of_mac(64 << 30).working_set_bytes == 48 << 30
    for parallel in (1, 4):
        for kv_bits in (16, 8):
            context = budget.max_context(model, weights, parallel, kv_bits)
            taken = weights.num_bytes + parallel * model.kv_bytes(context, kv_bits)
            assert taken <= budget.engine_bytes
            assert context == 32768 or taken + parallel * model.kv_bytes(64, kv_bits) > budget.engine_bytes
    count = budget.max_parallel(model, weights, 4096, 16)
    assert weights.num_bytes + count * model.kv_bytes(4096) <= budget.engine_bytes
    assert weights.num_bytes + (count + 1) * model.kv_bytes(4096) > budget.engine_bytes
    assert Budget.of_mac(6 << 30).max_context(model, weights, 1, 16) == 0
    assert Budget.of_mac(6 << 30).max_parallel(model, weights, 512, 16) == 0


def test_the_bound_of_speed_is_bytes_over_bandwidth() -> None:
    model = llama8()
    chip = next(chip for chip in CHIPS if chip.name == "M4 Max (16-core)")
    # 7.5 billion weights without the embedding at 4.5 bits, 128 KiB of keys and values a token.
    expected = 546e9 / (7.5e9 * 4.5 / 8 + 4096 * 131072)
    assert tokens_per_second(model, model.weights[0], chip, 4096) == pytest.approx(expected, rel=0.01)


def test_every_mac_has_a_chip() -> None:
    assert all(chips for _, chips in macs(None))
    assert macs(20 << 30) == [(20 << 30, [])]
    assert all(0.6 < working_set(size << 30) / (size << 30) <= 0.75 for size in (8, 16, 32, 36, 512))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'llamma' is not supported"):
        footprint({**LLAMA, "model_type": "llamma"}, PLACE, (4,))


@pytest.fixture
def fit(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        code = run_command(["fit", *words])
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


def test_the_command_needs_a_config_alone(fit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Llama 3.1 8B"].config()))
    code, out, err = fit(str(tmp_path), "--memory", "16G", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    (mac,) = report["macs"]
    names = [weights["name"] for weights in report["weights"]]
    assert names == ["16-bit", "8-bit", "6-bit", "4-bit", "3-bit"]
    fits = {row["weights"]: row["max_context"] for row in mac["fits"]}
    assert fits["16-bit"] == 0
    assert 10_000 < fits["4-bit"] <= 32768
    assert {bound["chip"] for bound in mac["bounds"]} >= {"M1", "M4", "M5"}
    assert all("16-bit" not in bound["tok_s"] for bound in mac["bounds"])
    code, out, _ = fit(str(tmp_path), "--memory", "16G", "--context", "8192", "--parallel", "64", "--json")
    rows = {row["weights"]: row for row in json.loads(out)["macs"][0]["fits"]}
    assert rows["4-bit"]["fits"] is False
    assert 1 <= rows["4-bit"]["max_parallel"] < 64
    code, out, _ = fit(str(tmp_path))
    assert code == 0
    assert "8.03 billion weights, context 32768" in out
    assert "computed, not measured" in out


def test_wrong_wishes_are_one_line(fit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert fit(str(tmp_path), "--kv-bits", "5") == (2, "", "error: --kv-bits knows 16, 8, 4, got 5\n")
    code, _, err = fit(str(tmp_path), "--kv-bits", "8")
    assert (code, err.count("\n")) == (2, 1)
    assert "multiple of 32" in err
