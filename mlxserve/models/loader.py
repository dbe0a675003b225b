"""Load a model folder: an mlx-lm architecture, on our kernels, with paged attention, checked.

Everything here runs on the engine thread: lazy arrays belong to the thread that made them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.errors import MlxserveError, ModelLoadError, UnsupportedModelError
from mlxserve.json_file import read_json_object
from mlxserve.models import kernel_choice
from mlxserve.models.architectures import config_fields
from mlxserve.models.experts import is_quantized_switch_linear, is_switch_linear
from mlxserve.models.fused import fuse_blocks, unfuse_blocks
from mlxserve.models.layers import (
    KernelEmbedding,
    KernelLinear,
    KernelQuantizedEmbedding,
    KernelQuantizedLinear,
    tile_weights,
    use_kernels,
)
from mlxserve.models.paged import (
    LayerSpec,
    ModelPages,
    PagedCaches,
    PagedMetadata,
    bind_attention,
    select_rows_before_head,
)
from mlxserve.models.rope_config import settle_rope
from mlxserve.models.safetensors_file import read_tensors
from mlxserve.models.stacked import StackedModel, stacked_model
from mlxserve.models.tied_head import settle_tie
from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import exact_products, reads_quantized, selection, use, using

logger = logging.getLogger(__name__)

_PROBE_IDS = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5)
"""Ids that every vocabulary has; several different ones, so that a lost position shows."""
_PROBE_CHUNKS = (5, 1, 3, 1)
_PROBE_PAGE = 8
"""The smallest page that all kernels read."""
_PROBE_COLUMNS = 40
"""Of block tables: so wide that Metal's attention takes the way of long contexts."""
_TOLERANCE = {mx.float32: 2e-3, mx.float16: 5e-2, mx.bfloat16: 2e-1}
"""Largest difference of logits, relative to their largest, between our path and mlx-lm's own."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An evaluated model whose attention reads pages where its caches are ``PagedCaches``."""

    module: nn.Module
    config: dict[str, Any]
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    weight_bytes: int
    num_fused_layers: int
    stacked: StackedModel | None = None

    def logits(
        self,
        token_ids: mx.array,
        pages: ModelPages,
        metadata: PagedMetadata,
        sampled_rows: mx.array | None,
    ) -> mx.array:
        """Logits [R, V] of the sampled rows (None: all) of a flat batch of T tokens, by the shortest way."""
        if self.stacked is not None:
            return self.stacked(token_ids, pages, metadata, sampled_rows)
        return self.forward(token_ids, PagedCaches(pages, metadata, sampled_rows))

    def forward(self, token_ids: mx.array, caches: PagedCaches) -> mx.array:
        """The same by mlx-lm's own code around whatever blocks are fused."""
        logits: mx.array = self.module(token_ids[:, None], caches)
        rows = caches.sampled_rows
        if rows is not None and logits.shape[0] != rows.size:
            logits = logits[rows]
        return logits.squeeze(1)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ModelLoadError naming what is wrong."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} is not a model folder: it has no config.json")
    config = read_json_object(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path} has no model_type")
    return config


def context_length(config: dict[str, Any]) -> int | None:
    """The trained context window that a config states; None when it states none."""
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def load_model(folder: Path, *, fuse: bool = True) -> LoadedModel:
    """Load, put on our kernels, evaluate and check a model. Without ``fuse``, its blocks stay mlx-lm's.

    Raises ModelLoadError for a damaged folder and UnsupportedModelError, with the model_type, for an
    architecture that our paged path does not compute right.
    """
    config = read_config(folder)
    read_tensors(folder)
    return load_built(lambda: _build(folder, config), config, fuse=fuse)


Build = Callable[[], nn.Module]
"""Makes an mlx-lm model with its weights, evaluated or not."""


def load_built(build: Build, config: dict[str, Any], *, fuse: bool = True) -> LoadedModel:
    """``load_model`` for a model that does not come from a folder. ``build`` may be called twice."""
    kernel_choice.settle()
    try:
        return _load(build, config, fuse=fuse)
    except UnsupportedModelError as error:
        return _load_without_metal(build, config, fuse=fuse, error=error)


def load_module(folder: Path) -> nn.Module:
    """An mlx-lm model in plain layers, evaluated, for training: activations are float32 on the CPU, with
    Metal of the model's own dtype. Raises ModelLoadError or UnsupportedModelError."""
    config = read_config(folder)
    read_tensors(folder)
    kernel_choice.settle()
    return _on_kernels(lambda: _build(folder, config), _evaluate_untiled)


def load_plain(folder: Path) -> nn.Module:
    """The model on our kernels but mlx-lm's own caches, for what ``load_model`` does not support.
    Raises ModelLoadError."""
    config = read_config(folder)
    read_tensors(folder)
    return plain_built(lambda: _build(folder, config))


def plain_built(build: Build) -> nn.Module:
    """``load_plain`` for a model that does not come from a folder."""
    kernel_choice.settle()
    return _on_kernels(build)


def _on_kernels(build: Build, evaluate: Callable[[nn.Module, mx.Dtype], None] | None = None) -> nn.Module:
    module = build()
    dtype = _activation_dtype(module)
    use_kernels(module, dtype)
    (evaluate or _evaluate_by_layer)(module, dtype)
    return module


def _evaluate_untiled(module: nn.Module, dtype: mx.Dtype) -> None:
    """Read the weights in plain layers, which have gradients."""
    for _, layer in module.named_modules():
        _convert_parameters(layer, dtype)
    mx.eval(module.parameters())


def _load(build: Build, config: dict[str, Any], *, fuse: bool) -> LoadedModel:
    module = _on_kernels(build)
    try:
        with exact_products():
            return _checked(module, config, fuse=fuse)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"model_type {config['model_type']!r} is not served yet: {error}"
        ) from None


def _load_without_metal(
    build: Build, config: dict[str, Any], *, fuse: bool, error: UnsupportedModelError
) -> LoadedModel:
    """The model without our Metal kernels, if it is these that it does not run with. The process then goes
    on without them."""
    chosen = selection()
    if chosen.name != "metal" or not chosen.proven:
        raise error
    without = replace(chosen, proven=frozenset())
    with using(without):
        loaded = _load(build, config, fuse=fuse)
    logger.warning("The Metal kernels are not used, MLX's own operations are: %s", error)
    use(without)
    return loaded


def _checked(module: nn.Module, config: dict[str, Any], *, fuse: bool) -> LoadedModel:
    """The model on pages, compared with mlx-lm's own path."""
    windows = _cache_windows(module)
    layers, expected = _probe_plain(module, windows)
    bind_attention(module)
    select_rows_before_head(module)
    weight_bytes = sum(array.nbytes for _, array in tree_flatten(module.parameters()))
    num_fused = fuse_blocks(module, layers) if fuse else 0
    stacked = stacked_model(module) if num_fused else None
    loaded = LoadedModel(module, config, layers, expected.shape[-1], weight_bytes, num_fused, stacked)
    try:
        _check_paged(loaded, expected)
    except UnsupportedModelError as error:
        if not num_fused:
            raise
        logger.warning("model_type %r runs unfused: %s", config["model_type"], error)
        unfuse_blocks(module)
        loaded = replace(loaded, num_fused_layers=0, stacked=None)
        _check_paged(loaded, expected)
    return loaded


def _build(folder: Path, config: dict[str, Any]) -> nn.Module:
    from mlx_lm.utils import load_model as load_mlx_lm

    quantization = _quantization(folder, config)
    in_old_fields = settle_rope(config, config_fields(config, folder))
    settled = {
        **in_old_fields,
        **settle_tie(in_old_fields, read_tensors(folder)[1]),
        "quantization": quantization,
        "quantization_config": quantization,
    }
    try:
        module, _ = load_mlx_lm(folder, lazy=True, strict=True, model_config=settled, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, RuntimeError, FileNotFoundError) as error:
        raise ModelLoadError(f"cannot load {folder}: {_first_line(error)}") from None
    assert isinstance(module, nn.Module)
    return module


def _quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """MLX's settings of a quantized model, None for floats ("bits": null is how some tools say that).
    Raises UnsupportedModelError for what others quantized."""
    own = config.get("quantization")
    if not own:
        nested = (config.get("text_config") or {}).get("quantization_config")
        own = config.get("quantization_config") or nested or {}
        method = own.get("quant_method")
        if method is not None:
            raise UnsupportedModelError(
                f"{folder} has quant_method {method!r}; convert it first: mlxserve convert {folder} -o OUT"
            )
    if own.get("bits") is not None:
        settings: dict[str, Any] = own
        return settings
    unknown = sorted(set(own) - {"bits", "group_size", "mode"})
    if unknown:
        raise UnsupportedModelError(f"{folder} has a quantization that is not known: {', '.join(unknown)}")
    return None


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return line if len(line) <= 300 else line[:300] + " …"


def _activation_dtype(module: nn.Module) -> mx.Dtype:
    """float32 on the CPU backend, where narrower floats are emulated; with Metal the model's own."""
    if mx.default_device().type == mx.DeviceType.cpu and selection().metal is None:
        return mx.float32
    for name, array in tree_flatten(module.parameters()):
        if name.endswith("norm.weight") and mx.issubdtype(array.dtype, mx.floating):
            return array.dtype
    return mx.bfloat16


def _convert_parameters(layer: nn.Module, dtype: mx.Dtype) -> None:
    """Bring a layer's own floating parameters to the dtype of the activations. On the CPU, dense matrices and
    the scales of affine layers that our kernels read stay narrow, or become so where that is exact: the
    kernels widen them, and fewer bytes are read a token."""
    kept = _narrow_parameters(layer) if dtype == mx.float32 else ()
    for name, array in list(layer.items()):
        is_float = isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.floating)
        if is_float and name not in kept:
            layer[name] = array.astype(dtype)


def _narrow_parameters(layer: nn.Module) -> tuple[str, ...]:
    """The parameters that our float32 kernels read as they are, by now as narrow as is exact."""
    if isinstance(layer, KernelLinear | KernelEmbedding) or is_switch_linear(layer):
        return ("weight",)
    is_quantized = isinstance(layer, KernelQuantizedLinear | KernelQuantizedEmbedding)
    if not is_quantized and not is_quantized_switch_linear(layer):
        return ()
    scales, biases = layer["scales"], layer.get("biases")
    if biases is None or not reads_quantized(
        scales, biases, group_size=layer.group_size, bits=layer.bits, mode=layer.mode
    ):
        return ()
    # Both or neither: the kernels want one dtype.
    if all(_is_float16(array) for array in (scales, biases)):
        layer["scales"], layer["biases"] = scales.astype(mx.float16), biases.astype(mx.float16)
    return ("scales", "biases")


def _is_float16(array: mx.array) -> bool:
    """Whether every value of a float32 array is a float16 as well. Evaluates it."""
    narrow = array.astype(mx.float16).astype(mx.float32)
    return array.dtype == mx.float32 and bool(mx.array_equal(narrow, array).item())


def _evaluate_by_layer(module: nn.Module, dtype: mx.Dtype) -> None:
    """Read the weights layer by layer, as the kernels want them, into the memory that they read best: no more
    than one layer is held twice. The largest come first, while little else is there."""
    layers = [layer for _, layer in module.named_modules()]
    for layer in sorted(layers, key=_own_bytes, reverse=True):
        _convert_parameters(layer, dtype)
        if dtype == mx.float32:
            tile_weights(layer)
        for name in list(layer):
            # Tiles are there already.
            if isinstance(layer[name], mx.array) and layer[name].ndim and name != "tiles":
                layer[name] = ops.resize_rows(layer[name], layer[name].shape[0])
        mx.clear_cache()
    mx.eval(module.parameters())


def _own_bytes(layer: nn.Module) -> int:
    return sum(value.nbytes for value in layer.values() if isinstance(value, mx.array))


def _make_caches(module: nn.Module) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(module)
    return caches


def _cache_windows(module: nn.Module) -> list[int | None]:
    """The window of each layer, by the kind of cache that the architecture asks for."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    windows: list[int | None] = []
    for cache in _make_caches(module):
        if type(cache) is KVCache:
            windows.append(None)
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            windows.append(int(cache.max_size))
        else:
            raise UnsupportedModelError(f"it keeps its context in a {type(cache).__name__}")
    return windows


def _probe_plain(module: nn.Module, windows: list[int | None]) -> tuple[tuple[LayerSpec, ...], mx.array]:
    """Run mlx-lm's own path on a few tokens: the shapes of keys and values, and the logits [L, V]."""
    caches = _make_caches(module)
    with _as_unsupported("it fails in mlx-lm itself"):
        logits = module(mx.array([_PROBE_IDS], dtype=mx.int32), caches)[0]
        mx.eval(logits)
    specs = []
    for cache, window in zip(caches, windows, strict=True):
        if cache.keys is None or cache.values is None or cache.offset != len(_PROBE_IDS):
            raise UnsupportedModelError("a layer does not cache one key and value a token")
        _, num_heads, _, key_dim = cache.keys.shape
        specs.append(LayerSpec(num_heads, key_dim, cache.values.shape[-1], cache.keys.dtype, window))
    return tuple(specs), logits


def _check_paged(model: LoadedModel, expected: mx.array) -> None:
    """The paged path, in chunks and over page borders, must give what mlx-lm's own gives."""
    pages = ModelPages(model.layers, _PROBE_PAGE)
    pages.resize(4)
    # Two sequences with the same tokens, one after the other on different pages.
    tokens = mx.array(_PROBE_IDS, dtype=mx.int32)
    with _as_unsupported("its attention does not run on pages"):
        rows = _probe_paged(model, tokens, pages, block_table=(2, 1))
        other = _probe_paged(model, tokens, pages, block_table=(0, 3))
        mx.eval(rows, other)
    scale = float(mx.max(mx.abs(expected)).item())  # type: ignore[arg-type]
    limit = _TOLERANCE.get(expected.dtype, 2e-1) * max(scale, 1.0)
    for result in (rows, other):
        gaps = mx.abs(result.astype(mx.float32) - expected.astype(mx.float32))
        difference = float(mx.max(gaps).item())  # type: ignore[arg-type]
        if not difference <= limit:
            raise UnsupportedModelError(
                f"its logits on pages differ by {difference:.3g} from its own (limit {limit:.3g})"
            )


def _probe_paged(
    model: LoadedModel,
    tokens: mx.array,
    pages: ModelPages,
    *,
    block_table: tuple[int, ...],
) -> mx.array:
    results, start = [], 0
    columns = block_table + (0,) * (_PROBE_COLUMNS - len(block_table))
    for length in _PROBE_CHUNKS:
        positions = list(range(start, start + length))
        slots = [block_table[p // _PROBE_PAGE] * _PROBE_PAGE + p % _PROBE_PAGE for p in positions]
        metadata = PagedMetadata(
            positions=mx.array(positions, dtype=mx.int32),
            slot_mapping=mx.array(slots, dtype=mx.int32),
            block_tables=mx.array([columns], dtype=mx.int32),
            q_starts=mx.array([0, length], dtype=mx.int32),
            kv_lens=mx.array([start + length], dtype=mx.int32),
        )
        results.append(model.logits(tokens[start : start + length], pages, metadata, None))
        start += length
        mx.eval(results)
    return mx.concatenate(results)


@contextlib.contextmanager
def _as_unsupported(what: str) -> Iterator[None]:
    """A probe runs foreign code on inputs it may not expect: any failure of it means "not served"."""
    try:
        yield
    except MlxserveError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{what} ({type(error).__name__}: {_first_line(error)})") from error
