"""Adapters out to PEFT's layout and in again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlxserve.errors import MlxserveError
from mlxserve.models.adapter_folder import read_adapter
from mlxserve.tuning.peft import export_peft, import_peft
from tests.tiny_adapters import write_adapter
from tests.tiny_models import TinyModel

MODEL = TinyModel()


def test_there_and_back_is_the_same_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", MODEL, rank=4, scale=2.5)
    export_peft(read_adapter(tmp_path / "a"), tmp_path / "peft", base_name="tiny")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 10.0, "LORA")
    assert config["target_modules"] == ["down_proj", "gate_proj", "o_proj", "q_proj", "v_proj"]
    assert config["layers_to_transform"] == [0, 1]
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors[q].shape == (4, 64)
    import_peft(tmp_path / "peft", tmp_path / "back")
    before, after = read_adapter(tmp_path / "a"), read_adapter(tmp_path / "back")
    assert after.scale == before.scale
    assert before.weights.keys() == after.weights.keys()
    assert all(mx.array_equal(before.weights[name], after.weights[name]) for name in before.weights)


def write_peft(folder: Path, config: dict[str, Any], ranks: dict[str, int], *, dora: bool = False) -> Path:
    rng = np.random.default_rng(0)
    tensors = {}
    for path, rank in ranks.items():
        name = f"base_model.model.{path}"
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, 64)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((64, rank)).astype(np.float32)
        if dora:
            tensors[f"{name}.lora_magnitude_vector"] = np.ones(64, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    base = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(base | config))
    return folder


Q = "model.layers.0.self_attn.q_proj"
O = "model.layers.1.self_attn.o_proj"  # noqa: E741


def test_other_ranks_and_alphas_keep_the_same_product(tmp_path: Path) -> None:
    config = {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\.o_proj": 3}}
    peft = write_peft(tmp_path / "peft", config, {Q: 8, O: 2})
    import_peft(peft, tmp_path / "out")
    adapter = read_adapter(tmp_path / "out")
    tensors = load_file(peft / "adapter_model.safetensors")
    for path, scale in ((Q, 16 / 8), (O, 3 / 2)):
        name = f"base_model.model.{path}"
        expected = scale * (tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]).T
        a, b = (np.array(adapter.weights[f"{path}.lora_{kind}"]) for kind in "ab")
        np.testing.assert_allclose(adapter.scale * (a @ b), expected, rtol=1e-4, atol=1e-5)


def test_rslora_and_dora(tmp_path: Path) -> None:
    import_peft(write_peft(tmp_path / "rs", {"use_rslora": True}, {Q: 8}), tmp_path / "rs-out")
    assert read_adapter(tmp_path / "rs-out").scale == pytest.approx(16 / 8**0.5)
    import_peft(write_peft(tmp_path / "do", {"use_dora": True}, {Q: 8}, dora=True), tmp_path / "do-out")
    adapter = read_adapter(tmp_path / "do-out")
    assert adapter.type == "dora"
    assert adapter.weights[f"{Q}.m"].shape == (64,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported, only 'LORA'"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
        ({"r": 0}, "r must be a number above 0, found 0"),
        ({"r": 4}, "has rank 8, adapter_config.json says 4"),
        ({"lora_alpha": None}, "lora_alpha must be a number above 0, found None"),
        ({"use_dora": True}, "use_dora is True, which does not fit"),
    ],
)
def test_what_cannot_be_said_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_peft(tmp_path / "peft", config, {Q: 8})
    with pytest.raises(MlxserveError) as error:
        import_peft(tmp_path / "peft", tmp_path / "out")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_tensors_of_something_else_are_named(tmp_path: Path) -> None:
    peft = write_peft(tmp_path / "peft", {}, {Q: 8})
    tensors = load_file(peft / "adapter_model.safetensors")
    extra = {"base_model.model.lm_head.weight": np.ones(3, np.float32)}
    save_file({**tensors, **extra}, peft / "adapter_model.safetensors")
    with pytest.raises(
        MlxserveError, match=r"'base_model\.model\.lm_head\.weight' is no part of a LoRA adapter"
    ):
        import_peft(peft, tmp_path / "out")
    save_file({"x": np.ones(3)}, peft / "adapter_model.safetensors")
    with pytest.raises(MlxserveError, match=r"cannot be read: .*F64"):
        import_peft(peft, tmp_path / "out")
    save_file({k: v for k, v in tensors.items() if "lora_A" in k}, peft / "adapter_model.safetensors")
    with pytest.raises(MlxserveError, match=r"q_proj needs lora_A \[rank, inputs\] and lora_B"):
        import_peft(peft, tmp_path / "out")


def test_full_weights_have_no_peft_layout(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", MODEL, fine_tune_type="full")
    with pytest.raises(MlxserveError, match="type 'full' has no PEFT layout"):
        export_peft(read_adapter(tmp_path / "a"), tmp_path / "out", base_name="x")
    assert not (tmp_path / "out").exists()
