"""The comparison of a result with its source, and the card that tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import yaml

from mlxserve.errors import ConversionError
from mlxserve_convert import ConvertOptions, ConvertReport, check, convert
from mlxserve_convert.check import KL_BOUNDS, kl_bound
from mlxserve_convert.options import PlannedTensor
from tests.convert.checkpoints import LLAMA, random_weights, reference_model, write_folder, write_gguf

MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MAMBA = {
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
    "tie_word_embeddings": False,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", LLAMA, random_weights(LLAMA))


def run(source: Path, output: Path, **options: Any) -> ConvertReport:
    return convert(source, output, ConvertOptions(**options))


def test_fewer_bits_are_farther_from_the_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [run(source, tmp_path / f"out{bits}", bits=bits) for bits in (8, 5, 3)]
    proofs = [report.proof for report in reports]
    assert all(proof is not None and proof.is_good for proof in proofs)
    divergences = [proof.divergence for proof in proofs]
    assert divergences[0].mean_kl < divergences[1].mean_kl < divergences[2].mean_kl
    assert divergences[0].mean_kl > 0
    assert [proof.bound for proof in proofs] == [None] * 3
    monkeypatch.setattr(check, "_CHANCE", 0)
    judged = run(source, tmp_path / "judged", bits=8).proof
    assert (judged.bound, judged.divergence) == (0.05, divergences[0])
    assert len({round(divergence.perplexity_a, 3) for divergence in divergences}) == 1
    assert f"KL {divergences[0].mean_kl:.5f} nats a token" in reports[0].verified


def test_the_source_is_scored_by_its_own_weights(source: Path, tmp_path: Path) -> None:
    """The source's perplexity is that of its float32 weights in plain mlx-lm."""
    from mlxserve.text.tokenizer import load_tokenizer
    from tests.convert.checkpoints import logits

    proof = run(source, tmp_path / "out", bits=4).proof
    assert proof is not None
    windows = check._windows(tmp_path / "out", 256, 320)
    assert load_tokenizer(source).vocab_size <= 320
    model = reference_model(LLAMA, random_weights(LLAMA))
    found = []
    for window in windows:
        rows = logits(model, list(window.token_ids))[0].astype(np.float64)[window.first_row :]
        rows -= rows.max(-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        found.append(rows[np.arange(len(window.targets)), list(window.targets)])
    expected = np.exp(-np.concatenate(found).mean())
    assert proof.divergence.perplexity_a == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("config", [MOE, MAMBA], ids=["experts", "recurrent"])
def test_experts_and_what_the_engine_does_not_serve_are_compared(config: dict, tmp_path: Path) -> None:
    weights = random_weights(config)
    if config is MAMBA:
        weights = {name: values * 0.3 for name, values in weights.items()}
    source = write_folder(tmp_path / "source", config, weights)
    proof = run(source, tmp_path / "out", bits=8).proof
    assert proof is not None
    assert 0 < proof.divergence.mean_kl < 0.1


def test_a_bad_result_is_an_error_unless_forced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Random weights know no text: judge them all the same.
    monkeypatch.setattr(check, "_CHANCE", 0)
    real = check._source_scorer

    def other(plan: Any, path: Path) -> Any:
        weights = random_weights(LLAMA, seed=7)
        for target in plan.targets:
            target.weight.value = lambda name=target.name: check.mx.array(weights[name])
        return real(plan, path)

    monkeypatch.setattr(check, "_source_scorer", other)
    with pytest.raises(ConversionError, match=r"too far .* nothing was kept: perplexity .* KL "):
        run(source, tmp_path / "out", bits=8)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    report = run(source, tmp_path / "out", bits=8, check="force")
    assert report.proof is not None
    assert not report.proof.is_good
    assert "kept although it is too far" in report.verified
    assert "beyond the bound" in (tmp_path / "out" / "README.md").read_text()


def test_what_does_not_fit_is_not_compared_and_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_BASE_BYTES", 1 << 40)
    report = run(source, tmp_path / "out", memory_limit=1 << 30)
    assert report.proof is None
    assert "not compared with the source: that takes 1099.5 GB, --memory-limit is 1.1 GB" in report.verified
    report = run(source, tmp_path / "free")
    assert "half of the free memory is" in report.verified
    assert "not compared" in (tmp_path / "free" / "README.md").read_text()


def test_switched_off_and_exact_results_are_not_compared(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out", check="never")
    assert (report.proof, report.verified) == (None, "not checked: switched off")
    write_gguf(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA), gguf.GGMLQuantizationType.Q8_0)
    exact = run(tmp_path / "m.gguf", tmp_path / "exact")
    assert exact.proof is None
    assert "every tensor is exact" in exact.verified


def test_a_folder_without_a_tokenizer_is_not_compared(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").unlink()
    assert "there is no tokenizer.json" in run(source, tmp_path / "out").verified


@pytest.mark.parametrize(
    ("bits", "bound"), [(None, 0.02), (8, 0.05), (6, 0.1), (5, 0.3), (4, 1.0), (3, 4.0), (2, 6.0)]
)
def test_the_bound_depends_on_the_mean_bits(bits: int | None, bound: float) -> None:
    def tensor(own: int | None, rows: int) -> PlannedTensor:
        return PlannedTensor("x", (rows, 64), "f32", "float32", None, own, 64, 0, True, False)

    assert kl_bound([tensor(bits, 100)]) == bound
    assert bound in [accepted for _, accepted in KL_BOUNDS]
    # One small head with more bits changes little, a large one raises the mean.
    assert kl_bound([tensor(4, 1000), tensor(8, 10)]) == 1.0
    assert kl_bound([tensor(4, 100), tensor(8, 100)]) == 0.1


def front_matter(folder: Path) -> dict[str, Any]:
    _, matter, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(matter)


def test_the_card_keeps_the_licence_and_tells_what_was_done(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: some-terms\nlicense_link: https://example.org/terms\n"
        "language:\n- en\n- de\nbase_model: maker/original\ntags: [chat]\n---\n# Original\nIts own words.\n"
    )
    report = run(source, tmp_path / "out", bits=4, group_size=32)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Its own words" not in text
    assert front_matter(tmp_path / "out") == {
        "license": "other",
        "license_name": "some-terms",
        "license_link": "https://example.org/terms",
        "language": ["en", "de"],
        "base_model": "maker/original",
        "base_model_relation": "quantized",
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "mlxserve", "chat"],
    }
    assert report.proof is not None
    for expected in (
        "bits 4, group size 32",
        f"{report.bits_per_weight:.3f}",
        "affine 4-bit group 32: 14",
        f"{report.proof.divergence.perplexity_b:.3f}",
        f"{report.proof.divergence.mean_kl:.5f} (no bound",
        "mlxserve serve path/to",
        "mlx_lm.generate --model path/to",
    ):
        assert expected in text, expected


def test_a_damaged_card_is_no_obstacle(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("---\nlicense: [unclosed\n---\ntext")
    run(source, tmp_path / "out")
    assert front_matter(tmp_path / "out")["library_name"] == "mlx"


def test_the_base_model_comes_from_the_hubs_cache_or_a_gguf(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--maker--Some-Model" / "snapshots" / "abc"
    run(write_folder(snapshot, LLAMA, random_weights(LLAMA)), tmp_path / "out")
    assert front_matter(tmp_path / "out")["base_model"] == "maker/Some-Model"
    metadata = {
        "general.license": "apache-2.0",
        "general.base_model.0.repo_url": "https://huggingface.co/maker/base",
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, random_weights(LLAMA), gguf.GGMLQuantizationType.Q8_0, metadata=metadata)
    run(path, tmp_path / "imported")
    matter = front_matter(tmp_path / "imported")
    assert (matter["license"], matter["base_model"]) == ("apache-2.0", "maker/base")
