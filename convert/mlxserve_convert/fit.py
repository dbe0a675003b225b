"""What a model takes in memory and reads a token, from its config alone: no weights are needed.

Weights: the shapes of mlx-lm's own model, with the layouts that the converter would choose. Keys, values and
states: mlx-lm's own caches after a forward of one token that is built and never evaluated, so that every
architecture tells its own shapes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.config import DEFAULT_PAGE_SIZE, EngineConfig
from mlxserve.errors import UnsupportedModelError
from mlxserve.models.apple_chips import CHIPS, Chip, working_set
from mlxserve.models.architectures import build_model, config_fields
from mlxserve.models.loader import context_length
from mlxserve.models.rope_config import settle_rope
from mlxserve_convert.gguf_checkpoint import open_gguf
from mlxserve_convert.layouts import layout_config
from mlxserve_convert.mlx_checkpoint import DEFAULT_GROUP_SIZES, FIXED_BITS, mlx_quantization
from mlxserve_convert.options import DEFAULT_BITS, ConvertOptions
from mlxserve_convert.plan import Target, make_plan, modules_of
from mlxserve_convert.recipes import Module, recipe_of
from mlxserve_convert.weights import Layout
from mlxserve_kernels.quantized_pages import row_bytes

CacheKind = Literal["full", "window", "latent", "recurrent"]
KV_BITS = (16, 8, 4)
ENGINE_SHARE = 0.8
"""Of the working set, for weights and KV together; the rest is for activations and the process."""
METAL_BASE_BYTES = 400 << 20
CPU_BASE_BYTES = 142 << 20
"""A server without weights and pages: interpreter, libraries, tokenizer. Measured on Linux
(docs/decisions.md); on a Mac an estimate, Metal's own buffers included."""
_INITIAL_POOL_BYTES = 64 << 20
_EXPERT_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "num_selected_experts",
)
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps. ``rows``: (heads, size) of each vector that it keeps of a token. ``window``: the
    tokens that it can see. ``state_bytes``: what does not grow with the context (recurrent layers)."""

    kind: CacheKind
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    state_bytes: int = 0

    def token_bytes(self, kv_bits: int, float_bytes: int = 2) -> int:
        """Bytes of a token; ``kv_bits`` 16 means floats of ``float_bytes``. Raises ValueError for sizes that
        quantized pages cannot have."""
        if kv_bits == 16:
            return float_bytes * sum(heads * size for heads, size in self.rows)
        return sum(heads * row_bytes(size, kv_bits) for heads, size in self.rows)


@dataclass(frozen=True, slots=True)
class Weights:
    """``num_bytes`` of all parameters, ``read_bytes`` of those that one token needs: of experts the chosen
    ones, of an embedding that is no head one row."""

    name: str
    num_bytes: int
    read_bytes: int
    num_parameters: int

    @property
    def bits_per_weight(self) -> float:
        return self.num_bytes * 8 / max(self.num_parameters, 1)


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's sizes. ``float_bytes`` of its unquantized values; ``hidden``, ``widest`` and ``vocab`` are
    those of its matrices, for the activations."""

    model_type: str
    context_length: int | None
    float_bytes: int
    layers: tuple[LayerCache, ...]
    weights: tuple[Weights, ...]
    hidden: int
    widest: int
    vocab: int

    def kv_token_bytes(self, kv_bits: int = 16, float_bytes: int = 2) -> int:
        """Bytes that one more token takes in the server. Its pages are alike for all layers, so those of
        windowed layers stay until the sequence ends."""
        return sum(layer.token_bytes(kv_bits, float_bytes) for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)

    def kv_bytes(self, context: int, kv_bits: int = 16, float_bytes: int = 2) -> int:
        """Of one sequence of ``context`` tokens, in whole pages."""
        pages = -(-context // DEFAULT_PAGE_SIZE)
        return pages * DEFAULT_PAGE_SIZE * self.kv_token_bytes(kv_bits, float_bytes) + self.state_bytes

    def windowed_kv_bytes(self, context: int, kv_bits: int = 16, float_bytes: int = 2) -> int:
        """What attention can see of it: of windowed layers no more than the window. This much is read."""
        seen = sum(
            min(context, layer.window or context) * layer.token_bytes(kv_bits, float_bytes)
            for layer in self.layers
        )
        return seen + self.state_bytes

    def workspace_bytes(self, parallel: int, float_bytes: int = 2) -> int:
        """An estimate of the activations of one step: a few rows of the hidden size and of the widest layer
        a token, and float32 logits with a sorted copy for each sequence."""
        rows = EngineConfig().max_step_tokens
        return rows * (4 * self.hidden + 2 * self.widest) * float_bytes + 2 * parallel * self.vocab * 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for weights and KV on a machine of so many bytes."""

    memory_bytes: int
    engine_bytes: int
    working_set_bytes: int
    base_bytes: int

    @classmethod
    def of_mac(cls, memory_bytes: int) -> Budget:
        keep = working_set(memory_bytes)
        return cls(memory_bytes, int(keep * ENGINE_SHARE), keep, METAL_BASE_BYTES)

    def kv_room(self, model: Footprint, weights: Weights, parallel: int) -> int:
        """Bytes for KV beside the weights, negative where they do not fit."""
        rest = self.working_set_bytes - self.base_bytes - model.workspace_bytes(parallel, model.float_bytes)
        return min(self.engine_bytes, rest) - weights.num_bytes

    def max_context(self, model: Footprint, weights: Weights, parallel: int, kv_bits: int) -> int:
        """The longest context, in whole pages, that so many sequences can have at once; at most the trained
        one, 0 where the model does not fit."""
        room = self.kv_room(model, weights, parallel) // parallel - model.state_bytes
        if room <= 0:
            return 0
        token_bytes = model.kv_token_bytes(kv_bits, model.float_bytes)
        if not token_bytes:
            return model.context_length or 0
        tokens = room // (token_bytes * DEFAULT_PAGE_SIZE) * DEFAULT_PAGE_SIZE
        return tokens if model.context_length is None else min(tokens, model.context_length)

    def max_parallel(self, model: Footprint, weights: Weights, context: int, kv_bits: int) -> int:
        """How many sequences of so many tokens fit at once."""
        each = model.kv_bytes(context, kv_bits, model.float_bytes)
        low = self.kv_room(model, weights, 1) // max(each, 1)
        while low > 0 and self.kv_room(model, weights, low) < low * each:
            low -= 1
        return max(low, 0)


def tokens_per_second(
    model: Footprint, weights: Weights, chip: Chip, context: int, kv_bits: int = 16
) -> float:
    """The bound that memory bandwidth sets on decoding one sequence: no measurement, and never reached."""
    read = weights.read_bytes + model.windowed_kv_bytes(context, kv_bits, model.float_bytes)
    return chip.bandwidth * 1e9 / read


def server_bytes(
    model: Footprint, resident_weights: int, *, context: int, parallel: int = 1, float_bytes: int = 4
) -> int:
    """Anonymous memory of ``mlxserve serve`` on Linux, where activations and keys are float32, with so many
    tokens in its pages. The pool starts with 64 MiB."""
    pool = max(parallel * model.kv_bytes(context, float_bytes=float_bytes), _INITIAL_POOL_BYTES)
    workspace = model.workspace_bytes(parallel, float_bytes) if context else 0
    return CPU_BASE_BYTES + resident_weights + pool + workspace


def footprint(config: Mapping[str, Any], source: Path, bits: Iterable[int | None]) -> Footprint:
    """The sizes of the model that ``config`` describes, with weights of each of ``bits`` (affine, groups of
    64; None: floats) and, if the config says that it is an MLX model, as it is.

    Raises UnsupportedModelError and ModelLoadError where ``build_model`` does.
    """
    settings = mlx_quantization(config)
    plain = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    plain = settle_rope(plain, config_fields(plain, source))
    model = build_model(plain, source)
    _drop_unused_head(model, plain)
    float_bytes = _float_bytes(plain)
    dtype = mx.float32 if float_bytes == 4 else mx.bfloat16
    modules = modules_of(model)
    shapes = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    shares = _read_shares(plain, shapes, modules)
    weights = []
    if settings is not None:
        layouts = {path: _stated_layout(path, settings, dtype) for path in modules}
        # What stands nowhere in the files is not known from the config: MLX quantizes what it can.
        weights.append(_weights("as it is", shapes, layouts, shares, float_bytes))
    for wanted in bits:
        layouts = {}
        if wanted is not None:
            recipe = recipe_of(ConvertOptions(bits=wanted, recipe="uniform"), modules)
            for path, module in modules.items():
                choice = recipe(module)
                layouts[path] = None if choice is None else layout_config(choice, module.shape[-1], dtype)
        name = f"{float_bytes * 8}-bit" if wanted is None else f"{wanted}-bit"
        weights.append(_weights(name, shapes, layouts, shares, float_bytes))
    layers = layer_caches(model, float_bytes)
    vocab = max((module.shape[-2] for path, module in modules.items() if _is_table(path)), default=0)
    return Footprint(
        model_type=plain["model_type"],
        context_length=context_length(plain),
        float_bytes=float_bytes,
        layers=layers,
        weights=tuple(weights),
        hidden=_hidden(modules),
        widest=_widest(plain, modules, vocab),
        vocab=vocab,
    )


def _drop_unused_head(model: Any, config: Mapping[str, Any]) -> None:
    """Some architectures have a head until ``sanitize`` sees that the files have none."""
    if config.get("tie_word_embeddings") is False or "lm_head" not in model or not hasattr(model, "sanitize"):
        return
    # An architecture that wants its weights here has nothing to drop.
    with contextlib.suppress(KeyError, ValueError, IndexError, AttributeError, TypeError):
        model.sanitize({})


def _float_bytes(config: Mapping[str, Any]) -> int:
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        for key in ("torch_dtype", "dtype"):
            if place.get(key) in _DTYPE_BYTES:
                return _DTYPE_BYTES[place[key]]
    return 2


def _stated_layout(path: str, settings: Mapping[str, Any], dtype: mx.Dtype) -> Layout | None:
    entry = settings.get(path, settings)
    if entry is False:
        return None
    values = entry if isinstance(entry, dict) else settings
    mode = values.get("mode", settings.get("mode", "affine"))
    if mode not in DEFAULT_GROUP_SIZES:
        raise UnsupportedModelError(f"config.json has quantization mode {mode!r}, which is not known")
    bits = int(values.get("bits", FIXED_BITS.get(mode, DEFAULT_BITS)))
    group_size = int(values.get("group_size", DEFAULT_GROUP_SIZES[mode]))
    return Layout(mode, bits, group_size, dtype if mode == "affine" else mx.uint8)


def _weights(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Mapping[str, Layout | None],
    shares: Mapping[str, float],
    float_bytes: int,
) -> Weights:
    num_bytes = 0
    read_bytes = 0.0
    num_parameters = 0
    for parameter, shape in shapes.items():
        count = math.prod(shape)
        layout = layouts.get(parameter.removesuffix(".weight")) if parameter.endswith(".weight") else None
        size = count * float_bytes
        if layout is not None and shape[-1] % layout.group_size == 0:
            size = layout.num_bytes(math.prod(shape[:-1]), shape[-1])
        num_bytes += size
        read_bytes += size * shares.get(parameter, 1.0)
        num_parameters += count
    return Weights(name, num_bytes, int(read_bytes), num_parameters)


def _read_shares(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, Module]
) -> dict[str, float]:
    """The part of a parameter that one token reads, where it is not all of it."""
    shares: dict[str, float] = {}
    nested = config.get("text_config")
    places = (config, nested if isinstance(nested, dict) else {})
    chosen = next((p[key] for p in places for key in _EXPERT_KEYS if isinstance(p.get(key), int)), None)
    tables = [path for path in modules if _is_table(path)]
    for path, module in modules.items():
        if len(module.shape) == 3 and chosen is not None:
            for name in shapes:
                if name.startswith(f"{path}."):
                    shares[name] = min(1.0, chosen / module.shape[0])
    embeddings = [path for path in tables if not _is_head(path)]
    if len(tables) > len(embeddings):
        shares |= {f"{path}.weight": 1 / modules[path].shape[0] for path in embeddings}
    return shares


_TABLES = ("embed_tokens", "lm_head", "wte", "embedding", "embeddings", "word_embeddings", "tok_embeddings")
_HEADS = ("lm_head", "output", "head")


def _is_table(path: str) -> bool:
    return path.rpartition(".")[2] in _TABLES + _HEADS


def _is_head(path: str) -> bool:
    return path.rpartition(".")[2] in _HEADS


def _hidden(modules: Mapping[str, Module]) -> int:
    return max((module.shape[-1] for path, module in modules.items() if _is_table(path)), default=0)


def _widest(config: Mapping[str, Any], modules: Mapping[str, Module], vocab: int) -> int:
    """The largest number of values that a layer makes of a token, of several experts the sum."""
    chosen = next((config[key] for key in _EXPERT_KEYS if isinstance(config.get(key), int)), 1)
    widths = [
        module.shape[-2] * (chosen if len(module.shape) == 3 else 1)
        for path, module in modules.items()
        if not _is_table(path) and len(module.shape) > 1
    ]
    return max(widths, default=vocab)


def layer_caches(model: nn.Module, float_bytes: int = 2) -> tuple[LayerCache, ...]:
    """What each layer of an mlx-lm model keeps of its context."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    try:
        model(mx.array([[1]]), caches)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModelError(f"its layers do not tell what they keep: {reason}") from error
    return tuple(part for cache in caches for part in _parts(cache, float_bytes))


def _parts(cache: Any, float_bytes: int) -> list[LayerCache]:
    inner = getattr(cache, "caches", None)
    if inner is not None:
        return [part for each in inner for part in _parts(each, float_bytes)]
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None:
        arrays = [array for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]
        return [LayerCache("recurrent", (), state_bytes=sum(a.size for a in arrays) * float_bytes)]
    rows = tuple((array.shape[1], array.shape[-1]) for array in (keys, values) if array.shape[-1])
    window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
    if window is not None:
        return [LayerCache("window", rows, window=int(window))]
    # Multi-head latent attention keeps one compressed vector and one rotated key for all heads.
    is_latent = len({size for _, size in rows}) == 2 and all(heads == 1 for heads, _ in rows)
    return [LayerCache("latent" if is_latent else "full", rows)]


def macs(memory_bytes: int | None) -> list[tuple[int, list[Chip]]]:
    """Memory sizes in bytes with the chips that come with them; only ``memory_bytes`` if it is given, even
    if no Mac has it."""
    sizes = sorted({size << 30 for chip in CHIPS for size in chip.memories})
    if memory_bytes is not None:
        sizes = [memory_bytes]
    return [(size, [chip for chip in CHIPS if size >> 30 in chip.memories]) for size in sizes]


def gguf_footprint(path: Path, bits: Iterable[int | None]) -> tuple[Footprint, int]:
    """``footprint`` of a GGUF file's header, with its import ("as it is") first, and the bytes that its
    weights take in the memory of a server on Linux."""
    with open_gguf(path) as checkpoint:
        plan = make_plan(checkpoint, ConvertOptions())
        model = footprint(checkpoint.config, path, bits)
        shapes = {target.name: target.weight.shape for target in plan.targets}
        modules = {
            target.module: Module(target.module, target.weight.shape, True)
            for target in plan.targets
            if target.is_matrix
        }
        shares = _read_shares(checkpoint.config, shapes, modules)
        sizes = {target.name: target.num_bytes for target in plan.targets}
        resident = sum(_resident_bytes(target) for target in plan.targets)
    imported = Weights(
        "as it is",
        sum(sizes.values()),
        int(sum(size * shares.get(name, 1.0) for name, size in sizes.items())),
        sum(math.prod(shape) for shape in shapes.values()),
    )
    return replace(model, weights=(imported, *model.weights)), resident


_NARROW_SCALES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types whose scales are float16 in the file: they are stored as float32 and narrowed again when loaded."""


def _resident_bytes(target: Target) -> int:
    layout = target.layout
    if layout is None or not target.weight.source_types <= set(_NARROW_SCALES):
        return target.num_bytes
    narrow = replace(layout, scale_dtype=mx.float16)
    return narrow.num_bytes(target.weight.num_rows, target.weight.num_columns)
