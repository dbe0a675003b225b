"""Case 30: what a resumed run trains, and that a fused model acts like base plus adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as load_stock
from safetensors.numpy import load_file, save_file

from mlxserve.config import EngineConfig
from mlxserve.engine.served_adapters import load_adapter
from mlxserve.engine.served_model import open_folder
from mlxserve.errors import ConversionError, MlxserveError, UsageError
from mlxserve.tuning import fuse
from mlxserve.tuning.fusing import fuse_adapter
from tests.server.serving import COMPLETIONS, serving
from tests.tiny_adapters import write_adapter
from tests.tiny_models import TinyModel
from tests.tuning import runs
from tests.tuning.runs import run

RUN: dict[str, Any] = {"rank": 8, "alpha": 160.0, "learning_rate": 1e-4, "iters": 20}
"""mlx-lm's scale 20 at rank 8."""
Q_PROJ = "model.layers.0.self_attn.q_proj"
TOKENS = [40, 12, 7, 33, 60, 51, 2, 19, 80, 5]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_model(tmp_path_factory.mktemp("base") / "float")


@pytest.fixture(scope="module")
def base_4bit(base: Path) -> Path:
    return runs.write_quantized(base.with_name("4bit"), base)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_rows(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def first(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 20 steps."""
    output = tmp_path_factory.mktemp("run") / "adapters"
    watcher, _ = run(base, data, output, **RUN)
    assert watcher.plan is not None and watcher.plan.num_trained_parameters == 3584
    return output


@pytest.fixture
def adapters(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "adapters"))


@pytest.mark.parametrize("given", ["adapters", "adapters/adapters.safetensors"])
def test_a_and_d_resume_from_the_folder_or_its_file(
    given: str, base: Path, data: Path, adapters: Path, tmp_path: Path
) -> None:
    before = (adapters / "adapters.safetensors").read_bytes()
    settings = {**RUN, "iters": 10}
    watcher, outcome = run(base, data, tmp_path / "new", resume=tmp_path / given, **settings)
    assert [report.step for report in watcher.steps] == list(range(21, 31)) and outcome.step == 30
    assert watcher.plan is not None and watcher.plan.num_trained_parameters == 3584
    assert (adapters / "adapters.safetensors").read_bytes() == before


def test_b_c_and_f_what_differs_is_refused(base: Path, data: Path, adapters: Path, tmp_path: Path) -> None:
    narrow = runs.write_model(tmp_path / "narrow", hidden=32)
    for model, change, message in (
        (base, {"rank": 16}, "rank 8, it cannot go on with 16"),
        (base, {"layers": 1}, "layers None, it cannot go on with 1"),
        (narrow, {}, r"lora_a has shape \(64, 8\), this run's is \(32, 8\)"),
    ):
        with pytest.raises(UsageError, match=message):
            run(model, data, tmp_path / "new", resume=adapters, **(RUN | change))
    assert not (tmp_path / "new").exists()


def test_e_a_missing_run_is_refused(base: Path, data: Path, adapters: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nope\.safetensors: no such run"):
        run(base, data, tmp_path / "new", resume=tmp_path / "nope.safetensors", **RUN)
    shutil.rmtree(adapters / "state")
    with pytest.raises(UsageError, match="has no saved state to resume from"):
        run(base, data, tmp_path / "new", resume=adapters, **RUN)
    assert not (tmp_path / "new").exists()


def test_h_and_i_layers(base: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layers is 99, but the model has only 2"):
        run(base, data, tmp_path / "h", layers=99)
    run(base, data, tmp_path / "i", layers=-1, iters=1)
    assert {name.split(".")[2] for name in runs.adapter(tmp_path / "i")} == {"0", "1"}
    assert json.loads((tmp_path / "i/adapter_config.json").read_text())["num_layers"] == 2


def logits(folder: Path, adapter: Path | None = None) -> np.ndarray[Any, Any]:
    """Of mlx-lm's own model and adapter layers."""
    model, _ = load_stock(folder)
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.eval()
    return np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def config_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


def write_small_change(folder: Path) -> tuple[Path, Path]:
    """K: a 4-bit base whose grid step is 0.1, and an adapter of changes of 0.03."""
    plain = runs.write_model(folder / "plain")
    weights = load_file(plain / "model.safetensors")
    row = (-0.8 + 0.1 * (np.arange(64) % 16)).astype(np.float32)
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[name] = np.tile(row, (weights[name].shape[0], 1))
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    base = runs.write_quantized(folder / "k", plain)
    changed = np.isin(np.arange(64) % 16, (3, 6, 9, 12)).astype(np.float32)
    tensors = {}
    for layer in (0, 1):
        path = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{path}.lora_a"] = np.zeros((64, 8), np.float32)
        tensors[f"{path}.lora_a"][:, 0] = changed
        tensors[f"{path}.lora_b"] = np.zeros((8, 64), np.float32)
        tensors[f"{path}.lora_b"][0] = 0.03 / 20
    adapter = folder / "k-adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapters.safetensors")
    parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    (adapter / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters})
    )
    return base, adapter


def probe(folder: Path, adapter: Path | None = None) -> float:
    model, _ = load_stock(folder)
    if adapter is not None:
        load_adapters(model, str(adapter))
    return float(model.layers[0].self_attn.q_proj(mx.ones((1, 64)))[0, 0].item())


def test_k_a_small_change_survives_or_is_refused(tmp_path: Path) -> None:
    base, adapter = write_small_change(tmp_path)
    assert probe(base) == pytest.approx(-3.2, abs=1e-3)
    assert probe(base, adapter) == pytest.approx(-2.72, abs=1e-3)
    with pytest.raises(ConversionError, match=r"2 of 2 changed layers would lose .* at 4 bits .*--bits auto"):
        fuse_adapter(base, adapter, tmp_path / "keep", bits="keep")
    assert not (tmp_path / "keep").exists()
    fused = fuse_adapter(base, adapter, tmp_path / "auto", bits="auto")
    assert {(layer.bits_before, layer.bits_after) for layer in fused.layers} == {(4, 8)}
    assert max(layer.lost for layer in fused.layers) <= fuse.MAX_LOST
    assert probe(tmp_path / "auto") == pytest.approx(-2.72, abs=0.05)
    written = config_of(tmp_path / "auto")["quantization"]
    assert written["bits"] == 4 and written[Q_PROJ]["bits"] == 8
    assert distance(logits(tmp_path / "auto"), logits(base, adapter)) < 0.02
    fuse_adapter(base, adapter, tmp_path / "floats", bits="floats")
    assert probe(tmp_path / "floats") == pytest.approx(-2.72, abs=1e-3)


def test_l_dequantized_says_nothing_of_quantization(base_4bit: Path, adapters: Path, tmp_path: Path) -> None:
    fused = fuse_adapter(base_4bit, adapters, tmp_path / "out", bits="floats")
    assert {(layer.bits_before, layer.bits_after) for layer in fused.layers} == {(4, None)}
    assert not {"quantization", "quantization_config"} & config_of(tmp_path / "out").keys()
    names = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert names and not [name for name in names if name.endswith((".scales", ".biases"))]
    assert distance(logits(tmp_path / "out"), logits(base_4bit, adapters)) < 1e-4
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (base_4bit / name).read_bytes()


@pytest.mark.parametrize("bits", ["auto", "floats"])
def test_m_mxfp4_has_no_biases(bits: Any, base: Path, adapters: Path, tmp_path: Path) -> None:
    quantized = runs.write_quantized(tmp_path / "mxfp4", base, group_size=32, mode="mxfp4")
    fuse_adapter(quantized, adapters, tmp_path / "out", bits=bits)
    assert distance(logits(tmp_path / "out"), logits(quantized, adapters)) < 0.05


@pytest.mark.parametrize("bits", ["auto", "keep", "floats"])
@pytest.mark.parametrize("kind", ["float", "4bit"])
def test_n_a_zero_adapter_changes_nothing(
    kind: str, bits: Any, base: Path, base_4bit: Path, adapters: Path, tmp_path: Path
) -> None:
    tensors = load_file(adapters / "adapters.safetensors")
    zero = {name: value * (0 if name.endswith("lora_b") else 1) for name, value in tensors.items()}
    (adapters / "adapters.safetensors").unlink()
    save_file(zero, adapters / "adapters.safetensors")
    folder = base if kind == "float" else base_4bit
    fused = fuse_adapter(folder, adapters, tmp_path / "out", bits=bits)
    assert np.abs(logits(tmp_path / "out") - logits(folder)).max() <= 1e-4
    if bits != "floats":
        assert all(layer.bits_after == layer.bits_before for layer in fused.layers)
        assert np.array_equal(logits(tmp_path / "out"), logits(folder))


def test_o_bits_of_each_layer_are_kept(base: Path, tmp_path: Path) -> None:
    quantized = runs.write_quantized(
        tmp_path / "mixed",
        base,
        quant_predicate=lambda path, _: {"bits": 8, "group_size": 64} if path == Q_PROJ else True,
    )
    assert config_of(quantized)["quantization"][Q_PROJ]["bits"] == 8
    adapter = write_adapter(tmp_path / "adapter", TinyModel(), names=("v_proj",))
    fuse_adapter(quantized, adapter, tmp_path / "out", bits="auto")
    written = config_of(tmp_path / "out")["quantization"]
    assert (written["bits"], written["group_size"]) == (4, 64)
    assert (written[Q_PROJ]["bits"], written[Q_PROJ]["group_size"]) == (8, 64)
    wanted = logits(quantized, adapter)
    assert distance(logits(tmp_path / "out"), wanted) < 0.3 * distance(logits(quantized), wanted)


@pytest.mark.parametrize("kind", ["float", "4bit"])
def test_p_dora(kind: str, base: Path, base_4bit: Path, data: Path, tmp_path: Path) -> None:
    folder = base if kind == "float" else base_4bit
    settings = {"type": "dora", "iters": 20, "learning_rate": 3e-2, "targets": ["linear"]}
    run(folder, data, tmp_path / "adapter", **settings)
    fuse_adapter(folder, tmp_path / "adapter", tmp_path / "out", bits="floats")
    wanted = logits(folder, tmp_path / "adapter")
    assert distance(wanted, logits(folder)) > 0.05
    assert distance(logits(tmp_path / "out"), wanted) < 1e-3


def test_full_weights(base: Path, data: Path, tmp_path: Path) -> None:
    run(base, data, tmp_path / "adapter", type="full", targets=["linear"])
    fuse_adapter(base, tmp_path / "adapter", tmp_path / "out", bits="auto")
    wanted = logits(base, tmp_path / "adapter")
    assert distance(wanted, logits(base)) > 0.05
    assert distance(logits(tmp_path / "out"), wanted) < 1e-4


def test_experts(data: Path, tmp_path: Path) -> None:
    from tests.tuning.test_training import MOE

    moe = runs.write_model(tmp_path / "moe", **MOE)
    run(moe, data, tmp_path / "adapter", targets=["experts"], iters=20, learning_rate=3e-2)
    for name, folder in (("float", moe), ("4bit", runs.write_quantized(tmp_path / "q", moe))):
        fuse_adapter(folder, tmp_path / "adapter", tmp_path / name, bits="auto")
        wanted = logits(folder, tmp_path / "adapter")
        assert distance(wanted, logits(folder)) > 0.05
        limit = 1e-4 if name == "float" else 0.3 * distance(logits(folder), wanted)
        assert distance(logits(tmp_path / name), wanted) < limit


def test_q_weights_alone_are_refused(base: Path, adapters: Path, tmp_path: Path) -> None:
    (adapters / "adapter_config.json").unlink()
    with pytest.raises(MlxserveError, match=r"adapter_config\.json is missing"):
        fuse_adapter(base, adapters, tmp_path / "out", bits="auto")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", ["auto", "keep", "floats"])
def test_a_change_that_is_dropped_is_noticed(
    bits: Any, base_4bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", TinyModel())
    if bits != "keep":
        fuse_adapter(base_4bit, adapter, tmp_path / "good", bits=bits)
    monkeypatch.setattr(fuse.LayerChange, "applied", lambda self, base, *rest: base)
    with pytest.raises(ConversionError, match="does not act like base plus adapter"):
        fuse_adapter(base_4bit, adapter, tmp_path / "out", bits=bits)
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(adapters: Path, tmp_path: Path) -> None:
    narrow = runs.write_model(tmp_path / "narrow", hidden=32)
    with pytest.raises(
        UsageError, match=r"shape \(64, 8\) does not fit: the base's weight is \((64|32), 32\)"
    ):
        fuse_adapter(narrow, adapters, tmp_path / "out", bits="auto")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", ["auto", "floats"])
async def test_the_fused_model_is_served_like_base_plus_adapter(
    bits: Any, base_4bit: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", TinyModel())
    fused = fuse_adapter(base_4bit, adapter, tmp_path / "fused", bits=bits)
    if bits == "auto":
        # Four bits a layer would do for each by itself.
        assert {layer.bits_after for layer in fused.layers} == {8}
        with pytest.raises(ConversionError, match="does not act like base plus adapter"):
            fuse_adapter(base_4bit, adapter, tmp_path / "keep", bits="keep")
    body = {"prompt": "ab ab ab ab", "max_tokens": 8, "temperature": 0}
    base = open_folder(base_4bit, "base", EngineConfig())
    both, alone = load_adapter(base, "mine", adapter), open_folder(tmp_path / "fused", "f", EngineConfig())
    async with serving(base, both, alone) as api:
        texts = [
            (await api.post(COMPLETIONS, {"model": name, **body})).text for name in ("base:mine", "f", "base")
        ]
    assert texts[0] == texts[1] != texts[2]
