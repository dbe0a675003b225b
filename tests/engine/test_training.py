"""Loss and gradients of models on our training kernels equal those of mlx-lm in float32."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model as load_stock

from mlxserve.errors import UnsupportedModelError
from mlxserve.models.loader import load_model
from mlxserve.models.training import TrainingModel, checkpoint_blocks, train_on_kernels
from mlxserve.models.training_layers import TrainingDropout
from mlxserve_kernels import ops
from tests.engine.test_fused import FAMILIES, tiny

Gradients = dict[str, mx.array]


@pytest.fixture(autouse=True)
def cpu_kernels() -> None:
    mx.random.seed(11)
    if ops.implementation() == "reference":
        pytest.skip("the C++ extension is not in use")


def batch(rows: int = 2, length: int = 23, vocab: int = 90) -> tuple[mx.array, mx.array, mx.array]:
    tokens = mx.random.randint(1, vocab, (rows, length + 1)).astype(mx.int32)
    weights = (mx.random.uniform(shape=(rows, length)) > 0.3).astype(mx.float32)
    return tokens[:, :-1], tokens[:, 1:], weights


def stock_loss(module: nn.Module) -> Callable[..., mx.array]:
    """As mlx-lm's trainer has it, but the sum."""

    def loss(tokens: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        logits = module(tokens)
        return (nn.losses.cross_entropy(logits, targets) * weights).sum()

    return loss


def value_and_gradients(
    module: nn.Module, loss: Callable[..., mx.array], *args: Any
) -> tuple[float, Gradients]:
    value, gradients = nn.value_and_grad(module, loss)(*args)
    mx.eval(value, gradients)
    return value.item(), dict(tree_flatten(gradients))


def assert_same(got: tuple[float, Gradients], want: tuple[float, Gradients], limit: float = 1e-4) -> None:
    assert abs(got[0] - want[0]) <= limit * abs(want[0])
    assert got[1].keys() == want[1].keys() and want[1]
    largest = max(mx.max(mx.abs(each)).item() for each in want[1].values())
    assert largest > 0
    for name, gradient in want[1].items():
        a, b = np.array(got[1][name]), np.array(gradient)
        # A layer whose gradient is nothing beside the others' has rounding alone.
        scale = max(np.abs(b).max(), 1e-3 * largest)
        assert np.abs(a - b).max() <= limit * scale, (name, np.abs(a - b).max(), scale)


def with_adapters(module: nn.Module, *, dora: bool = False, dropout: float = 0.0, **config: Any) -> None:
    module.freeze()
    settings = {"rank": 4, "scale": 3.0, "dropout": dropout, **config}
    linear_to_lora_layers(module, 2, settings, use_dora=dora)
    for path, layer in module.named_modules():
        if "lora_b" in layer:
            # From 0 nothing would reach lora_a.
            layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(len(path)))
    mx.eval(module.parameters())


def stock(folder: Path, family: str, **options: Any) -> nn.Module:
    module, _ = load_stock(tiny(folder, family, **options), strict=True)
    module.update(
        tree_map(
            lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, module.parameters()
        )
    )
    mx.eval(module.parameters())
    return module


def both(
    module: nn.Module, *, args: tuple[mx.array, ...]
) -> tuple[TrainingModel, tuple[float, Gradients], tuple[float, Gradients]]:
    want = value_and_gradients(module, stock_loss(module), *args)
    model = train_on_kernels(module)
    return model, value_and_gradients(module, model.loss, *args), want


@pytest.mark.parametrize("family", [*FAMILIES, "gemma"])
def test_adapters_of_every_family(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "gemma", {})
    module = stock(tmp_path / family, family)
    with_adapters(module)
    with caplog.at_level(logging.WARNING, "mlxserve.models.training"):
        model, got, want = both(module, args=batch())
    assert_same(got, want)
    assert model.has_fused_head and model.can_pack and not caplog.records


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_quantized_bases(family: str, mode: str, tmp_path: Path) -> None:
    module = stock(tmp_path / family, family, bits=4, mode=mode)
    with_adapters(module)
    _, got, want = both(module, args=batch())
    assert_same(got, want)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "granite", "olmo2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_all_parameters(family: str, is_tied: bool, tmp_path: Path) -> None:
    """Embedding, norms and head train as well."""
    module = stock(tmp_path / family, family, tied=is_tied)
    _, got, want = both(module, args=batch())
    assert_same(got, want)


def test_experts_train_whole(tmp_path: Path) -> None:
    module = stock(tmp_path / "moe", "mixtral")
    module.freeze()
    for _, layer in module.named_modules():
        if type(layer).__name__ == "SwitchLinear":
            layer.unfreeze()
    _, got, want = both(module, args=batch())
    assert_same(got, want)


@pytest.mark.parametrize("bits", [None, 8])
def test_dora(bits: int | None, tmp_path: Path) -> None:
    module = stock(tmp_path / "llama", "llama-biased", bits=bits)
    with_adapters(module, dora=True)
    _, got, want = both(module, args=batch())
    assert_same(got, want)


def test_adapters_of_embedding_and_head(tmp_path: Path) -> None:
    """Heads with an adapter have their logits made some rows at a time."""
    keys = {"self_attn.q_proj", "model.embed_tokens", "lm_head"}
    for name, is_tied in (("tied", True), ("own", False)):
        module = stock(tmp_path / name, "llama", tied=is_tied)
        with_adapters(module, keys=keys)
        model, got, want = both(module, args=batch(rows=3, length=100))
        assert_same(got, want)
        assert not model.has_fused_head


def test_dropout_is_the_same_when_blocks_are_computed_again(tmp_path: Path) -> None:
    module = stock(tmp_path / "llama", "llama")
    with_adapters(module, dropout=0.5)
    model = train_on_kernels(module)
    args = batch()
    without = value_and_gradients(module, model.loss, *args)
    module.train()

    def drawn(seed: int) -> tuple[float, Gradients]:
        mx.random.seed(seed)
        return value_and_gradients(module, model.loss, *args)

    plain, other = drawn(5), drawn(6)
    assert len({plain[0], other[0], without[0]}) == 3
    checkpoint_blocks(module)
    assert_same(drawn(5), plain)


def test_dropout_keeps_the_mean() -> None:
    layer = TrainingDropout(0.25)
    for key in (None, mx.random.key(1)):
        object.__setattr__(layer, "key", key)
        found = np.array(layer(mx.ones((100, 100))))
        assert set(np.unique(found).tolist()) == {0.0, float(np.float32(1 / 0.75))}
        assert abs(found.mean() - 1) < 0.05
    layer.eval()
    assert mx.all(layer(mx.ones(10)) == 1).item()


@pytest.mark.parametrize("family", ["llama", "llama-windowed", "gemma2"])
def test_packed_rows_are_those_alone(family: str, tmp_path: Path) -> None:
    module = stock(tmp_path / family, family)
    with_adapters(module)
    model = train_on_kernels(module)
    parts = [batch(1, length) for length in (9, 14, 6)]
    want_value, want = 0.0, {}
    for part in parts:
        value, gradients = value_and_gradients(module, model.loss, *part)
        want_value += value
        want = {name: each + want.get(name, 0) for name, each in gradients.items()}
    joined = [mx.concatenate(each, axis=1) for each in zip(*parts, strict=True)]
    segments = mx.array([[0] * 9 + [1] * 14 + [2] * 6], dtype=mx.int32)
    assert_same(value_and_gradients(module, model.loss, *joined, segments), (want_value, want))


def test_checkpointed_and_compiled(tmp_path: Path) -> None:
    module = stock(tmp_path / "llama", "llama", bits=4)
    with_adapters(module)
    args = batch()
    model, got, want = both(module, args=args)
    assert_same(got, want)

    loss_and_grad = nn.value_and_grad(module, model.loss)
    step = mx.compile(loss_and_grad, inputs=module.state, outputs=module.state)
    value, gradients = step(*args)
    assert_same((value.item(), dict(tree_flatten(gradients))), want)
    checkpoint_blocks(module)
    assert_same(value_and_gradients(module, model.loss, *args), want)


def test_what_serving_has_loaded(tmp_path: Path) -> None:
    """A model in tiles, fused and on pages, trains as well."""
    folder = tiny(tmp_path / "moe", "qwen3_moe", bits=4)
    plain, _ = load_stock(folder, strict=True)
    module = load_model(folder).module
    for each in (plain, module):
        each.set_dtype(mx.float32)
        with_adapters(each, keys={"self_attn.q_proj", "mlp.down_proj"})
    args = batch()
    want = value_and_gradients(plain, stock_loss(plain), *args)
    for (_, left), (_, right) in zip(plain.named_modules(), module.named_modules(), strict=True):
        if "lora_a" in left:
            right.lora_a = left.lora_a
    model = train_on_kernels(module)
    assert_same(value_and_gradients(module, model.loss, *args), want, limit=1e-3)


def test_evaluation_needs_no_gradient(tmp_path: Path) -> None:
    model = train_on_kernels(stock(tmp_path / "llama", "llama"))
    args = batch()
    assert abs(model.loss(*args).item() - model.loss(*args, with_gradient=False).item()) < 1e-2


def test_unknown_masks_and_heads_stay_mlx_lms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that looks at its mask, and one that changes its logits, train by their own code."""
    module = stock(tmp_path / "llama", "llama")
    with_adapters(module)
    kind = type(module.layers[0])
    plain = kind.__call__

    def looking(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return plain(self, x, "causal" if mask == "causal" else mask + 0, cache)

    monkeypatch.setattr(kind, "__call__", looking)
    model_call = type(module).__call__
    monkeypatch.setattr(type(module), "__call__", lambda self, *a: mx.tanh(model_call(self, *a)))
    with caplog.at_level(logging.WARNING, "mlxserve.models.training"):
        model, got, want = both(module, args=batch())
    assert_same(got, want)
    assert not model.can_pack and not model.has_fused_head and len(caplog.records) == 2
    with pytest.raises(UnsupportedModelError, match="cannot train on packed rows"):
        model.loss(*batch(), mx.zeros((2, 23), dtype=mx.int32))
