"""Checkpoints that others quantized: what each method defines is what comes out."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError
from mlxserve.models.architectures import build_model
from mlxserve_convert import ConvertOptions, ConvertReport, convert
from mlxserve_convert.convert import open_checkpoint
from mlxserve_convert.prequantized import find_prequantized
from tests.convert import quantized
from tests.convert.checkpoints import LLAMA, Arrays, logits, random_weights, reference_model
from tests.convert.quantized import Quantizer, write_quantized

TOKENS = [3, 60, 17, 42, 5, 11, 9]
CONFIG = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}


def group_settings(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def gptq_settings(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False} | more


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCK = {"weight_block_size": [128, 128]}

EXACT: dict[str, tuple[dict[str, Any], Quantizer, tuple[str, int, int]]] = {
    "awq": (AWQ, quantized.awq(64), ("affine", 4, 64)),
    "awq g128": (AWQ | {"group_size": 128}, quantized.awq(128), ("affine", 4, 128)),
    "awq without zeros": (AWQ | {"zero_point": False}, quantized.awq(32, has_zeros=False), ("affine", 4, 32)),
    "gptq 4": (gptq_settings(4, 64), quantized.gptq(4, 64), ("affine", 4, 64)),
    "gptq 2": (gptq_settings(2, 32), quantized.gptq(2, 32), ("affine", 2, 32)),
    "gptq 3": (gptq_settings(3, 64), quantized.gptq(3, 64), ("affine", 3, 64)),
    "gptq 3 not symmetric": (
        gptq_settings(3, 64, sym=False),
        quantized.gptq(3, 64, is_symmetric=False),
        ("affine", 3, 64),
    ),
    "gptq 8": (gptq_settings(8, 128), quantized.gptq(8, 128), ("affine", 8, 128)),
    "gptq not symmetric": (
        gptq_settings(4, 64, sym=False),
        quantized.gptq(4, 64, is_symmetric=False, order="none"),
        ("affine", 4, 64),
    ),
    "gptq v2": (
        gptq_settings(4, 64, sym=False, checkpoint_format="gptq_v2"),
        quantized.gptq(4, 64, is_symmetric=False, is_v2=True),
        ("affine", 4, 64),
    ),
    "gptq by rows": (gptq_settings(4, -1), quantized.gptq(4, -1), ("affine", 4, 128)),
    "gptq plain order": (
        gptq_settings(4, 32, desc_act=True),
        quantized.gptq(4, 32),
        ("affine", 4, 32),
    ),
    "packed int4": (
        group_settings("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=True),
        quantized.ct_packed(4, 32),
        ("affine", 4, 32),
    ),
    "packed int4 not symmetric": (
        group_settings("pack-quantized", num_bits=4, type="int", group_size=64, symmetric=False),
        quantized.ct_packed(4, 64, is_symmetric=False),
        ("affine", 4, 64),
    ),
    "packed int4 by rows": (
        group_settings("pack-quantized", num_bits=4, type="int", strategy="channel"),
        quantized.ct_packed(4, None),
        ("affine", 4, 128),
    ),
    "packed int8": (
        group_settings("pack-quantized", num_bits=8, type="int", strategy="channel"),
        quantized.ct_packed(8, None, is_symmetric=False),
        ("affine", 8, 128),
    ),
    "packed int3": (
        group_settings("pack-quantized", num_bits=3, type="int", group_size=32),
        quantized.ct_packed(3, 32, is_symmetric=False),
        ("affine", 3, 32),
    ),
    "int8 by rows": (
        group_settings("int-quantized", num_bits=8, type="int", strategy="channel"),
        quantized.ct_int8(None),
        ("affine", 8, 128),
    ),
    "int8 scales in one axis": (
        group_settings("int-quantized", num_bits=8, type="int", strategy="channel"),
        quantized.ct_int8(None, shape="[out]"),
        ("affine", 8, 128),
    ),
    "int8 by groups, not symmetric": (
        group_settings("naive-quantized", num_bits=8, type="int", strategy="group", group_size=64),
        quantized.ct_int8(64, is_symmetric=False),
        ("affine", 8, 64),
    ),
    "mxfp4": (
        group_settings("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        quantized.ct_mxfp4(),
        ("mxfp4", 4, 32),
    ),
    "mxfp8": (
        group_settings("mxfp8-quantized", num_bits=8, type="float", group_size=32),
        quantized.ct_mxfp8(),
        ("mxfp8", 8, 32),
    ),
    "nvfp4": (
        group_settings("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        quantized.ct_nvfp4(1.0),
        ("nvfp4", 4, 16),
    ),
    "float8 with powers of two": (
        FP8 | BLOCK | {"scale_fmt": "ue8m0"},
        quantized.float8("block", has_two_powers=True),
        ("mxfp8", 8, 32),
    ),
}

INEXACT: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "gptq act-order": (
        gptq_settings(4, 32, desc_act=True, sym=False),
        quantized.gptq(4, 32, is_symmetric=False, order="act"),
    ),
    "gptq 3 act-order": (gptq_settings(3, 64, desc_act=True), quantized.gptq(3, 64, order="act")),
    "packed int4 act-order": (
        group_settings("pack-quantized", num_bits=4, type="int", group_size=32, actorder="group"),
        quantized.ct_packed(4, 32, is_symmetric=False, order="act"),
    ),
    "packed int5 act-order": (
        group_settings("pack-quantized", num_bits=5, type="int", group_size=32, actorder="group"),
        quantized.ct_packed(5, 32, order="act"),
    ),
    "int8 in groups of 16": (
        group_settings("int-quantized", num_bits=8, type="int", strategy="group", group_size=16),
        quantized.ct_int8(16),
    ),
    "float8 blocks": (FP8 | BLOCK, quantized.float8("block")),
    "float8 blocks that reach over the edge": (
        FP8 | {"weight_block_size": [48, 48]},
        quantized.float8("block", block=48),
    ),
    "float8 tensor": (FP8, quantized.float8("tensor", shape="[]")),
    "float8 tensor in one axis": (FP8, quantized.float8("tensor", suffix="weight_scale", shape="[1]")),
    "float8 rows": (FP8, quantized.float8("channel", suffix="weight_scale", shape="[out]")),
    "float8 e5m2": (FP8 | {"fmt": "e5m2"}, quantized.float8("channel", is_e5m2=True)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, quantized.float8("channel", suffix="weight_scale")),
    "float-quantized": (
        group_settings("float-quantized", num_bits=8, type="float", strategy="channel"),
        quantized.float8("channel", suffix="weight_scale"),
    ),
    "float-quantized tensor": (
        group_settings("float-quantized", num_bits=8, type="float", strategy="tensor"),
        quantized.float8("tensor", suffix="weight_scale", shape="[1]"),
    ),
    "float-quantized blocks": (
        group_settings(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
        ),
        quantized.float8("block", suffix="weight_scale"),
    ),
    "float-quantized blocks in words": (
        group_settings(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure="48x48"
        ),
        quantized.float8("block", suffix="weight_scale", block=48),
    ),
    "nvfp4 scaled": (
        group_settings("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        quantized.ct_nvfp4(300.0),
    ),
}
ALL = {name: case[:2] for name, case in EXACT.items()} | INEXACT


def write(folder: Path, settings: dict[str, Any], quantizer: Quantizer, **more: Any) -> Arrays:
    config = CONFIG | {"quantization_config": settings}
    return write_quantized(folder, config, random_weights(CONFIG), quantizer, **more)


def run(folder: Path, output: Path, **options: Any) -> ConvertReport:
    return convert(folder, output, ConvertOptions(**options))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def written(folder: Path) -> Arrays:
    """The values of a written folder, in float32."""
    settings = config_of(folder).get("quantization", {})
    arrays = mx.load(str(folder / "model.safetensors"))
    values = {}
    for name, array in arrays.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in arrays:
            entry = settings[module]
            array = mx.dequantize(
                array,
                arrays[f"{module}.scales"],
                arrays.get(f"{module}.biases"),
                dtype=mx.float32,
                **entry,
            )
        values[name] = np.array(array.astype(mx.float32))
    return values


@pytest.mark.parametrize("name", EXACT)
def test_what_mlx_has_a_layout_for_stays_exact(tmp_path: Path, name: str) -> None:
    settings, quantizer, (mode, bits, group_size) = EXACT[name]
    exact = write(tmp_path / "source", settings, quantizer)
    report = run(tmp_path / "source", tmp_path / "out")
    found = written(tmp_path / "out")
    assert found.keys() == exact.keys()
    for key, values in exact.items():
        assert np.array_equal(found[key], values), key
    assert not report.inexact_tensors
    kinds = {(t.mode, t.bits, t.group_size) for t in report.tensors if ".layers." in t.name and t.is_matrix}
    assert (mode, bits, group_size) in kinds
    assert all(t.bits is None for t in report.tensors if ".layers." not in t.name)
    model, config = load_model(tmp_path / "out")
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert config["quantization"]["mode"] == mode
    expected = logits(reference_model(CONFIG, exact), TOKENS)
    model.set_dtype(mx.float32)
    assert np.abs(logits(model, TOKENS) - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", INEXACT)
def test_what_mlx_has_no_layout_for_becomes_8_bit(tmp_path: Path, name: str) -> None:
    settings, quantizer = INEXACT[name]
    exact = write(tmp_path / "source", settings, quantizer)
    report = run(tmp_path / "source", tmp_path / "out")
    found = written(tmp_path / "out")
    inexact = {tensor.name for tensor in report.inexact_tensors}
    assert inexact == {key for key, values in exact.items() if ".layers." in key and values.ndim > 1}
    for key, values in exact.items():
        if key not in inexact:
            assert np.array_equal(found[key], values), key
            continue
        groups = values.reshape(len(values), -1, 32)
        step = np.ptp(groups, axis=-1, keepdims=True) / 255
        error = np.abs(found[key].reshape(groups.shape) - groups)
        # Half a step where all steps are alike; the best scales let a few outliers lie beyond the last one.
        assert np.sqrt(np.mean((error / step) ** 2)) < 0.4
        assert np.max(error / step) < 4
    model, _ = load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    expected = logits(reference_model(CONFIG, exact), TOKENS)
    assert np.abs(logits(model, TOKENS) - expected).mean() < 0.05 * np.abs(expected).mean()


@pytest.mark.parametrize("name", ALL)
def test_dequantize_gives_floats_and_no_trace_of_a_quantization(tmp_path: Path, name: str) -> None:
    settings, quantizer = ALL[name]
    exact = write(tmp_path / "source", settings, quantizer)
    report = run(tmp_path / "source", tmp_path / "out", dequantize=True, dtype="float32")
    config = config_of(tmp_path / "out")
    assert not {"quantization", "quantization_config"} & config.keys()
    found = written(tmp_path / "out")
    assert found.keys() == exact.keys()
    for key, values in exact.items():
        assert np.allclose(found[key], values, rtol=3e-7, atol=0), key
    assert not report.inexact_tensors
    load_model(tmp_path / "out")


@pytest.mark.parametrize("name", ["awq", "gptq act-order", "packed int4 not symmetric", "float8 blocks"])
def test_any_rows_are_those_of_the_whole(tmp_path: Path, name: str) -> None:
    settings, quantizer = ALL[name]
    exact = write(tmp_path / "source", settings, quantizer)
    with open_checkpoint(tmp_path / "source") as checkpoint:
        weight = checkpoint.weights["model.layers.0.mlp.gate_proj.weight"]
        values = exact["model.layers.0.mlp.gate_proj.weight"]
        for start, stop in [(0, 1), (5, 6), (7, 9), (30, 70), (31, 32), (100, 256), (255, 256)]:
            assert np.array_equal(np.array(weight.read(start, stop)), values[start:stop]), (start, stop)
            if weight.layout is not None:
                packed = weight.read_packed(start, stop)
                assert {len(part) for part in packed.parts()} == {stop - start}


@pytest.mark.parametrize("name", ["gptq 4", "float8 blocks"])
def test_floats_become_what_the_rest_of_the_model_is(tmp_path: Path, name: str) -> None:
    settings, quantizer = ALL[name]
    exact = write(tmp_path / "source", settings, quantizer)
    run(tmp_path / "source", tmp_path / "out", dequantize=True)
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert {array.dtype for array in arrays.values()} == {mx.bfloat16}
    report = run(tmp_path / "source", tmp_path / "four", bits=4)
    assert "is quantized already" in report.warnings[0]
    four = mx.load(str(tmp_path / "four" / "model.safetensors"))
    assert {array.dtype for array in four.values()} == {mx.bfloat16, mx.uint32}
    key = "model.layers.0.mlp.up_proj"
    source = mx.array(exact[f"{key}.weight"])
    parts = [four[f"{key}.{kind}"] for kind in ("weight", "scales", "biases")]
    usual = mx.quantize(source.astype(mx.bfloat16), group_size=64, bits=4)
    errors = [
        mx.square(mx.dequantize(*found, group_size=64, bits=4).astype(mx.float32) - source).mean().item()
        for found in (parts, usual)
    ]
    assert errors[0] <= 1.05 * errors[1]


GATE = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize(
    ("name", "kind", "change", "message"),
    [
        ("awq", "scales", None, f"tensor '{GATE}.scales' is missing"),
        ("awq", "qzeros", None, f"tensor '{GATE}.qzeros' is missing"),
        ("packed int4 not symmetric", "weight_zero_point", None, "weight_zero_point' is missing"),
        ("awq", "scales", np.ones((2, 9), np.float16), "no AWQ matrix"),
        ("awq", "qzeros", np.ones((2, 9), np.int32), r"qzeros' has shape \(2, 9\), expected \(2, 32\)"),
        ("awq", "qweight", np.ones((128, 32), np.float32), "qweight' has type float32, expected int32"),
        ("gptq 4", "qzeros", None, "qzeros' is missing"),
        ("gptq 4", "qzeros", np.ones((2, 31), np.int32), "no GPTQ matrix"),
        ("gptq 4", "g_idx", np.ones(7, np.int32), r"g_idx' has shape \(7,\), expected \(128,\)"),
        ("gptq 4", "g_idx", np.full(128, 99, np.int32), "g_idx' names group 99, there are 2"),
        ("gptq act-order", "g_idx", None, "g_idx' is missing, and desc_act says that it counts"),
        ("packed int4", "weight_scale", None, "weight_scale' is missing"),
        ("packed int4", "weight_scale", np.ones((255, 4), np.float16), "does not fit a matrix of shape"),
        ("packed int4", "weight_packed", np.ones((256, 13), np.int32), "without gaps"),
        (
            "packed int4 not symmetric",
            "weight_zero_point",
            np.ones((7, 2), np.int32),
            "weight_zero_point' has",
        ),
        ("packed int4 act-order", "weight_g_idx", np.full(128, 7, np.int32), "names a group beyond 4"),
        ("int8 by rows", "weight_scale", np.ones((3, 1), np.float32), "does not fit a matrix of shape"),
        (
            "int8 by rows",
            "weight",
            np.ones((256, 128), np.float32),
            "weight' has type float32, expected int8",
        ),
        ("mxfp4", "weight_scale", np.ones((256, 3), np.uint8), "weight_scale' has shape"),
        ("float8 blocks", "weight_scale_inv", None, "weight_scale_inv' is missing"),
        ("float8 blocks", "weight_scale_inv", np.ones((5, 5), np.float32), "does not fit a matrix of shape"),
        ("float8 rows", "weight", np.ones((256, 128), np.float32), "which is not float8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, kind: str, change: np.ndarray | None, message: str
) -> None:
    settings, quantizer = ALL[name]

    def damaged(values: np.ndarray) -> tuple[quantized.Parts, np.ndarray]:
        parts, exact = quantizer(values)
        if values.shape == (256, 128):
            parts.pop(kind, None)
            if change is not None:
                parts[kind] = quantized.typed(change)
        return parts, exact

    write(tmp_path / "source", settings, damaged, is_wanted=lambda key: "gate_proj" in key)
    with pytest.raises(ConversionError, match=message) as error:
        run(tmp_path / "source", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 300) | st.sampled_from(["gptq", "float", "4", "128x128"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "g"]), inner),
    max_leaves=4,
)
KEYS = [
    *("bits", "group_size", "desc_act", "checkpoint_format", "version", "fmt", "weight_block_size", "format"),
    *("config_groups", "sparsity_config", "transform_config", "quantization_status", "is_marlin_format"),
    "quant_method",
]


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(ALL)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), JSON)
def test_no_settings_escape_as_another_error(name: str, changes: dict[str, Any], group: Any) -> None:
    changed = ALL[name][0] | changes
    if isinstance(changed.get("config_groups"), dict) and isinstance(group, dict):
        changed["config_groups"] = {"g": {"weights": group.get("weights", group)}}
    with contextlib.suppress(ConversionError):
        find_prequantized({"quantization_config": changed}, Path("here"))


def test_modules_that_the_method_left_alone_stay_floats(tmp_path: Path) -> None:
    settings, quantizer = ALL["float8 blocks"]
    settings = settings | {"modules_to_not_convert": ["model.layers.0.self_attn.v_proj"]}
    write(tmp_path / "source", settings, quantizer, is_wanted=lambda key: "mlp" in key or "q_proj" in key)
    report = run(tmp_path / "source", tmp_path / "out")
    kinds = {tensor.name: tensor.bits for tensor in report.tensors if tensor.is_matrix}
    assert kinds["model.layers.0.self_attn.v_proj.weight"] is None
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == 8
    load_model(tmp_path / "out")


def test_biases_of_quantized_modules_come_along(tmp_path: Path) -> None:
    config = CONFIG | {"attention_bias": True, "mlp_bias": True}
    settings, quantizer = ALL["awq"]
    exact = write_quantized(
        tmp_path / "source", config | {"quantization_config": settings}, random_weights(config), quantizer
    )
    run(tmp_path / "source", tmp_path / "out")
    found = written(tmp_path / "out")
    assert "model.layers.0.self_attn.q_proj.bias" in found
    assert all(np.array_equal(found[key], values) for key, values in exact.items())


def test_a_module_with_bits_of_its_own(tmp_path: Path) -> None:
    """GPTQModel's "dynamic": the tensors say what the settings of the whole do not."""
    settings = gptq_settings(4, 64, dynamic={"+:.*down_proj.*": {"bits": 8, "group_size": 32}})
    four, eight = quantized.gptq(4, 64), quantized.gptq(8, 32)
    exact = write(
        tmp_path / "source", settings, lambda values: (eight if values.shape[1] == 256 else four)(values)
    )
    run(tmp_path / "source", tmp_path / "out")
    found = written(tmp_path / "out")
    assert all(np.array_equal(found[key], values) for key, values in exact.items())
    entries = config_of(tmp_path / "out")["quantization"]
    assert entries["model.layers.0.mlp.down_proj"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert entries["model.layers.0.mlp.up_proj"] == {"group_size": 64, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize("name", ["awq", "packed int4", "float8 blocks", "gptq act-order"])
def test_quantized_experts_are_stacked(tmp_path: Path, name: str) -> None:
    config = {
        **CONFIG,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    settings, quantizer = ALL[name]
    weights: Arrays = {}
    for key, values in random_weights(config).items():
        if "switch_mlp" in key:
            for expert in range(4):
                weights[key.replace("switch_mlp", f"experts.{expert}")] = values[expert]
        else:
            weights[key] = values
    exact = write_quantized(
        tmp_path / "source",
        config | {"quantization_config": settings},
        weights,
        quantizer,
        is_wanted=lambda key: "experts" in key,
    )
    run(tmp_path / "source", tmp_path / "out", dequantize=True, dtype="float32")
    report = run(tmp_path / "source", tmp_path / "kept")
    found, kept = written(tmp_path / "out"), written(tmp_path / "kept")
    for part in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.0.mlp.switch_mlp.{part}.weight"
        expected = np.stack([exact[key.replace("switch_mlp", f"experts.{e}")] for e in range(4)])
        assert np.allclose(found[key], expected, rtol=3e-7, atol=0)
        assert np.array_equal(kept[key], expected) == (name in EXACT)
    assert bool(report.inexact_tensors) == (name not in EXACT)
    load_model(tmp_path / "kept")


DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("has_two_powers", [False, True])
def test_a_deepseek_release(tmp_path: Path, has_two_powers: bool) -> None:
    """Float8 blocks of 128, experts one by one, and a matrix that mlx-lm splits into two others."""
    weights: Arrays = {}
    for key, values in random_weights(DEEPSEEK).items():
        if "switch_mlp" in key:
            for expert in range(4):
                weights[key.replace("switch_mlp", f"experts.{expert}")] = values[expert]
        elif ".embed_q." in key:
            shape = (4 * 64, 128)
            joined = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * 0.3
            weights[key.replace("embed_q", "kv_b_proj")] = joined
        elif ".unembed_out." not in key:
            weights[key] = values
    exact = write_quantized(
        tmp_path / "source",
        DEEPSEEK | {"quantization_config": FP8 | BLOCK, "torch_dtype": "bfloat16"},
        weights,
        quantized.float8("block", has_two_powers=has_two_powers),
        is_wanted=lambda key: "_proj" in key,
    )
    model = build_model(DEEPSEEK, tmp_path)
    model.load_weights(list(model.sanitize({key: mx.array(values) for key, values in exact.items()}).items()))
    expected = logits(model, TOKENS)
    run(tmp_path / "source", tmp_path / "floats", dequantize=True, dtype="float32")
    floats, _ = load_model(tmp_path / "floats")
    assert np.allclose(logits(floats, TOKENS), expected, atol=1e-4 * np.abs(expected).max())
    report = run(tmp_path / "source", tmp_path / "out")
    experts = {t.mode for t in report.tensors if ".switch_mlp." in t.name}
    assert experts == {"mxfp8" if has_two_powers else "affine"}
    kept, _ = load_model(tmp_path / "out")
    kept.set_dtype(mx.float32)
    assert np.abs(logits(kept, TOKENS) - expected).mean() < 0.05 * np.abs(expected).mean()


@pytest.mark.parametrize("is_head_equal", [True, False])
def test_a_tied_model_with_a_quantized_head(tmp_path: Path, is_head_equal: bool) -> None:
    """Case 24, A and B: the head in the files counts, unless it is the embedding."""
    config = {**CONFIG, "tie_word_embeddings": True}
    weights = random_weights(CONFIG)
    if is_head_equal:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    settings, quantizer = ALL["gptq 8"]
    exact = write_quantized(
        tmp_path / "source",
        config | {"quantization_config": settings},
        weights,
        quantizer,
        is_wanted=lambda key: "norm" not in key and (is_head_equal or "embed" not in key),
    )
    report = run(tmp_path / "source", tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] == is_head_equal
    assert any("differs from the embedding" in text for text in report.warnings) != is_head_equal
    found = written(tmp_path / "out")
    assert ("lm_head.weight" in found) != is_head_equal
    assert all(np.array_equal(values, exact[key]) for key, values in found.items())


def test_a_quantized_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    """Case 24, G."""
    config = {
        **CONFIG,
        "model_type": "qwen3_moe",
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    weights = random_weights(config)
    for key in [key for key in weights if "switch_mlp" in key]:
        values = weights.pop(key)
        for expert in range(2):
            weights[key.replace("switch_mlp", f"experts.{expert}")] = values[expert]
    del weights["model.layers.0.mlp.experts.1.up_proj.weight"]
    settings, quantizer = ALL["awq"]
    write_quantized(
        tmp_path / "source",
        config | {"quantization_config": settings},
        weights,
        quantizer,
        is_wanted=lambda key: "experts." in key,
    )
    with pytest.raises(ConversionError, match=r"experts\.1\.up_proj\.weight' is missing"):
        run(tmp_path / "source", tmp_path / "out")


def test_settings_in_the_nested_config_count(tmp_path: Path) -> None:
    """Case 24, D and J: a multimodal checkpoint whose text part is quantized."""
    inner = {key: value for key, value in CONFIG.items() if key != "model_type"}
    settings, quantizer = ALL["float8 blocks"]
    config = {
        "model_type": "mistral3",
        "text_config": inner | {"model_type": "llama", "quantization_config": settings},
        "vision_config": {"depth": 2},
    }
    weights = {f"language_model.{key}": values for key, values in random_weights(CONFIG).items()}
    exact = write_quantized(tmp_path / "source", config, weights, quantizer)
    run(tmp_path / "source", tmp_path / "out", dequantize=True, dtype="float32")
    found = written(tmp_path / "out")
    assert found.keys() == exact.keys()
    assert all(np.allclose(found[key], values, rtol=3e-7, atol=0) for key, values in exact.items())
    written_config = config_of(tmp_path / "out")
    assert "quantization_config" not in written_config["text_config"]
    load_model(tmp_path / "out")


def test_biases_of_zeros_that_the_architecture_lacks_add_nothing(tmp_path: Path) -> None:
    """AutoGPTQ gives every quantized module a bias, whether the model has one or not."""
    settings, quantizer = ALL["gptq 4"]

    for folder, number in (("zeros", 0.0), ("ones", 1.0)):

        def with_bias(values: np.ndarray, number: float = number) -> tuple[quantized.Parts, np.ndarray]:
            parts, exact = quantizer(values)
            bias = np.full(values.shape[0], number, np.float16)
            return parts | {"bias": quantized.typed(bias)}, exact

        write(tmp_path / folder, settings, with_bias)
    run(tmp_path / "zeros", tmp_path / "out")
    assert not any(name.endswith("proj.bias") for name in written(tmp_path / "out"))
    with pytest.raises(ConversionError, match=r"_proj\.bias' \(and \d more\) has no place in a llama model"):
        run(tmp_path / "ones", tmp_path / "no")


@pytest.mark.parametrize(
    ("file", "settings", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}, "gptq 4"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_settings_in_a_file_of_their_own(
    tmp_path: Path, file: str, settings: dict[str, Any], name: str
) -> None:
    exact = write(tmp_path / "source", {}, ALL[name][1])
    with pytest.raises(ConversionError, match=r"are quantized \('.*qweight', as in GPTQ or AWQ\)"):
        run(tmp_path / "source", tmp_path / "out")
    (tmp_path / "source" / file).write_text(json.dumps(settings))
    run(tmp_path / "source", tmp_path / "out")
    found = written(tmp_path / "out")
    assert all(np.array_equal(found[key], values) for key, values in exact.items())
    assert not (tmp_path / "out" / file).exists()


def test_modelopts_own_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "source", {}, ALL["awq"][1])
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "source" / "hf_quant_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConversionError, match="quant_method 'modelopt', format 'NVFP4', which is not"):
        run(tmp_path / "source", tmp_path / "out")


def test_each_group_of_modules_in_a_format_of_its_own(tmp_path: Path) -> None:
    """compressed-tensors "mixed-precision"."""
    kinds: dict[str, tuple[dict[str, Any], Quantizer]] = {
        "q_proj": (
            {"format": "pack-quantized", "weights": {"num_bits": 8, "type": "int", "group_size": 64}},
            quantized.ct_packed(8, 64),
        ),
        "up_proj": (
            {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "group_size": 32}},
            quantized.ct_packed(4, 32, is_symmetric=False),
        ),
        "down_proj": (
            {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
            quantized.ct_int8(None),
        ),
        "gate_proj": (
            {
                "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "block_structure": [128, 128]},
            },
            quantized.float8("block", suffix="weight_scale", has_two_powers=True),
        ),
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {name: {"targets": [f"re:.*{name}"], **group} for name, (group, _) in kinds.items()},
    }
    weights = dict(sorted(random_weights(CONFIG).items()))
    wanted = [(name, kind) for name in weights for kind in kinds if kind in name]
    quantizers = iter(kinds[kind][1] for _, kind in wanted)
    exact = write_quantized(
        tmp_path / "source",
        CONFIG | {"quantization_config": settings},
        weights,
        lambda values: next(quantizers)(values),
        is_wanted=lambda key: key in dict(wanted),
    )
    report = run(tmp_path / "source", tmp_path / "out")
    assert not report.inexact_tensors
    found = written(tmp_path / "out")
    assert all(np.array_equal(found[key], values) for key, values in exact.items())
    entries = config_of(tmp_path / "out")["quantization"]
    layer = "model.layers.0"
    assert entries[f"{layer}.self_attn.q_proj"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert entries[f"{layer}.mlp.up_proj"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert entries[f"{layer}.mlp.down_proj"] == {"group_size": 128, "bits": 8, "mode": "affine"}
    assert entries[f"{layer}.mlp.gate_proj"] == {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    load_model(tmp_path / "out")
