"""Training runs: the figures are mlx-lm's, a run that stops goes on as if it had not, and what must not
change does not."""

from __future__ import annotations

import hashlib
import json
import math
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model as load_stock

from mlxserve.errors import UsageError
from mlxserve.text.chat_template import load_chat_template
from mlxserve.text.folder_tokenizer import load_tokenizer
from mlxserve.tuning import session, trainer
from mlxserve.tuning.batches import Batches
from mlxserve.tuning.dataset import load_dataset
from mlxserve.tuning.metrics import read_metrics
from mlxserve.tuning.session import data_request, load_training_model, prepare_model
from mlxserve.tuning.settings import TrainSettings, make_settings
from mlxserve.tuning.trainer import TrainingDivergedError
from tests.tuning import runs
from tests.tuning.runs import run

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "extra_config": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_model(tmp_path_factory.mktemp("model") / "float")


@pytest.fixture(scope="module")
def quantized(model: Path) -> Path:
    return runs.write_quantized(model.with_name("quantized"), model)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_rows(tmp_path_factory.mktemp("data"))


def content(folder: Path) -> str:
    hashed = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        hashed.update(file.name.encode() + file.read_bytes())
    return hashed.hexdigest()


# The same figures as mlx-lm.


def settings_of(data: Path, **settings: Any) -> TrainSettings:
    return make_settings(None, {**runs.DEFAULTS, "data": str(data), **settings})


def stock_run(
    folder: Path, settings: TrainSettings, steps: int
) -> tuple[list[float], dict[str, mx.array], dict[str, mx.array]]:
    """mlx-lm's layers, loss and optimizer on our batches, from our first ``lora_a``: each step's loss, the
    first gradients and the last weights."""
    tokenizer = load_tokenizer(folder)
    dataset = load_dataset(data_request(settings), tokenizer, load_chat_template(folder, tokenizer))
    batches = Batches(
        dataset.train, batch_size=settings.batch_size, max_length=settings.max_length, pack=False, seed=0
    )
    ours = load_training_model(folder)
    paths = prepare_model(ours, settings)
    keys = sorted({path.split(".layers.")[1].split(".", 1)[1] for path in paths})
    start = [(name, mx.array(value)) for name, value in tree_flatten(ours.module.trainable_parameters())]
    stock, _ = load_stock(folder)
    stock.freeze()
    config = {"rank": settings.rank, "scale": settings.scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(stock, len(stock.layers), config)
    stock.load_weights(start, strict=False)
    stock.train()
    optimizer = optimizers.AdamW(
        settings.learning_rate, weight_decay=settings.weight_decay, bias_correction=True
    )
    value_and_grad = nn.value_and_grad(stock, default_loss)
    losses: list[float] = []
    first: dict[str, mx.array] = {}
    for _ in range(steps):
        batch = batches.next()
        examples = [dataset.train[i] for i in batch.example_ids]
        width = max(len(example.token_ids) for example in examples)
        tokens = np.zeros((len(examples), width), np.int32)
        bounds = []
        for row, example in enumerate(examples):
            tokens[row, : len(example.token_ids)] = example.token_ids
            # mlx-lm counts position ``length`` too, which predicts padding.
            bounds.append((example.is_trained.index(True), len(example.token_ids) - 1))
        (loss, _), gradients = value_and_grad(stock, mx.array(tokens), mx.array(bounds))
        mx.eval(loss, gradients)
        losses.append(loss.item())
        first = first or dict(tree_flatten(gradients))
        optimizer.update(stock, gradients)
        mx.eval(stock.parameters(), optimizer.state)
    return losses, first, dict(tree_flatten(stock.trainable_parameters()))


def assert_close(found: dict[str, mx.array], wanted: dict[str, mx.array], limit: float) -> None:
    assert found.keys() == wanted.keys() and wanted
    scale = max(float(mx.max(mx.abs(value)).item()) for value in wanted.values())  # type: ignore[arg-type]
    for name, value in wanted.items():
        assert np.abs(np.array(found[name]) - np.array(value)).max() <= limit * scale, name


@pytest.mark.parametrize("kind", ["float", "quantized", "experts"])
@pytest.mark.parametrize("pack", [False, True])
def test_the_first_20_losses_are_those_of_mlx_lm(
    kind: str, pack: bool, model: Path, quantized: Path, data: Path, tmp_path: Path
) -> None:
    folder = {"float": model, "quantized": quantized}.get(kind) or runs.write_model(tmp_path / "moe", **MOE)
    targets = ["linear"]
    same: dict[str, Any] = {
        "targets": targets,
        "schedule": "constant",
        "learning_rate": 1e-3,
        "iters": 20,
        "pack": False,
    }
    if pack:
        # Packing orders examples otherwise: each batch of the whole data is the same in any order.
        same |= {"batch_size": 24, "iters": 3}
    losses, _, weights = stock_run(folder, settings_of(data, **same), same["iters"])
    watcher, _ = run(folder, data, tmp_path / "out", **(same | {"pack": pack, "clip": 1e9}))
    assert np.abs(np.array(watcher.losses) - np.array(losses)).max() <= 1e-3
    assert losses[-1] < losses[0]
    assert_close(runs.adapter(tmp_path / "out"), weights, 5e-3)


@pytest.mark.parametrize("kind", ["float", "quantized", "experts"])
def test_the_first_gradients_are_those_of_mlx_lm(
    kind: str, model: Path, quantized: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"float": model, "quantized": quantized}.get(kind) or runs.write_model(tmp_path / "moe", **MOE)
    settings = {"targets": ["linear"], "pack": False, "iters": 1, "clip": 1e9}
    _, wanted, _ = stock_run(folder, settings_of(data, **settings), 1)
    found: dict[str, mx.array] = {}
    norm = trainer._norm

    def spied(gradients: Any) -> mx.array:
        found.update(tree_flatten(gradients))
        return norm(gradients)

    monkeypatch.setattr(trainer, "_norm", spied)
    run(folder, data, tmp_path / "out", **settings)
    assert_close(found, wanted, 1e-3)


# A run that goes on.

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "accumulated": {"accumulate": 3, "pack": False},
    "packed": {"pack": True, "batch_size": 5},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
    "full": {"type": "full", "layers": 1},
    "dora": {"type": "dora", "dropout": 0.1, "warmup": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_interrupted_run_goes_on_exactly(variant: str, model: Path, data: Path, tmp_path: Path) -> None:
    settings = {"iters": 10, "eval_every": 4, **VARIANTS[variant]}
    whole, outcome = run(model, data, tmp_path / "whole", **settings)
    assert outcome.reason == "finished" and outcome.step == 10
    steps = 0

    def after_four() -> bool:
        nonlocal steps
        steps += 1
        return steps == 4

    part, outcome = run(model, data, tmp_path / "part", should_stop=after_four, **settings)
    assert (outcome.reason, outcome.step) == ("interrupted", 4)
    mx.random.seed(99)
    rest, outcome = run(model, data, tmp_path / "part", resume=tmp_path / "part", **settings)
    assert (outcome.reason, outcome.step) == ("finished", 10)
    assert [report.step for report in rest.steps] == list(range(5, 11))
    assert part.losses + rest.losses == whole.losses
    assert part.plan is not None and rest.plan is not None
    assert part.plan.num_trained_parameters == rest.plan.num_trained_parameters
    runs.assert_same_weights(runs.adapter(tmp_path / "part"), runs.adapter(tmp_path / "whole"))
    runs.assert_same_weights(runs.adapter(tmp_path / "part/best"), runs.adapter(tmp_path / "whole/best"))
    assert runs.step_losses(tmp_path / "part") == runs.step_losses(tmp_path / "whole")


def flags(data: Path, output: Path, **settings: Any) -> list[str]:
    values: dict[str, Any] = {
        **runs.DEFAULTS,
        "data": data,
        "output": output,
        "report_every": 1,
        **settings,
    }
    values.pop("targets")
    found = ["--target", "q_proj", "--target", "v_proj"]
    for name, value in values.items():
        found += [f"--{name.replace('_', '-')}", str(value)]
    return found


def test_a_killed_run_goes_on_exactly(model: Path, data: Path, tmp_path: Path) -> None:
    settings = {"iters": 60, "save_every": 3, "dropout": 0.1, "learning_rate": 1e-3}
    arguments = flags(data, tmp_path / "run", **settings)
    process = runs.start("lora", "train", model, *arguments)
    runs.wait_for_step(process, 8)
    process.kill()
    process.communicate(timeout=runs.DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    before = runs.step_losses(tmp_path / "run")
    assert 8 <= max(before) < 60
    step = json.loads((tmp_path / "run/state/progress.json").read_text())["progress"]["step"]
    assert step >= 6 and step % 3 == 0
    resumed = runs.start("lora", "train", model, *arguments, "--resume", tmp_path / "run", "--json")
    out, err = resumed.communicate(timeout=runs.DEADLINE_S)
    assert resumed.returncode == 0, err
    assert f"Going on after step {step}\n" in err
    assert json.loads(out)["step"] == 60
    whole, _ = run(model, data, tmp_path / "whole", **settings)
    after = runs.step_losses(tmp_path / "run")
    assert list(after) == list(range(1, 61))
    for number, loss in enumerate(whole.losses, start=1):
        assert abs(after[number] - loss) <= 1e-4
        assert number not in before or abs(before[number] - loss) <= 1e-4
    runs.assert_same_weights(runs.adapter(tmp_path / "run"), runs.adapter(tmp_path / "whole"))


def test_ctrl_c_saves_and_says_how_to_go_on(model: Path, data: Path, tmp_path: Path) -> None:
    process = runs.start("lora", "train", model, *flags(data, tmp_path / "run", iters=100_000))
    runs.wait_for_step(process, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=runs.DEADLINE_S)
    assert process.returncode == 130, err
    last = max(runs.step_losses(tmp_path / "run"))
    assert out.startswith(f"Interrupted at step {last}, loss ")
    assert f"--resume {tmp_path / 'run'}\n" in out and "Traceback" not in err
    assert json.loads((tmp_path / "run/state/progress.json").read_text())["progress"]["step"] == last


def test_a_finished_run_goes_on_for_more_steps(model: Path, data: Path, tmp_path: Path) -> None:
    first, _ = run(model, data, tmp_path / "run", iters=20)
    kept = content(tmp_path / "run/state")
    more, outcome = run(model, data, tmp_path / "more", resume=tmp_path / "run", iters=10)
    assert [report.step for report in more.steps] == list(range(21, 31)) and outcome.step == 30
    assert content(tmp_path / "run/state") == kept
    assert more.losses[0] < first.losses[0]
    # Its schedule begins anew.
    assert more.steps[0].learning_rate == 1e-2
    assert max(report.learning_rate for report in more.steps) == 1e-2
    _, outcome = run(model, data, tmp_path / "more", resume=tmp_path / "more", iters=5)
    assert outcome.step == 35


def test_the_best_goes_along_to_another_folder(model: Path, data: Path, tmp_path: Path) -> None:
    _, first = run(model, data, tmp_path / "run", iters=8, eval_every=4)
    # So that no evaluation is better any more.
    settings = {"iters": 2, "eval_every": 1}
    progress = tmp_path / "run/state/progress.json"
    value = json.loads(progress.read_text())
    value["progress"]["best_loss"] = 1e-6
    progress.write_text(json.dumps(value))
    _, outcome = run(model, data, tmp_path / "more", resume=tmp_path / "run", **settings)
    assert outcome.best_step == first.best_step
    runs.assert_same_weights(runs.adapter(tmp_path / "more/best"), runs.adapter(tmp_path / "run/best"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rank": 16}, "rank 4, it cannot go on with 16"),
    ({"layers": 1}, "layers None, it cannot go on with 1"),
    ({"targets": ["q_proj"]}, r"targets \['q_proj', 'v_proj'\], it cannot go on with \['q_proj'\]"),
    ({"seed": 1}, "seed 0, it cannot go on with 1"),
    ({"batch_size": 2}, "batch_size 3, it cannot go on with 2"),
    ({"learning_rate": 1e-3}, "learning_rate 0.01, it cannot go on with 0.001"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_other_settings_are_refused_with_nothing_changed(
    change: dict[str, Any], message: str, model: Path, data: Path, tmp_path: Path
) -> None:
    run(model, data, tmp_path / "run")
    before = content_of_run(tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        run(model, data, tmp_path / "run", resume=tmp_path / "run", **change)
    assert content_of_run(tmp_path / "run") == before


def content_of_run(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_other_data_is_refused_with_nothing_changed(model: Path, data: Path, tmp_path: Path) -> None:
    mine = runs.write_rows(tmp_path / "data")
    stops = iter([False, False, True])
    run(model, mine, tmp_path / "run", should_stop=lambda: next(stops), save_every=1)
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 99, "loss": 1.0}\n')
    before = content_of_run(tmp_path / "run")
    rows = (mine / "train.jsonl").read_text().splitlines()
    (mine / "train.jsonl").write_text("\n".join([rows[1], rows[0], *rows[2:]]) + "\n")
    with pytest.raises(UsageError, match="not the data"):
        run(model, mine, tmp_path / "run", resume=tmp_path / "run")
    assert content_of_run(tmp_path / "run") == before


def test_a_new_run_does_not_overwrite_one(model: Path, data: Path, tmp_path: Path) -> None:
    run(model, data, tmp_path / "run", iters=1)
    before = content_of_run(tmp_path / "run")
    with pytest.raises(UsageError, match="holds a run already"):
        run(model, data, tmp_path / "run", iters=1)
    run(model, data, tmp_path / "other", iters=1)
    with pytest.raises(UsageError, match="holds another run"):
        run(model, data, tmp_path / "run", resume=tmp_path / "other", iters=1)
    assert content_of_run(tmp_path / "run") == before


# What the steps are.


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.2, "type": "dora"}, {"accumulate": 2}])
def test_recomputed_activations_change_no_loss(
    settings: dict[str, Any], quantized: Path, data: Path, tmp_path: Path
) -> None:
    found = []
    for choice in ("off", "on"):
        watcher, _ = run(quantized, data, tmp_path / choice, grad_checkpoint=choice, **settings)
        assert watcher.plan is not None and watcher.plan.recomputes == (choice == "on")
        found.append(watcher.losses)
    assert np.abs(np.array(found[0]) - np.array(found[1])).max() <= 1e-5


def test_accumulated_steps_are_those_of_larger_batches(model: Path, data: Path, tmp_path: Path) -> None:
    large, _ = run(model, data, tmp_path / "large", batch_size=6, accumulate=1)
    small, _ = run(model, data, tmp_path / "small", batch_size=3, accumulate=2)
    assert np.abs(np.array(large.losses) - np.array(small.losses)).max() <= 1e-4
    assert [report.num_trained for report in large.steps] == [report.num_trained for report in small.steps]


def test_the_seed_decides_everything(model: Path, data: Path, tmp_path: Path) -> None:
    settings = {"dropout": 0.1, "iters": 3}
    first, _ = run(model, data, tmp_path / "a", seed=0, **settings)
    mx.random.uniform()
    second, _ = run(model, data, tmp_path / "b", seed=0, **settings)
    third, _ = run(model, data, tmp_path / "c", seed=1, **settings)
    assert first.losses == second.losses != third.losses


def test_an_early_stop_keeps_the_best(model: Path, data: Path, tmp_path: Path) -> None:
    settings = {"iters": 60, "eval_every": 2, "patience": 2, "learning_rate": 0.3, "schedule": "constant"}
    watcher, outcome = run(model, data, tmp_path / "run", **settings)
    assert outcome.reason == "early" and outcome.step < 60
    losses = {report.step: report.loss for report in watcher.evals}
    assert outcome.best_loss == min(losses.values()) == losses[outcome.best_step or 0]
    assert outcome.best_step == outcome.step - 4
    best, newest = runs.adapter(tmp_path / "run/best"), runs.adapter(tmp_path / "run")
    assert any(not np.array_equal(np.array(best[name]), np.array(newest[name])) for name in best)
    config = json.loads((tmp_path / "run/best/adapter_config.json").read_text())
    assert config == json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert "early" in (tmp_path / "run/report.html").read_text()


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_save(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"save_every": 2, "iters": 6}
    loss = session.TrainingModel.loss
    calls = 0

    def broken(self: Any, module: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        summed, weights = loss(self, module, batch)
        return (summed * mx.array(math.nan), weights) if calls > 4 else (summed, weights)

    monkeypatch.setattr(session.TrainingModel, "loss", broken)
    with pytest.raises(TrainingDivergedError, match=r"the loss is nan at step 5: lower the learning rate"):
        run(model, data, tmp_path / "run", **settings)
    assert all(mx.all(mx.isfinite(value)).item() for value in runs.adapter(tmp_path / "run").values())
    assert json.loads((tmp_path / "run/state/progress.json").read_text())["progress"]["step"] == 4


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_base_does_not_change_by_one_bit(
    kind: str, quantized: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    load = session.load_training_model

    def kept(folder: Path) -> Any:
        loaded.append(load(folder))
        return loaded[-1]

    monkeypatch.setattr(session, "load_training_model", kept)
    before = content(quantized)
    run(quantized, data, tmp_path / "run", type=kind, grad_checkpoint="on")
    assert content(quantized) == before
    found = {
        name.replace(".linear.", "."): value for name, value in tree_flatten(loaded[0].module.parameters())
    }
    stock, _ = load_stock(quantized)
    for name, value in tree_flatten(stock.parameters()):
        assert np.array_equal(np.array(found[name]), np.array(value)), name


def test_full_weights_train_on_a_float_base_alone(
    model: Path, quantized: Path, data: Path, tmp_path: Path
) -> None:
    watcher, _ = run(model, data, tmp_path / "run", type="full", iters=12)
    assert watcher.losses[-1] < watcher.losses[0]
    assert watcher.plan is not None and watcher.plan.num_trained_parameters == 2 * (64 * 64 + 32 * 64)
    stock, _ = load_stock(model)
    load_adapters(stock, str(tmp_path / "run"))
    with pytest.raises(UsageError, match="which is quantized: dequantize the model first"):
        run(quantized, data, tmp_path / "no", type="full")
    assert not (tmp_path / "no").exists()


def test_an_unknown_target_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"target 'q_projj' matches no layer .* did you mean 'q_proj'"):
        run(model, data, tmp_path / "no", targets=["q_projj"])
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_mlx_lm_loads_what_was_trained(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    """And predicts what training predicted at its end."""
    settings = {"type": kind, "targets": ["linear"], "layers": 1, "iters": 8, "eval_every": 8}
    watcher, _ = run(model, data, tmp_path / "run", **settings)
    stock, _ = load_stock(model)
    load_adapters(stock, str(tmp_path / "run"))
    made = settings_of(data, **settings)
    tokenizer = load_tokenizer(model)
    dataset = load_dataset(data_request(made), tokenizer, load_chat_template(model, tokenizer))
    total, count = 0.0, 0
    for example in dataset.valid:
        logits = stock(mx.array([example.token_ids[:-1]]))[0]
        losses = nn.losses.cross_entropy(logits, mx.array(example.token_ids[1:]))
        trained = mx.array(example.is_trained[1:])
        total += float(mx.sum(losses * trained).item())  # type: ignore[arg-type]
        count += sum(example.is_trained[1:])
    assert abs(total / count - watcher.evals[-1].loss) <= 1e-3
    assert {name.split(".")[2] for name in runs.adapter(tmp_path / "run")} == {"1"}


def test_experts_train_alone(data: Path, tmp_path: Path) -> None:
    folder = runs.write_model(tmp_path / "moe", **MOE)
    watcher, _ = run(folder, data, tmp_path / "run", targets=["experts"], iters=15)
    assert watcher.losses[-1] < watcher.losses[0]
    assert all(".switch_mlp." in name for name in runs.adapter(tmp_path / "run"))
    stock, _ = load_stock(folder)
    load_adapters(stock, str(tmp_path / "run"))


def test_samples_and_report(model: Path, data: Path, tmp_path: Path) -> None:
    watcher, _ = run(model, data, tmp_path / "run", prompts=("hello", "bye"), eval_every=3)
    assert [(step, prompt) for step, prompt, _ in watcher.samples] == [
        (0, "hello"),
        (0, "bye"),
        (6, "hello"),
        (6, "bye"),
    ]
    kinds = [line["kind"] for line in read_metrics(tmp_path / "run")]
    assert {kind: kinds.count(kind) for kind in kinds} == {"sample": 4, "step": 6, "eval": 2}
    assert "after 6 steps" in (tmp_path / "run/report.html").read_text()
