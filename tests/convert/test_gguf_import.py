"""Import of GGUF files: exact weights, right names and row order, a folder that stock mlx-lm loads."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError
from mlxserve.hub import BUILTIN_MODELS
from mlxserve_convert import ConvertOptions, convert
from mlxserve_convert.gguf_families import ARCHITECTURES
from mlxserve_convert.gguf_rope import fit_llama3_scaling, llama3_factors
from tests.convert.checkpoints import (
    LLAMA,
    Arrays,
    logits,
    random_weights,
    reference_model,
    searched,
    write_gguf,
)

QWEN2 = {**LLAMA, "model_type": "qwen2"}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32}
TOKENS = [3, 200, 17, 42, 5, 301, 9]


def dequantized(folder: Path) -> Arrays:
    """Every parameter of a written folder as float32, computed by mlx from what the files hold."""
    config = json.loads((folder / "config.json").read_text())
    arrays = mx.load(str(folder / "model.safetensors"))
    values = {}
    for name, array in arrays.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in arrays:
            entry = config["quantization"].get(module, config["quantization"])
            array = mx.dequantize(
                array,
                arrays[f"{module}.scales"],
                arrays[f"{module}.biases"],
                group_size=entry["group_size"],
                bits=entry["bits"],
            )
        values[name] = np.array(array.astype(mx.float32))
    return values


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda config: config["model_type"])
def test_weights_and_logits_are_those_of_the_file(tmp_path: Path, config: dict, kind: Kind) -> None:
    held = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), kind)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    found = dequantized(tmp_path / "out")
    assert found.keys() == held.keys()
    for name, values in held.items():
        assert np.abs(found[name] - values).max() == 0.0, name
    assert report.model_type == config["model_type"]
    model, _ = load_model(tmp_path / "out")
    expected = logits(reference_model(config, held), TOKENS)
    assert np.abs(logits(model, TOKENS) - expected).max() < 2e-4 * np.abs(expected).max()


def test_mixed_types_get_an_entry_for_each_module_that_differs(tmp_path: Path) -> None:
    kinds = {"model.embed_tokens.weight": Kind.Q8_0, "lm_head.weight": Kind.F16}
    held = write_gguf(tmp_path / "tiny.gguf", LLAMA, random_weights(LLAMA), Kind.Q4_1, kinds=kinds)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    usual = {"group_size": 32, "bits": 4, "mode": "affine"}
    own = {"model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"}, "lm_head": False}
    assert quantization.items() >= {**usual, **own}.items()
    others = [value for key, value in quantization.items() if key not in {**usual, **own}]
    assert others == [usual] * 14
    assert report.unquantized_matrices == ("lm_head.weight",)
    assert report.num_quantized == 15
    found = dequantized(tmp_path / "out")
    assert all(np.array_equal(found[name], held[name]) for name in held)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_a_file_of_floats_can_be_quantized(tmp_path: Path, kind: Kind) -> None:
    config = {**LLAMA, "hidden_size": 96}
    held = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), kind)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions(bits=8, group_size=64))
    dtypes = {Kind.F32: mx.float32, Kind.F16: mx.float16, Kind.BF16: mx.bfloat16}
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    expected = mx.quantize(mx.array(held["lm_head.weight"]).astype(dtypes[kind]), group_size=32, bits=8)
    for part, values in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(arrays[f"lm_head.{part}"], values)
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert quantization["model.layers.0.self_attn.o_proj"]["group_size"] == 64
    assert report.unquantized_matrices == ()
    model, _ = load_model(tmp_path / "out")
    reference = logits(reference_model(config, held), TOKENS)
    # A random model amplifies the rounding; rows in a wrong order would give a difference of about 1.
    assert np.abs(logits(model, TOKENS) - reference).max() < 0.25 * np.abs(reference).max()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_a_quantized_file_is_quantized_again_on_demand_and_says_so(tmp_path: Path, kind: Kind) -> None:
    held = write_gguf(tmp_path / "tiny.gguf", LLAMA, random_weights(LLAMA), kind)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions(bits=6, group_size=64))
    assert f"is quantized already ({kind.name}) and is quantized again" in report.warnings[0]
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for module in ("lm_head", "model.layers.0.self_attn.k_proj"):
        expected = searched(mx.array(held[f"{module}.weight"]), group_size=64, bits=6)
        for part, values in zip(("weight", "scales", "biases"), expected, strict=True):
            assert mx.array_equal(arrays[f"{module}.{part}"], values), module


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_scales_near_the_float16_limit_stay_exact(tmp_path: Path, kind: Kind) -> None:
    # -128 d overflows float16 here, d itself does not.
    weights = {name: values * 3e5 for name, values in random_weights(LLAMA).items()}
    held = write_gguf(tmp_path / "tiny.gguf", LLAMA, weights, kind)
    convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions(check="never"))
    found = dequantized(tmp_path / "out")
    assert all(np.array_equal(found[name], held[name]) for name in held)


def test_float16_scales_are_written_when_they_are_exact(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", LLAMA, random_weights(LLAMA), Kind.Q4_1)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "half", ConvertOptions(dtype="float16"))
    full = convert(tmp_path / "tiny.gguf", tmp_path / "full", ConvertOptions())
    arrays = mx.load(str(tmp_path / "half" / "model.safetensors"))
    assert arrays["lm_head.scales"].dtype == mx.float16
    assert report.num_bytes < full.num_bytes
    exact = mx.load(str(tmp_path / "full" / "model.safetensors"))
    assert mx.array_equal(arrays["lm_head.scales"].astype(mx.float32), exact["lm_head.scales"])


def test_float16_scales_that_would_change_are_refused(tmp_path: Path) -> None:
    weights = {name: values * 3e5 for name, values in random_weights(LLAMA).items()}
    write_gguf(tmp_path / "tiny.gguf", LLAMA, weights, Kind.Q8_0)
    with pytest.raises(ConversionError, match=r"--dtype float16 would change \d+ scales"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions(dtype="float16"))
    assert not (tmp_path / "out").exists()


def test_tied_head_is_told_by_the_missing_tensor(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    held = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), Kind.Q8_0)
    convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    model, _ = load_model(tmp_path / "out")
    expected = logits(reference_model(config, held), TOKENS)
    assert np.abs(logits(model, TOKENS) - expected).max() < 2e-4 * np.abs(expected).max()


def test_texts_load_in_stock_mlx_lm(tmp_path: Path) -> None:
    from mlx_lm import load

    write_gguf(tmp_path / "tiny.gguf", LLAMA, random_weights(LLAMA), Kind.F16)
    convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    _, tokenizer = load(str(tmp_path / "out"))[:2]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hell yes"}], tokenize=False)
    assert text == "<|im_start|>hell yes<|im_end|>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[1], ids[-1]) == (259, 258, 260)
    assert tokenizer.decode(ids) == text
    assert 260 in tokenizer.eos_token_ids
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 260


def test_linear_and_yarn_rope_scaling_reach_the_config(tmp_path: Path) -> None:
    cases = {
        "linear": ({"llama.rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        "yarn": (
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 64},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    }
    for kind, (metadata, expected) in cases.items():
        path = tmp_path / f"{kind}.gguf"
        metadata = {"llama.rope.scaling.type": kind, **metadata}
        write_gguf(path, LLAMA, random_weights(LLAMA), Kind.F16, metadata=metadata)
        convert(path, tmp_path / kind, ConvertOptions())
        found = json.loads((tmp_path / kind / "config.json").read_text())["rope_scaling"]
        assert expected.items() <= found.items()


def test_llama3_rope_factors_are_recognised_and_used(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**LLAMA, "head_dim": 64, "rope_theta": 500000.0, "rope_scaling": scaling}
    factors = np.array(llama3_factors(scaling, 500000.0, 32), np.float32)
    held = write_gguf(
        tmp_path / "tiny.gguf", config, random_weights(config), Kind.F32, extra={"rope_freqs.weight": factors}
    )
    convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    found = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert {**scaling, "type": "llama3"} == found
    model, _ = load_model(tmp_path / "out")
    tokens = [index * 7 % 320 for index in range(40)]
    expected = logits(reference_model(config, held), tokens)
    assert np.abs(logits(model, tokens) - expected).max() < 1e-4 * np.abs(expected).max()


def test_llama3_parameters_other_than_the_usual_are_fitted() -> None:
    scaling = {
        "factor": 16.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 6.0,
        "original_max_position_embeddings": 4096,
    }
    factors = llama3_factors(scaling, 10000.0, 64)
    found = fit_llama3_scaling(factors, 10000.0)
    assert found is not None
    assert np.allclose(llama3_factors(found, 10000.0, 64), factors, rtol=1e-4)
    assert fit_llama3_scaling([1.0 + 0.01 * index**2 for index in range(64)], 10000.0) is None


@pytest.mark.real
def test_real_file_is_imported_exactly(tmp_path: Path) -> None:
    source = BUILTIN_MODELS["smollm2"].path
    convert(source, tmp_path / "out", ConvertOptions())
    found = dequantized(tmp_path / "out")
    heads = {"attn_q": 9, "attn_k": 3}
    for tensor in gguf.GGUFReader(source).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            pairs = expected.reshape(heads[part], -1, 2, expected.shape[-1])
            expected = pairs.swapaxes(1, 2).reshape(expected.shape)
        name = ARCHITECTURES["llama"].target_name(tensor.name)
        assert name is not None
        assert np.abs(found[name] - expected).max() == 0.0, name
