"""Quantization of Hugging Face folders: names, heads, group sizes, dtypes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError, UnsupportedModelError, UsageError
from mlxserve_convert import ConvertOptions, ConvertReport, convert, streaming
from mlxserve_convert.layouts import fit_group_size
from mlxserve_convert.shards import ShardedWriter
from tests.convert.checkpoints import (
    LLAMA,
    Arrays,
    logits,
    random_weights,
    reference_model,
    searched,
    write_folder,
)

TOKENS = [3, 60, 17, 42, 5, 11, 9]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def run(folder: Path, output: Path, **options: Any) -> ConvertReport:
    return convert(folder, output, ConvertOptions(**options))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def dequantized_model(folder: Path) -> Any:
    """The written folder's values, dequantized, in a plain float model."""
    config = config_of(folder)
    quantization = config.pop("quantization", {})
    arrays: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        arrays |= mx.load(str(file))
    weights: Arrays = {}
    for name, array in arrays.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in arrays:
            entry = quantization[module]
            parts = [arrays[f"{module}.{kind}"].astype(mx.float32) for kind in ("scales", "biases")]
            array = mx.dequantize(array, *parts, group_size=entry["group_size"], bits=entry["bits"])
        weights[name] = np.array(array.astype(mx.float32))
    return reference_model(config, weights)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_width_loads_in_mlx_lm_and_comes_near_the_source(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    config = {**LLAMA, "hidden_size": 128, "intermediate_size": 128}
    weights = random_weights(config)
    source = write_folder(tmp_path / "source", config, weights)
    report = run(source, tmp_path / "out", bits=bits, group_size=group_size, recipe="uniform")
    model, _ = load_model(tmp_path / "out")
    found = logits(model, TOKENS)
    assert np.allclose(found, logits(dequantized_model(tmp_path / "out"), TOKENS), rtol=1e-3, atol=2e-2)
    # The dequantized weights lie within half a step of the source's.
    steps = 2**bits - 1
    span = max(np.ptp(values) for values in weights.values())
    embedding = np.array(dequantized_model(tmp_path / "out").model.embed_tokens.weight)
    assert np.abs(embedding - weights[EMBEDDING]).max() <= span / steps
    assert report.bits_per_weight == pytest.approx(bits + 64 / group_size, rel=0.05)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_source_dtype_is_kept(tmp_path: Path, dtype: mx.Dtype, num_shards: int) -> None:
    source = write_folder(
        tmp_path / "source", LLAMA, random_weights(LLAMA), dtype=dtype, num_shards=num_shards
    )
    run(source, tmp_path / "out")
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert {array.dtype for array in arrays.values()} == {dtype, mx.uint32}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "chat_template.jinja").is_file()


def test_quantized_values_are_the_best_that_were_found(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    source = write_folder(tmp_path / "source", LLAMA, weights)
    run(source, tmp_path / "out", bits=4, group_size=64, recipe="uniform")
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    expected = searched(mx.array(weights[HEAD]), group_size=64, bits=4)
    for kind, values in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(arrays[f"lm_head.{kind}"], values)


CASE_23 = {
    "q_proj": (96, 32),
    "o_proj": (80, None),
    "fc1": (4304, None),
    "fc2": (64, 64),
    "router": (32, 32),
    "tiny": (16, None),
    "down": (128, 64),
    "lm_head": (64, 64),
    "wide": (352, 32),
}


def test_group_size_is_the_largest_that_divides_the_columns() -> None:
    for name, (columns, expected) in CASE_23.items():
        assert fit_group_size(columns, 64) == expected, name
    assert fit_group_size(128, 128) == 128
    assert fit_group_size(128, 32) == 32
    assert fit_group_size(96, 128) == 32


def test_matrices_that_no_group_divides_stay_and_are_listed(tmp_path: Path) -> None:
    config = {**LLAMA, "hidden_size": 96, "head_dim": 20, "intermediate_size": 4304, "vocab_size": 259}
    config |= {"quantization": {"bits": None, "group_size": 64}}
    source = write_folder(tmp_path / "source", config, random_weights(LLAMA | config))
    report = run(source, tmp_path / "out", bits=4, group_size=64)
    quantization = config_of(tmp_path / "out")["quantization"]
    assert quantization["model.layers.0.self_attn.q_proj"]["group_size"] == 32
    assert quantization["model.layers.0.self_attn.o_proj"] is False  # 80 columns
    assert quantization["model.layers.1.mlp.down_proj"] is False  # 4304 columns
    assert quantization["lm_head"] == {"group_size": 32, "bits": 6, "mode": "affine"}
    assert len(report.unquantized_matrices) == 4
    num_bytes = sum(mx.load(str(tmp_path / "out" / "model.safetensors"))[n].nbytes for n in _names(tmp_path))
    assert report.bits_per_weight == pytest.approx(num_bytes * 8 / report.num_parameters)
    model, _ = load_model(tmp_path / "out")
    assert np.isfinite(logits(model, TOKENS)).all()


def _names(folder: Path) -> list[str]:
    return list(mx.load(str(folder / "out" / "model.safetensors")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 48}, "--group-size 48 is not possible, only: 32, 64, 128"),
        ({"bits": 7}, "--bits 7 is not possible, only: 2, 3, 4, 5, 6, 8"),
        ({"bits": 0}, "--bits 0 is not possible, only: 2, 3, 4, 5, 6, 8"),
        ({"dtype": "float64"}, "--dtype float64 is not possible, only: float16, bfloat16, float32"),
    ],
)
def test_impossible_options_are_refused_with_the_possible_ones(options: dict, message: str) -> None:
    with pytest.raises(UsageError) as error:
        ConvertOptions(**options)
    assert str(error.value) == message


def test_tied_with_an_equal_head_writes_one_copy(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    weights = random_weights(config)
    source = write_folder(tmp_path / "source", config, {**weights, HEAD: weights[EMBEDDING]})
    report = run(source, tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True
    assert not any(name.startswith("lm_head") for name in _names(tmp_path))
    assert report.warnings == ()


def test_tied_with_another_head_keeps_the_head_and_unties(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    source = write_folder(tmp_path / "source", {**LLAMA, "tie_word_embeddings": True}, weights)
    report = run(source, tmp_path / "out", bits=8)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    assert "differs from the embedding" in report.warnings[0]
    model, _ = load_model(tmp_path / "out")
    expected = logits(reference_model(LLAMA, weights), TOKENS)
    assert np.abs(logits(model, TOKENS) - expected).max() < 0.1 * np.abs(expected).max()


def test_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    del weights[HEAD]
    source = write_folder(tmp_path / "source", LLAMA, weights)
    with pytest.raises(ConversionError, match=r"lm_head\.weight is not in the files"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_head", [True, False])
def test_a_missing_tie_flag_is_written(tmp_path: Path, has_head: bool) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    weights = random_weights(LLAMA)
    if not has_head:
        del weights[HEAD]
    source = write_folder(tmp_path / "source", config, weights)
    report = run(source, tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is not has_head
    assert len(report.warnings) == 1
    load_model(tmp_path / "out")


def test_old_rope_buffers_are_left_out(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    source = write_folder(tmp_path / "source", LLAMA, {**weights, **extra})
    run(source, tmp_path / "out")
    assert not any("inv_freq" in name for name in _names(tmp_path))


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    mystery = {**weights, "model.layers.0.self_attn.q_proj.mystery": np.ones(8, np.float32)}
    with pytest.raises(ConversionError, match=r"q_proj\.mystery' has no place"):
        run(write_folder(tmp_path / "a", LLAMA, mystery), tmp_path / "out")
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.up_proj\.weight' is missing"):
        run(write_folder(tmp_path / "b", LLAMA, weights), tmp_path / "out")
    wrong = random_weights({**LLAMA, "intermediate_size": 64})
    with pytest.raises(ConversionError, match=r"has shape \(64, 64\), the configuration asks for \(96, 64\)"):
        run(write_folder(tmp_path / "c", LLAMA, wrong), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_architecture_names_the_near_ones(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path / "source", {**LLAMA, "model_type": "llamma"}, {"x": np.ones(4, np.float32)}
    )
    with pytest.raises(UnsupportedModelError, match=r"'llamma' is not supported \(near it: .*llama"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize("auto_map", [{}, {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}])
def test_what_the_config_alone_rules_out_needs_no_weights(tmp_path: Path, auto_map: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "no_such_arch", **auto_map}))
    with pytest.raises(UnsupportedModelError, match=r"'no_such_arch' is not supported \(.*llama"):
        run(tmp_path, tmp_path.with_name("out"))
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA, "quantization_config": {"quant_method": "hqq"}})
    )
    with pytest.raises(ConversionError, match="'hqq'"):
        run(tmp_path, tmp_path.with_name("out"))


def test_code_in_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "custom_x"}
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    source = write_folder(tmp_path / "source", config, {"x": np.ones(4, np.float32)})
    (source / "modeling_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedModelError, match=r"own code \(auto_map\) is never run"):
        run(source, tmp_path / "out")
    source = write_folder(tmp_path / "file", {**LLAMA, "model_file": "modeling_x.py"}, random_weights(LLAMA))
    with pytest.raises(UnsupportedModelError, match=r"modeling_x\.py"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_a_known_architecture_with_code_beside_it_converts_without_it(tmp_path: Path) -> None:
    config = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}
    source = write_folder(tmp_path / "source", config, random_weights(LLAMA))
    (source / "modeling_x.py").write_text("raise SystemExit")
    run(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize(
    ("quantization", "names"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["'awq'", "'gemv'", "only: gemm"]),
        ({"quant_method": "awq", "bits": 8, "version": "GEMM"}, ["'awq'", "'gemm'", "bits 8, only: 4"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["'gptq'", "'marlin'"]),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, ["'gptq'", "'marlin'"]),
        ({"quant_method": "gptq", "bits": 5}, ["'gptq'", "bits 5, only: 2, 3, 4, 8"]),
        ({"quant_method": "fp8", "fmt": "e4m3fnuz"}, ["'fp8'", "'e4m3fnuz'"]),
        ({"quant_method": "fp8", "weight_block_size": 128}, ["'fp8'", "weight_block_size 128"]),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, ["'marlin-24'"]),
        ({"quant_method": "compressed-tensors", "format": "sparse-24-bitmask"}, ["'sparse-24-bitmask'"]),
        ({"quant_method": "compressed-tensors"}, ["'compressed-tensors'", "'None'"]),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            ["'pack-quantized'", "sparsity_config 'sparse-24-bitmask'"],
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
            },
            ["'pack-quantized'", "transform_config"],
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "quantization_status": "frozen",
            },
            ["'int-quantized'", "quantization_status 'frozen'"],
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            ["'float-quantized'", "weights of type int with 4 bits"],
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    "a": {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int"}},
                    "b": {"format": "mxfp6-pack-quantized", "weights": {"num_bits": 6, "type": "float"}},
                },
            },
            ["'mxfp6-pack-quantized'"],
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["'modelopt'"]),
        ({"quant_method": "hqq"}, ["'hqq'"]),
        ({"quant_method": "aqlm"}, ["'aqlm'"]),
        ({"quant_method": ["awq"]}, ["['awq']"]),
        ({"quant_method": "compressed-tensors", "format": "zip-quantized"}, ["zip-quantized"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes"]),
        ({"mystery": 1}, ["mystery"]),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_quantized_sources_are_refused_by_name(
    tmp_path: Path, quantization: dict, names: list[str], is_nested: bool
) -> None:
    place = {"quantization_config": quantization}
    config = {**LLAMA, "text_config": place} if is_nested else {**LLAMA, **place}
    source = write_folder(tmp_path / "source", config, {"x": np.ones(4, np.float32)})
    with pytest.raises(ConversionError) as error:
        run(source, tmp_path / "out", bits=4)
    assert all(name in str(error.value) for name in names)
    assert "\n" not in str(error.value)


def test_two_methods_at_once_are_refused_by_name(tmp_path: Path) -> None:
    methods = [{"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4}]
    config = {**LLAMA, "quantization_config": methods[0], "text_config": {"quantization_config": methods[1]}}
    source = write_folder(tmp_path / "source", config, {"x": np.ones(4, np.float32)})
    with pytest.raises(ConversionError, match="by several methods: quant_method 'fp8' and 'awq'"):
        run(source, tmp_path / "out")


def test_an_empty_quantization_means_none(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", {**LLAMA, "quantization_config": {}}, random_weights(LLAMA))
    run(source, tmp_path / "out")
    assert "quantization_config" not in config_of(tmp_path / "out")


def test_a_converted_folder_is_quantized_again_only_on_demand(tmp_path: Path) -> None:
    config = {**LLAMA, "hidden_size": 96, "intermediate_size": 80}
    source = write_folder(tmp_path / "source", config, random_weights(config))
    run(source, tmp_path / "eight", bits=8, group_size=32)
    with pytest.raises(ConversionError, match=r"MLX model already \(affine 8-bit\)"):
        run(tmp_path / "eight", tmp_path / "again")
    report = run(tmp_path / "eight", tmp_path / "four", bits=4, group_size=32, recipe="uniform")
    assert "is quantized already (affine 8-bit) and is quantized again" in report.warnings[0]
    eight = mx.load(str(tmp_path / "eight" / "model.safetensors"))
    four = mx.load(str(tmp_path / "four" / "model.safetensors"))
    parts = (eight[f"lm_head.{part}"] for part in ("weight", "scales", "biases"))
    floats = mx.dequantize(*parts, group_size=32, bits=8)
    for part, values in zip(
        ("weight", "scales", "biases"), searched(floats, group_size=32, bits=4), strict=True
    ):
        assert mx.array_equal(four[f"lm_head.{part}"], values)
    assert config_of(tmp_path / "four")["quantization"]["lm_head"]["bits"] == 4
    load_model(tmp_path / "four")


def test_values_too_large_for_float16_keep_their_tensor_as_it_is(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    weights["model.norm.weight"][:4] = [70144.0, 3.0, -0.0001, 1e-8]
    weights[HEAD][0, 0] = -1e6
    config = {**LLAMA, "torch_dtype": "bfloat16"}
    source = write_folder(tmp_path / "source", config, weights, dtype=mx.bfloat16)
    report = run(source, tmp_path / "out", dtype="float16", check="never")
    assert config_of(tmp_path / "out")["torch_dtype"] == "float16"
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert arrays["model.norm.weight"].dtype == mx.bfloat16
    assert arrays["lm_head.scales"].dtype == mx.bfloat16
    assert arrays["model.embed_tokens.scales"].dtype == mx.float16
    assert all(mx.all(mx.isfinite(array.astype(mx.float32))) for array in arrays.values())
    assert sorted(warning.split(":")[0] for warning in report.warnings) == [HEAD, "model.norm.weight"]
    assert all("1 values are too large for float16" in warning for warning in report.warnings)


def test_a_broken_source_is_caught_by_the_check(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    weights["model.norm.weight"][3] = np.nan
    source = write_folder(tmp_path / "source", LLAMA, weights)
    with pytest.raises(ConversionError, match="NaN or infinite"):
        run(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_rope_parameters_of_newer_configs_reach_the_old_fields(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 777.0, **scaling}
    weights = random_weights(LLAMA)
    run(write_folder(tmp_path / "source", config, weights), tmp_path / "out", bits=8)
    assert config_of(tmp_path / "out")["rope_theta"] == 777.0
    assert config_of(tmp_path / "out")["rope_scaling"] == scaling
    model, _ = load_model(tmp_path / "out")
    tokens = [index * 7 % 320 for index in range(48)]
    expected = logits(
        reference_model({**LLAMA, "rope_theta": 777.0, "rope_scaling": scaling}, weights), tokens
    )
    wrong = logits(reference_model(LLAMA, weights), tokens)
    found = logits(model, tokens)
    assert np.abs(found - expected).mean() < 0.2 * np.abs(found - wrong).mean()


def test_rope_parameters_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    source = write_folder(tmp_path / "source", config, random_weights(LLAMA))
    with pytest.raises(ConversionError, match="rope_parameters for each kind of layer"):
        run(source, tmp_path / "out")


def test_dry_run_writes_nothing_and_plans_the_same(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", LLAMA, random_weights(LLAMA))
    plan = run(source, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    report = run(source, tmp_path / "out")
    assert plan.tensors == report.tensors
    assert plan.num_bytes == report.num_bytes


def test_large_outputs_are_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small_shards(folder: Path, names: list[str]) -> ShardedWriter:
        return ShardedWriter(folder, names, max_shard_bytes=20_000)

    monkeypatch.setattr(streaming, "ShardedWriter", small_shards)
    weights = random_weights(LLAMA)
    source = write_folder(tmp_path / "source", LLAMA, weights)
    run(source, tmp_path / "out", bits=8)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    load_model(tmp_path / "out")


def test_experts_are_stacked_in_number_order_and_their_router_stays_wide(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    stacked = random_weights(config)
    weights = {name: values for name, values in stacked.items() if "switch_mlp" not in name}
    for name, values in stacked.items():
        if "switch_mlp" in name:
            for expert in range(12):
                weights[name.replace("switch_mlp", f"experts.{expert}")] = values[expert]
    source = write_folder(tmp_path / "source", config, weights, num_shards=2)
    report = run(source, tmp_path / "out", bits=8)
    model, _ = load_model(tmp_path / "out")
    expected = logits(reference_model(config, stacked), TOKENS)
    assert np.abs(logits(model, TOKENS) - expected).max() < 0.1 * np.abs(expected).max()
    gates = [tensor for tensor in report.tensors if tensor.name.endswith("mlp.gate.weight")]
    assert all(tensor.bits == 8 for tensor in gates)
    lacking = {name: values for name, values in weights.items() if "0.mlp.experts.2.up" not in name}
    with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.experts\.2\.up_proj\.weight"):
        run(write_folder(tmp_path / "lacking", config, lacking), tmp_path / "no")


def test_memory_holds_one_tensor_and_not_the_model(tmp_path: Path) -> None:
    config = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    weights = random_weights(config)
    source = write_folder(tmp_path / "source", config, weights, num_shards=2)
    total = sum(values.nbytes for values in weights.values())
    del weights
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(source, tmp_path / "out", check="never")
    largest = 512 * 1024 * 4
    assert total > 30 * largest
    assert mx.get_peak_memory() - before < 8 * largest


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_values_that_cannot_be_quantized_are_named(tmp_path: Path, dtype: str, value: float) -> None:
    weights = random_weights(LLAMA)
    weights[HEAD][5, 3] = value
    source = write_folder(tmp_path / "source", LLAMA, weights)
    with pytest.raises(ConversionError, match=r"lm_head\.weight: row 5 holds NaN or infinite values"):
        run(source, tmp_path / "out", bits=4, dtype=dtype)
    assert not (tmp_path / "out").exists()
