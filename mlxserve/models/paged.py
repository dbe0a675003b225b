"""Paged attention inside mlx-lm's architectures.

An architecture calls ``scaled_dot_product_attention(q, k, v, cache=…)`` by a name in its own module. That
name is bound once to a dispatcher that takes our path for our cache type alone and calls the original
for every other. Tokens go through the model as (T, 1), one row a token with an array of positions, so
rows of many sequences share one forward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import mlx.core as mx
import mlx.nn as nn

from mlxserve.errors import UnsupportedModelError
from mlxserve.models.tail_table import Run
from mlxserve_kernels import ops
from mlxserve_kernels.adapters import StackAdapters
from mlxserve_kernels.decoder import DecoderStack, Rope, StackPools
from mlxserve_kernels.page_rows import KvPages, KvRows
from mlxserve_kernels.quantized_pages import head_bytes, row_bytes


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of the rows of a forward: ``adapters`` as ``mlxserve.models.adapters`` bound them to the
    model, and the slot in them of each of T rows, int32 [T], -1 for none."""

    adapters: Mapping[int, StackAdapters]
    slots: mx.array


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """Where the rows of a forward are: T tokens in S runs, each of one sequence. All int32.

    positions    [T]     position of each token in its sequence
    slot_mapping [T]     page * page_size + offset, where its key and value go
    block_tables [S, P]  pages of each run's sequence, padded with 0
    q_starts     [S+1]   run s is tokens q_starts[s] : q_starts[s+1]
    kv_lens      [S]     keys of the sequence up to and including the run
    adapters             None where no row has an adapter
    pieces       [N,8]   what each tail is made of, where there are tails; block_tables then name these, too
    """

    positions: mx.array
    slot_mapping: mx.array
    block_tables: mx.array
    q_starts: mx.array
    kv_lens: mx.array
    adapters: RowAdapters | None = field(default=None, kw_only=True)
    pieces: mx.array | None = field(default=None, kw_only=True)


Metadata = TypeVar("Metadata", bound=PagedMetadata)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's keys and values: heads, sizes, dtype, and the window (None: full attention). ``kv_bits``
    8 or 4: pages hold integers instead of ``dtype``, all layers of a model alike."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None
    kv_bits: int | None = None

    def page_bytes(self, page_size: int) -> int:
        """Raises ValueError for sizes of heads that quantized pages cannot have."""
        if self.kv_bits is not None:
            token_bytes = sum(row_bytes(dim, self.kv_bits) for dim in (self.key_dim, self.value_dim))
            return self.num_kv_heads * page_size * token_bytes
        return self.num_kv_heads * page_size * (self.key_dim + self.value_dim) * int(self.dtype.size)


class LayerPages:
    """The page tensors of one layer: keys [P, H, D, page], values [P, H, page, Dv]; quantized, both uint8
    [P, H, bytes] (ValueError for sizes that those cannot have).

    Always the newest handle: a writer replaces both, and keeps no other. But see ``ModelPages.held``.
    """

    def __init__(self, spec: LayerSpec, page_size: int) -> None:
        self.spec = spec
        heads, dtype = spec.num_kv_heads, spec.dtype
        keys: tuple[int, ...] = (spec.key_dim, page_size)
        values: tuple[int, ...] = (page_size, spec.value_dim)
        if spec.kv_bits is not None:
            dtype = mx.uint8
            keys = (head_bytes(spec.key_dim, page_size, spec.kv_bits),)
            values = (head_bytes(spec.value_dim, page_size, spec.kv_bits),)
        self.keys = mx.zeros((0, heads, *keys), dtype=dtype)
        self.values = mx.zeros((0, heads, *values), dtype=dtype)

    def resize(self, num_pages: int) -> None:
        """Grow or shrink to ``num_pages``, keeping the first ones; evaluated at once."""
        self.keys = ops.resize_rows(self.keys, num_pages)
        self.values = ops.resize_rows(self.values, num_pages)

    def copy(self, source_ids: mx.array, target_ids: mx.array) -> None:
        """As ``ops.copy_pages`` does."""
        self.keys, self.values = ops.copy_pages(self.keys, self.values, source_ids, target_ids)

    def write(self, k: mx.array, v: mx.array, metadata: PagedMetadata) -> None:
        """Rows k [T, H, D] and v [T, H, Dv] to where the metadata say."""
        self._write(KvRows(k, v), metadata)

    def rope_and_write(
        self, q: mx.array, k: mx.array, v: mx.array, rope: Rope | None, metadata: PagedMetadata
    ) -> mx.array:
        """``write`` of k, turned by ``rope``; returns q [T, H_q, D], turned as well."""
        turned = self._write(KvRows(k, v, q, metadata.positions, rope), metadata)
        assert turned is not None
        return turned

    def attend(self, q: mx.array, metadata: PagedMetadata, **options: Any) -> mx.array:
        """``ops.paged_attention`` of q [T, H, D] with these options: [T, H, Dv]."""
        return ops.paged_attention(
            q,
            self.keys,
            self.values,
            metadata.block_tables,
            metadata.q_starts,
            metadata.kv_lens,
            kv_bits=self.spec.kv_bits,
            **options,
            **self._read_options(),
        )

    def written(self) -> mx.array:
        """A small array that is ready when all that was written is."""
        return self.keys[0, 0, 0]

    def keys_of(self, entries: Sequence[int]) -> mx.array:
        """The keys of whole pages, by what ``ModelPages.entries`` gives for them."""
        return self.keys[mx.array(list(entries), dtype=mx.int32)]

    @property
    def _pools(self) -> KvPages:
        return KvPages(self.keys, self.values)

    def _write(self, rows: KvRows, metadata: PagedMetadata) -> mx.array | None:
        """Returns q of the rows, turned."""
        bits = self.spec.kv_bits
        if rows.q is None:
            self.keys, self.values = ops.write_pages(
                self.keys, self.values, rows.k, rows.v, metadata.slot_mapping, kv_bits=bits
            )
            return None
        q, self.keys, self.values = ops.rope_and_write_pages(
            rows.q,
            rows.k,
            rows.v,
            self.keys,
            self.values,
            metadata.positions,
            metadata.slot_mapping,
            rope=rows.rope,
            kv_bits=bits,
        )
        return q

    def _read_options(self) -> dict[str, Any]:
        """What else the attention takes."""
        return {}


class ModelPages(Sequence[LayerPages]):
    """The page tensors of all layers of a model, of the kind ``layer_class``."""

    layer_class = LayerPages

    def __init__(self, specs: Iterable[LayerSpec], page_size: int) -> None:
        self._layers = [self.layer_class(spec, page_size) for spec in specs]
        self._held: dict[int, tuple[DecoderStack, StackPools]] = {}

    @overload
    def __getitem__(self, index: int) -> LayerPages: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerPages]: ...
    def __getitem__(self, index: int | slice) -> LayerPages | list[LayerPages]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def resize(self, num_pages: int) -> None:
        """All layers, one after the other; no step is in flight."""
        # What is held would keep the old tensors.
        self._held.clear()
        for layer in self._layers:
            layer.resize(num_pages)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target) on all layers; no target is a source or another target."""
        sources, targets = (mx.array(ids, dtype=mx.int32) for ids in zip(*copies, strict=True))
        for layer in self._layers:
            layer.copy(sources, targets)
        if self._held:
            # A stack waits for no handle but the first; what was started earlier is done earlier.
            mx.async_eval([[layer.keys, layer.values] for layer in self._layers])

    def begin_step(self, runs: Sequence[Run], previous: mx.array | None) -> None:
        """Before a step with these runs copies or writes anything; ``previous`` is the result of the step
        that is in flight, None where none is."""

    def placed(self, runs: Sequence[Run], metadata: Metadata) -> Metadata:
        """The metadata of a step with these runs as its layers need them: once a step, behind its copies."""
        return metadata

    def entries(self, pages: Sequence[int]) -> Sequence[int]:
        """What the newest step's block tables have for these pages."""
        return pages

    def held(self, first: int, stack: DecoderStack) -> StackPools:
        """The pools of the layers from ``first`` on, for ``stack``, which alone writes them from now on."""
        found = self._held.get(first)
        if found is None or found[0] is not stack:
            layers = self._layers[first : first + stack.num_layers]
            pools = stack.hold(
                [layer.keys for layer in layers], [layer.values for layer in layers], layers[0].spec.kv_bits
            )
            found = self._held[first] = (stack, pools)
        return found[1]


@dataclass(frozen=True, slots=True)
class InPages:
    """Stands for keys or values that live in pages. Any arithmetic on it fails at once."""

    dtype: mx.Dtype
    """Of the rows that were handed in; some architectures bring the attention's result back to it."""

    def astype(self, dtype: mx.Dtype) -> InPages:
        """Itself: the attention computes in float32 whatever the pages hold."""
        return self


@dataclass(frozen=True, slots=True)
class PagedMask:
    """What a model gets as a mask where its own would be an array or a window, and hands on to the
    attention: each row sees its own context, of that the last ``window`` tokens."""

    window: int | None


class PagedLayerCache:
    """Looks like an mlx-lm cache to one layer in one forward: the one at ``index`` of ``layers``."""

    def __init__(self, layers: ModelPages, index: int, metadata: PagedMetadata) -> None:
        self.layers = layers
        self.pages = layers[index]
        self.metadata = metadata
        self.offset = metadata.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[InPages, InPages]:
        """Write (T, H, 1, D) keys and values to their slots; the attention reads the pages."""
        self.pages.write(keys.squeeze(2), values.squeeze(2), self.metadata)
        return InPages(keys.dtype), InPages(values.dtype)

    def rope_and_write(self, q: mx.array, k: mx.array, v: mx.array, rope: Rope | None) -> mx.array:
        """See ``op_stack.LayerKeys``."""
        return self.pages.rope_and_write(q, k, v, rope, self.metadata)

    def attend(
        self,
        q: mx.array,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """``ops.paged_attention`` over the pages: q [T, H, D], returns [T, H, Dv]."""
        return self.pages.attend(q, self.metadata, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def make_mask(
        self, length: int, *, return_array: bool = False, window_size: int | None = None
    ) -> PagedMask | None:
        """Each row sees its own context: no mask but the window. A model that computes with its mask
        fails at the first use of it."""
        return PagedMask(window_size) if return_array or window_size is not None else None


class PagedCaches(list[PagedLayerCache]):
    """The caches of all layers, and which rows go on to the output head (None: all)."""

    def __init__(self, layers: ModelPages, metadata: PagedMetadata, sampled_rows: mx.array | None) -> None:
        super().__init__(PagedLayerCache(layers, index, metadata) for index in range(len(layers)))
        self.sampled_rows = sampled_rows


def attend(
    queries: mx.array,
    cache: PagedLayerCache,
    *,
    scale: float,
    mask: PagedMask | None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of (T, H, 1, D) queries over the pages; returns (T, H, 1, Dv)."""
    if mask is not None and not isinstance(mask, PagedMask):
        raise UnsupportedModelError("this architecture has an attention mask of its own")
    windows = [w for w in (cache.pages.spec.window, mask.window if mask else None) if w is not None]
    output = cache.attend(
        queries.squeeze(2),
        scale=scale,
        window=min(windows) if windows else None,
        softcap=softcap,
        sinks=sinks,
    )
    return output[:, :, None]


def bind_attention(model: nn.Module) -> None:
    """Rebind ``scaled_dot_product_attention`` in the modules that define the layers of ``model``.

    Attention that is written out (Gemma 2) changes its class instead. Raises UnsupportedModelError when
    there is neither.
    """
    for _, module in model.named_modules():
        if (type(module).__module__, type(module).__name__) == ("mlx_lm.models.gemma2", "Attention"):
            module.__class__ = _softcapped_attention(type(module))
    names = {type(module).__module__ for _, module in model.named_modules()}
    num_bound = sum(name == __name__ for name in names)
    for name in names:
        module = sys.modules[name]
        original = vars(module).get("scaled_dot_product_attention")
        if original is None or not name.startswith("mlx_lm.models."):
            continue
        num_bound += 1
        if not hasattr(original, "is_paged_dispatcher"):
            module.scaled_dot_product_attention = _dispatcher(original)  # type: ignore[attr-defined]
    if not num_bound:
        raise UnsupportedModelError("this architecture does not use the standard attention")


def _softcapped_attention(original: type[nn.Module]) -> type[nn.Module]:
    """Gemma 2's attention: ``original`` but for our caches."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PagedLayerCache):
            return original.__call__(self, x, mask, cache)
        num_rows = x.shape[0]
        queries = self.q_proj(x).reshape(num_rows, self.n_heads, 1, -1)
        keys = self.k_proj(x).reshape(num_rows, self.n_kv_heads, 1, -1)
        values = self.v_proj(x).reshape(num_rows, self.n_kv_heads, 1, -1)
        cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)
        output = attend(
            self.rope(queries, offset=cache.offset),
            cache,
            scale=self.scale,
            mask=mask,
            softcap=self.attn_logit_softcapping,
        )
        return self.o_proj(output.reshape(num_rows, 1, -1))

    return type("SoftcappedAttention", (original,), {"__call__": call, "__module__": __name__})


def _dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def dispatch(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, PagedLayerCache):
            if not (isinstance(keys, InPages) and isinstance(values, InPages)):
                raise UnsupportedModelError("this architecture changes its keys after caching them")
            return attend(queries, cache, scale=scale, mask=mask, sinks=sinks)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    dispatch.is_paged_dispatcher = True  # type: ignore[attr-defined]
    return dispatch


def select_rows_before_head(model: nn.Module) -> None:
    """Let only the sampled rows of a paged forward reach the output head.

    The backbone (the submodule that holds the layers and is called with the caches) changes its class
    to one that picks the rows from its result. Without a known backbone the head sees all rows.
    """
    backbone = _find_backbone(model)
    if backbone is None:
        return
    original = type(backbone)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = original.__call__(self, *args, **kwargs)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, PagedCaches) and argument.sampled_rows is not None:
                return hidden[argument.sampled_rows]
        return hidden

    backbone.__class__ = type(original.__name__, (original,), {"__call__": call})


def _find_backbone(model: nn.Module) -> nn.Module | None:
    holder: Any = model
    while (inner := holder.get("language_model")) is not None:
        holder = inner
    for name in ("model", "transformer", "backbone"):
        candidate = holder.get(name)
        if isinstance(candidate, nn.Module):
            return candidate
    return None
