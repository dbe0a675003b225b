"""MLX's own quantized folders as sources: as mlx-lm writes them, with mixed settings, and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from mlxserve import cli
from mlxserve.errors import ConversionError
from mlxserve_convert import ConvertOptions, ConvertReport, convert
from tests.convert.checkpoints import LLAMA, logits, random_weights, reference_model, write_tokenizer

CONFIG = {**LLAMA, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 1}
MOE = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
TOKENS = [3, 60, 17, 42, 5, 11, 9]
Predicate = Callable[[str, Any], bool | dict[str, Any]]


def save(folder: Path, config: dict[str, Any], **settings: Any) -> Any:
    """A folder that mlx-lm quantized, in bfloat16; gives mlx-lm's model of it."""
    model = reference_model(config, random_weights(config))
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, **settings)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    model.set_dtype(mx.float32)
    return model


def run(folder: Path, output: Path, **options: Any) -> ConvertReport:
    return convert(folder, output, ConvertOptions(**options))


def test_each_module_with_settings_of_its_own(tmp_path: Path) -> None:
    """As recipes make them: the entry of a module counts, an entry without a mode is affine."""

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        if "q_proj" in path:
            return {"bits": 8, "group_size": 32}
        if "down_proj" in path:
            return {"bits": 3, "group_size": 128, "mode": "affine"}
        if "up_proj" in path:
            return {"bits": 8, "group_size": 32, "mode": "mxfp8"}
        return "lm_head" not in path

    mixed = save(
        tmp_path / "source", CONFIG, group_size=None, bits=None, mode="nvfp4", quant_predicate=predicate
    )
    expected = logits(mixed, TOKENS)
    run(tmp_path / "source", tmp_path / "out", dequantize=True)
    assert not any(
        name.endswith((".scales", ".biases")) for name in mx.load(str(tmp_path / "out" / "model.safetensors"))
    )
    plain, config = load_model(tmp_path / "out")
    assert not {"quantization", "quantization_config"} & config.keys()
    plain.set_dtype(mx.float32)
    assert np.abs(logits(plain, TOKENS) - expected).mean() < 0.03 * np.abs(expected).mean()
    report = run(tmp_path / "source", tmp_path / "eight", bits=8)
    assert "(affine 3-bit, affine 8-bit, mxfp8, nvfp4) and is quantized again" in report.warnings[-1]


def test_experts_with_a_scale_of_their_own(tmp_path: Path) -> None:
    save(tmp_path / "source", MOE, group_size=16, bits=4, mode="nvfp4", global_scale=True)
    held = mx.load(str(tmp_path / "source" / "model.safetensors"))
    run(tmp_path / "source", tmp_path / "out", dequantize=True, dtype="float32")
    found = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for part in ("gate_proj", "up_proj", "down_proj"):
        module = f"model.layers.0.mlp.switch_mlp.{part}"
        scales = held[f"{module}.global_scale"]
        assert scales.shape == (4,)
        for expert in range(4):
            expected = mx.dequantize(
                held[f"{module}.weight"][expert],
                held[f"{module}.scales"][expert],
                group_size=16,
                bits=4,
                mode="nvfp4",
                global_scale=scales[expert],
                dtype=mx.float32,
            )
            assert mx.allclose(found[f"{module}.weight"][expert], expected, rtol=4e-3, atol=0)
    load_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bits": 7, "group_size": 64}, "bits 7 and group size 64, which are not possible in mode affine"),
        ({"bits": 0, "group_size": 64}, "bits 0 and group size 64"),
        ({"bits": 4, "group_size": 48}, "bits 4 and group size 48"),
        ({"bits": "4", "group_size": 64}, "bits '4' and group size 64"),
        ({"bits": 4, "group_size": 32}, "are no 4-bit matrix in groups of 32"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "biases' has no place in mode mxfp4"),
        ({"bits": 8, "group_size": 64, "mode": "mxfp8"}, "bits 8 and group size 64, which are not possible"),
        ({"bits": 4, "group_size": 64, "mode": "fp5"}, "quantization mode 'fp5', which is not known"),
        ({"bits": 4, "group_size": 64, "mode": ["affine"]}, r"quantization mode \['affine'\]"),
    ],
)
def test_settings_that_the_tensors_contradict(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    save(tmp_path / "source", CONFIG, group_size=64, bits=4)
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    config["quantization"]["model.layers.0.mlp.up_proj"] = entry
    path.write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=message):
        run(tmp_path / "source", tmp_path / "out", dequantize=True)


def test_parts_of_other_shapes_are_named(tmp_path: Path) -> None:
    save(tmp_path / "source", CONFIG, group_size=64, bits=4)
    path = tmp_path / "source" / "model.safetensors"
    whole = dict(mx.load(str(path)))
    name = "model.layers.0.mlp.up_proj"
    for change, message in (
        ({f"{name}.scales": mx.zeros((127, 2))}, "are no 4-bit matrix in groups of 64"),
        ({f"{name}.biases": mx.zeros((127, 2))}, "are no 4-bit matrix in groups of 64"),
        ({f"{name}.weight": mx.zeros((128, 16))}, "are no 4-bit matrix in groups of 64"),
        ({f"{name}.biases": None}, f"'{name}.biases' is missing"),
        ({f"{name}.weight": None}, f"'{name}.weight' is missing"),
        ({f"{name}.global_scale": mx.zeros((3,))}, "global_scale' has shape"),
    ):
        changed = {key: value for key, value in (whole | change).items() if value is not None}
        mx.save_safetensors(str(path), changed)
        with pytest.raises(ConversionError, match=message):
            run(tmp_path / "source", tmp_path / "out", dequantize=True)


def test_the_command_dequantizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "source", CONFIG, group_size=64, bits=4)
    output = tmp_path / "out"
    assert cli.run(["convert", str(tmp_path / "source"), "-o", str(output), "--dequantize"]) == 0
    assert "0 matrices quantized" in capsys.readouterr().out
    assert "quantization" not in json.loads((output / "config.json").read_text())
    both = ["convert", str(tmp_path / "source"), "-o", str(output), "--dequantize", "--bits", "4"]
    assert cli.run(both) == 2
    assert "--dequantize makes floats" in capsys.readouterr().err
