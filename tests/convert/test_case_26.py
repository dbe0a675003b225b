"""Case 26: quantized uploads of a model, each with every wish, and dtypes that are too narrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError, UnsupportedModelError
from mlxserve.models.loader import load_model as serve_model
from mlxserve_convert import ConvertOptions, ConvertReport, convert
from tests.convert import quantized
from tests.convert.checkpoints import LLAMA, logits, random_weights, reference_model, write_folder
from tests.convert.quantized import Quantizer, write_quantized, write_safetensors

CONFIG = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "rope_theta": 10000,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
TOKENS = [3, 60, 17, 42, 5, 11, 9]
WISHES: dict[str, dict[str, Any]] = {"convert": {}, "-q": {"bits": 8}, "--dequantize": {"dequantize": True}}

SETTINGS: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "A_awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        quantized.awq(128),
    ),
    "B_gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
        quantized.gptq(4, 128),
    ),
    "C_gptq_act_order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": True},
        quantized.gptq(4, 128, is_symmetric=False, order="act"),
    ),
    "D_fp8_blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
        quantized.float8("block"),
    ),
    "E_ct_float": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
        },
        quantized.float8("channel", suffix="weight_scale"),
    ),
    "F_ct_int4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
            },
        },
        quantized.ct_packed(4, 32),
    ),
    "G_ct_int8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
        },
        quantized.ct_int8(None),
    ),
}
REFUSED: dict[str, dict[str, Any]] = {
    "H_ct_unheard": {"quant_method": "compressed-tensors", "format": "zip-quantized"},
    "I_bnb": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


def run(folder: Path, output: Path, **options: Any) -> ConvertReport:
    return convert(folder, output, ConvertOptions(**options))


def names_and_config(folder: Path) -> tuple[set[str], dict[str, Any]]:
    arrays = mx.load(str(folder / "model.safetensors"))
    return set(arrays), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", SETTINGS)
def test_every_method_with_every_wish(tmp_path: Path, name: str) -> None:
    settings, quantizer = SETTINGS[name]
    config = CONFIG | {"quantization_config": settings}
    exact = write_quantized(tmp_path / "source", config, random_weights(CONFIG), quantizer)
    expected = logits(reference_model(CONFIG, exact), TOKENS)
    for wish, options in WISHES.items():
        report = run(tmp_path / "source", tmp_path / wish, **options)
        assert "logits of 4 tokens are finite" in report.verified
        found, config = names_and_config(tmp_path / wish)
        assert "quantization_config" not in config
        if wish == "--dequantize":
            assert "quantization" not in config
            assert not [key for key in found if key.endswith((".scales", ".biases"))]
            assert found == set(random_weights(CONFIG))
        assert any("quantized again" in text for text in report.warnings) == (wish == "-q")
        model, _ = load_model(tmp_path / wish)
        model.set_dtype(mx.float32)
        error = np.abs(logits(model, TOKENS) - expected).mean() / np.abs(expected).mean()
        assert error < (0.1 if wish == "-q" else 0.03), wish
    for place in ({"quantization_config": settings}, {"text_config": {"quantization_config": settings}}):
        (tmp_path / "source" / "config.json").write_text(json.dumps(CONFIG | place))
        method = settings["quant_method"]
        with pytest.raises(UnsupportedModelError, match=f"quant_method '{method}'; convert it"):
            serve_model(tmp_path / "source")


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_before_any_weights_are_read(
    tmp_path: Path, name: str, wish: str
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    settings = REFUSED[name]
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": settings}))
    (folder / "model.safetensors").write_bytes(b"nothing of use")
    with pytest.raises(ConversionError) as error:
        run(folder, tmp_path / "out", **WISHES[wish])
    assert f"quant_method {settings['quant_method']!r}, format {settings.get('format')!r}" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def gpt_oss_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """Experts in blocks and scales, as OpenAI's release has them; gives the weights by mlx-lm's names."""
    weights = random_weights(GPT_OSS, seed=3)
    tensors: quantized.Parts = {}
    exact: dict[str, np.ndarray] = {}
    for name, values in weights.items():
        if ".mlp.experts." not in name:
            kind, stored = tensors[name] = quantized.bf16(values)
            assert kind == "BF16"
            exact[name] = (stored.astype(np.uint32) << 16).view(np.float32)
    for layer in range(GPT_OSS["num_hidden_layers"]):
        module = f"model.layers.{layer}.mlp.experts"
        gate_up = np.stack(
            [weights[f"{module}.gate_proj.weight"], weights[f"{module}.up_proj.weight"]], axis=2
        ).reshape(4, 192, 64)
        bias = np.stack([weights[f"{module}.gate_proj.bias"], weights[f"{module}.up_proj.bias"]], axis=-1)
        for kind, values in (("gate_up_proj", gate_up), ("down_proj", weights[f"{module}.down_proj.weight"])):
            codes, exponents, known = quantized.mxfp4_parts(values)
            tensors[f"{module}.{kind}_blocks"] = quantized.typed(codes.reshape(*exponents.shape, 16))
            tensors[f"{module}.{kind}_scales"] = quantized.typed(exponents)
            if kind == "down_proj":
                exact[f"{module}.down_proj.weight"] = known
            else:
                exact[f"{module}.gate_proj.weight"] = known[:, 0::2]
                exact[f"{module}.up_proj.weight"] = known[:, 1::2]
        tensors[f"{module}.gate_up_proj_bias"] = quantized.typed(bias.reshape(4, 192))
        tensors[f"{module}.down_proj_bias"] = quantized.typed(weights[f"{module}.down_proj.bias"])
        for kind in ("gate_proj", "up_proj", "down_proj"):
            exact[f"{module}.{kind}.bias"] = weights[f"{module}.{kind}.bias"]
    folder.mkdir()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(GPT_OSS | {"quantization_config": settings}))
    write_safetensors(folder / "model.safetensors", tensors)
    quantized.write_tokenizer(folder)
    return exact


@pytest.mark.parametrize("wish", WISHES)
def test_j_mxfp4_experts_have_scales_and_no_biases(tmp_path: Path, wish: str) -> None:
    exact = gpt_oss_checkpoint(tmp_path / "source")
    report = run(tmp_path / "source", tmp_path / "out", **WISHES[wish])
    found, config = names_and_config(tmp_path / "out")
    model, _ = load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    expected = logits(reference_model(GPT_OSS, exact), TOKENS)
    error = np.abs(logits(model, TOKENS) - expected).mean() / np.abs(expected).mean()
    if wish == "convert":
        assert error < 1e-3
        assert not report.inexact_tensors
        assert not [key for key in found if key.endswith(".biases")]
        assert config["quantization"]["mode"] == "mxfp4"
        kinds = {t.mode for t in report.tensors if ".experts." in t.name and t.is_matrix}
        assert kinds == {"mxfp4"}
        arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
        for name, values in exact.items():
            module = name.removesuffix(".weight")
            if f"{module}.scales" in arrays:
                parts = arrays[f"{module}.weight"], arrays[f"{module}.scales"]
                read = mx.dequantize(*parts, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
                assert np.array_equal(np.array(read), values), name
    elif wish == "-q":
        assert error < 0.1
    else:
        assert error < 0.02
        assert not {"quantization", "quantization_config"} & config.keys()


@pytest.mark.parametrize(
    ("mode", "bits"), [("affine", 4), ("affine", 3), ("mxfp4", 4), ("mxfp8", 8), ("nvfp4", 4)]
)
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_k_mlx_is_quantized_twice_only_with_notice(tmp_path: Path, mode: str, bits: int, key: str) -> None:
    source = write_folder(tmp_path / "floats", CONFIG, random_weights(CONFIG), dtype=mx.bfloat16)
    run(source, tmp_path / "source", mode=mode, bits=bits, dtype="bfloat16")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config[key] = config.pop("quantization")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="is an MLX model already"):
        run(tmp_path / "source", tmp_path / "out")
    again = run(tmp_path / "source", tmp_path / "again", bits=8)
    assert "is quantized already" in again.warnings[0]
    run(tmp_path / "source", tmp_path / "out", dequantize=True)
    found, config = names_and_config(tmp_path / "out")
    assert not {"quantization", "quantization_config"} & config.keys()
    assert found == set(random_weights(CONFIG))
    plain, _ = load_model(tmp_path / "out")
    packed, _ = load_model(tmp_path / "again")
    for model in (plain, packed):
        model.set_dtype(mx.float32)
    expected = logits(plain, TOKENS)
    assert np.abs(logits(packed, TOKENS) - expected).mean() < 0.1 * np.abs(expected).mean()
    arrays = mx.load(str(tmp_path / "source" / "model.safetensors"))
    words, scales, biases = (arrays.get(f"lm_head.{kind}") for kind in ("weight", "scales", "biases"))
    if biases is not None:
        # Rounded once, not at every step in the type of the scales.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(words, scales, biases, **config_entry(tmp_path / "source", key), dtype=mx.float32)
    assert mx.array_equal(plain.lm_head.weight, values.astype(mx.bfloat16).astype(mx.float32))


def config_entry(folder: Path, key: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((folder / "config.json").read_text())[key]["lm_head"]
    return entry


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_k_and_l_are_served_as_they_are(tmp_path: Path, key: str) -> None:
    weights = random_weights(CONFIG)
    source = write_folder(tmp_path / "floats", CONFIG, weights)
    run(source, tmp_path / "source", bits=8, group_size=32)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config[key] = config.pop("quantization")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    plain = write_folder(tmp_path / "plain", CONFIG | {key: {}}, weights)
    empty = write_folder(tmp_path / "empty", CONFIG | {key: {"bits": None, "group_size": 64}}, weights)
    sizes = [serve_model(folder).weight_bytes for folder in (tmp_path / "source", plain, empty)]
    assert sizes[0] < 0.5 * sizes[1] == 0.5 * sizes[2]
    odd = write_folder(tmp_path / "odd", CONFIG | {key: {"load_in_4bit": True}}, weights)
    with pytest.raises(UnsupportedModelError, match="not known: load_in_4bit"):
        serve_model(odd)


@pytest.mark.parametrize("settings", [{}, {"bits": None, "group_size": 64}])
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_l_empty_means_floats(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    weights = random_weights(CONFIG)
    source = write_folder(tmp_path / "source", CONFIG | {key: settings}, weights)
    report = run(source, tmp_path / "out", bits=8)
    assert not any("quantized already" in text for text in report.warnings)
    assert {tensor.bits for tensor in report.tensors if tensor.is_matrix} == {8}


def test_float8_bytes_mean_what_the_case_says(tmp_path: Path) -> None:
    codes = np.array([56, 64, 184, 48, 126, 1, 0, 196], np.uint8)
    half = np.array([1.0, 2.0, -1.0, 0.5, 448.0, 0.001953125, 0.0, -3.0], np.float32) * 0.5

    def quantize(values: np.ndarray) -> tuple[quantized.Parts, np.ndarray]:
        stored = np.resize(codes, values.shape)
        grid = np.full([-(-size // 128) for size in values.shape], 0.5, np.float32)
        parts = {"weight": ("F8_E4M3", stored), "weight_scale_inv": quantized.typed(grid)}
        return parts, np.resize(half, values.shape)

    settings = SETTINGS["D_fp8_blocks"][0]
    config = CONFIG | {"quantization_config": settings}
    write_quantized(tmp_path / "source", config, random_weights(CONFIG), quantize)
    run(tmp_path / "source", tmp_path / "out", dequantize=True, dtype="float32")
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert np.array_equal(np.array(arrays["model.layers.0.mlp.up_proj.weight"])[0, :8], half)


def test_all_float8_codes(tmp_path: Path) -> None:
    for kind, is_e5m2 in (("F8_E4M3", False), ("F8_E5M2", True)):
        table = quantized.float8_table(is_e5m2=is_e5m2)

        def quantize(
            values: np.ndarray, kind: str = kind, table: np.ndarray = table
        ) -> tuple[quantized.Parts, np.ndarray]:
            codes = np.resize(np.arange(256, dtype=np.uint8), values.shape)
            return {
                "weight": (kind, codes),
                "weight_scale": quantized.typed(np.full(1, 3, np.float32)),
            }, table

        config = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
        folder = tmp_path / kind
        write_quantized(folder, config, random_weights(CONFIG), quantize)
        run(folder, tmp_path / "out", dequantize=True, dtype="float32", check="never", force=True)
        arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
        found = np.array(arrays["model.layers.0.mlp.down_proj.weight"])[0]
        assert np.array_equal(found, table * 3, equal_nan=True)


def test_float16_keeps_the_type_of_a_tensor_that_it_has_no_room_for(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][0, :4] = [70144.0, 3.0, -0.0001, 1e-08]
    source = write_folder(tmp_path / "source", CONFIG, weights, dtype=mx.bfloat16)
    report = run(source, tmp_path / "out", dtype="float16", bits=8, check="never")
    assert any(f"{name}: 1 values are too large for float16" in text for text in report.warnings)
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert arrays[name.replace("weight", "scales")].dtype == mx.bfloat16
    assert arrays["model.norm.weight"].dtype == mx.float16


def test_dequantized_values_too_large_for_the_models_float16_are_kept_wide(tmp_path: Path) -> None:
    quantizer = quantized.float8("tensor", suffix="weight_scale", shape="[1]")
    weights = random_weights(CONFIG)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][0, 0] = 90000.0
    config = CONFIG | {"quantization_config": {"quant_method": "fp8"}}

    def float16(values: np.ndarray) -> tuple[str, np.ndarray]:
        return quantized.typed(values.astype(np.float16))

    write_quantized(tmp_path / "source", config, weights, quantizer, floats=float16)
    report = run(tmp_path / "source", tmp_path / "out", dequantize=True, check="never")
    assert any(f"{name}: 1 values are too large for float16" in text for text in report.warnings)
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert arrays[name].dtype == mx.float32
    assert float(arrays[name][0, 0]) == pytest.approx(90000, rel=0.04)
    assert arrays["model.layers.0.mlp.down_proj.weight"].dtype == mx.float16


def test_mlx_lm_reads_the_same_from_what_it_knows(tmp_path: Path) -> None:
    """mlx-lm's own readers of AWQ and of gpt-oss as a witness: the logits are those of our result."""
    settings, quantizer = SETTINGS["A_awq"]
    config = CONFIG | {"quantization_config": settings}

    def float16(values: np.ndarray) -> tuple[str, np.ndarray]:
        return quantized.typed(values.astype(np.float16))

    write_quantized(tmp_path / "awq", config, random_weights(CONFIG), quantizer, floats=float16)
    gpt_oss_checkpoint(tmp_path / "gpt_oss")
    for name in ("awq", "gpt_oss"):
        witness, _ = load_model(tmp_path / name)
        run(tmp_path / name, tmp_path / f"{name}-out")
        ours, _ = load_model(tmp_path / f"{name}-out")
        for model in (witness, ours):
            model.set_dtype(mx.float32)
        expected = logits(witness, TOKENS)
        # mlx-lm rounds AWQ's biases to float16.
        assert np.abs(logits(ours, TOKENS) - expected).mean() < 5e-3 * np.abs(expected).mean(), name
