"""What a module does in its model, told by its name."""

from __future__ import annotations

import re
from typing import Literal

Role = Literal["embedding", "head", "router", "expert", "query_key", "value", "output", "up", "down", "other"]

_EXPERTS = frozenset({"switch_mlp", "switch_glu", "experts", "switch_ffn"})
_ATTENTION = ("attn", "attention")
_LAST_NAMES: dict[str, Role] = {
    **dict.fromkeys(("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embed_in"), "embedding"),
    **dict.fromkeys(("embeddings", "embedding", "wpe", "embed_tokens_per_layer"), "embedding"),
    **dict.fromkeys(("lm_head", "embed_out"), "head"),
    **dict.fromkeys(("gate", "router", "shared_expert_gate", "router_proj"), "router"),
    **dict.fromkeys(("q_proj", "k_proj", "wq", "wk", "q_a_proj", "q_b_proj"), "query_key"),
    **dict.fromkeys(("v_proj", "wv", "kv_a_proj_with_mqa", "kv_b_proj", "embed_v"), "value"),
    # Fused projections hold v.
    **dict.fromkeys(("qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv", "att_proj"), "value"),
    **dict.fromkeys(("o_proj", "wo", "attn_out"), "output"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "c_fc"), "up"),
    **dict.fromkeys(("dense_h_to_4h", "fc_in", "ff_proj"), "up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "dense_4h_to_h", "fc_out", "ff_out"), "down"),
}
_INSIDE_ATTENTION: dict[str, Role] = dict.fromkeys(("c_proj", "out_proj", "dense"), "output")
_INSIDE_MLP: dict[str, Role] = {"c_proj": "down", "out_proj": "down"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def role_of(path: str) -> Role:
    """The role of a module of an mlx-lm model, "other" where the name is in no table. A router or an expert
    is that, whatever its last name."""
    *outer, last = path.split(".")
    if _LAST_NAMES.get(last) == "router" or (outer and outer[-1] == "router"):
        return "router"
    if _EXPERTS.intersection(outer):
        return "expert"
    if last == "output" and layer_of(path) is None:
        return "head"
    if last in _LAST_NAMES:
        return _LAST_NAMES[last]
    is_attention = any(word in part for part in outer for word in _ATTENTION)
    return (_INSIDE_ATTENTION if is_attention else _INSIDE_MLP).get(last, "other")


def layer_of(path: str) -> int | None:
    """The number of the layer that a module is in, None outside of them."""
    found = _LAYER.search(path)
    return None if found is None else int(found.group(1))
