"""scripts/bench_peers.py with a fake peer, and the random models of scripts/bench_models.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlxserve.models.loader import load_model
from mlxserve_convert import ConvertOptions, convert

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FAKE = Path(__file__).with_name("fake_peer.py")
sys.path.insert(0, str(SCRIPTS))

import bench_models  # noqa: E402
import bench_peers  # noqa: E402
from bench_protocol import Peer, PeerError  # noqa: E402


def fake() -> Peer:
    return Peer("fake", [sys.executable, str(FAKE)])


def test_what_a_side_prints_is_no_reply() -> None:
    with fake() as peer:
        assert peer.ask("load", model="m", threads=3) == {"version": "fake, 3 threads"}
        assert peer.ask("run", prompts=[[1]], new_tokens=2)["tokens"] == [[1, 1]]


def test_a_failure_is_told_and_the_side_goes_on() -> None:
    with fake() as peer:
        with pytest.raises(PeerError, match=r"^fake: ValueError: it was asked to$"):
            peer.ask("fail")
        assert peer.ask("load", model="m", threads=1)["version"] == "fake, 1 threads"


def test_a_side_that_ends_is_told_with_its_last_words() -> None:
    with fake() as peer, pytest.raises(PeerError, match=r"^fake ended with exit code 1: the end of it$"):
        peer.ask("end")


def test_a_python_that_is_not_there_is_one_line() -> None:
    with pytest.raises(PeerError, match=r"^fake: cannot run /no/python: No such file"):
        Peer("fake", ["/no/python"])


def test_without_a_peer_it_says_how_to_make_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLXSERVE_PEER_PYTHON", raising=False)
    with pytest.raises(SystemExit) as ended:
        bench_peers.main(["model.gguf"])
    assert ended.value.code == 2
    assert "pip install llama-cpp-python" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["512/64", "a/b/c", "0/8/1", "8/1/1", "8/8/0"])
def test_a_wrong_case_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_peers.main(["m.gguf", "--peer-python", "python", "--case", text])
    assert repr(text) in capsys.readouterr().err


def test_one_run_gives_medians_and_ratios(tmp_path: Path) -> None:
    bench_models.write_model(tmp_path / "tiny.gguf", bench_models.SHAPES["tiny-llama"])
    command = [sys.executable, str(SCRIPTS / "bench_peers.py"), str(tmp_path / "tiny.gguf")]
    command += ["--peer-python", sys.executable, "--peer-script", str(FAKE), "--repeat", "3"]
    command += ["--case", "8/4/1", "--case", "8/6/2", "--json", str(tmp_path / "out.json"), "--threads", "1"]
    environment = os.environ | {"MLXSERVE_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["threads"] == 1
    assert [case["case"] for case in result["cases"]] == ["8/4/1", "8/6/2"]
    for case in result["cases"]:
        sides = case["sides"]
        assert sides["llama.cpp"]["decode_tok_s"] == 2.0
        runs = sides["mlxserve"]["decode_tok_s_runs"]
        assert len(runs) == 3 and sides["mlxserve"]["decode_tok_s"] == sorted(runs)[1]
        ratio = case["ratios"]["mlxserve"]["llama.cpp"]["decode"]
        assert ratio == pytest.approx(sides["mlxserve"]["decode_tok_s"] / 2, rel=0.01)
    assert done.stdout.count("| llama.cpp |") == 2


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe"])
def test_a_random_model_is_imported_exactly_and_runs(tmp_path: Path, name: str) -> None:
    bench_models.write_model(tmp_path / "tiny.gguf", bench_models.SHAPES[name])
    convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert isinstance(arrays, dict)
    experts = "mlp.switch_mlp" if name == "tiny-moe" else "mlp"
    pairs = {"blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj"} if name == "tiny-moe" else {}
    part = "ffn_down_exps" if name == "tiny-moe" else "ffn_down"
    pairs |= {f"blk.1.{part}.weight": f"model.layers.1.{experts}.down_proj"}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    for source, module in pairs.items():
        words, scales, biases = (arrays[f"{module}.{kind}"] for kind in ("weight", "scales", "biases"))
        found = np.array(mx.dequantize(words, scales, biases, group_size=32, bits=4))
        tensor = stored[source]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert found.shape == expected.shape
        assert np.array_equal(found, expected)
    model = load_model(tmp_path / "out")
    assert model.vocab_size == 512


def test_blocks_have_the_spread_that_keeps_activations_in_size() -> None:
    rng = np.random.default_rng(0)
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
        values = gguf.quants.dequantize(bench_models.random_tensor((256, 512), kind, rng), kind)
        assert values.std() == pytest.approx(512**-0.5, rel=0.1)
        assert abs(values.mean()) < 0.05 * values.std()
