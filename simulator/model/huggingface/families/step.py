"""Step 3.5 and 3.7: windows in most layers, a gate for every head, experts behind the first layers."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED, layer_kind
from moesim.simulator.model.huggingface.core import core
from moesim.simulator.model.huggingface.experts import routed
from moesim.simulator.model.huggingface.grouped_query import gqa, windowed
from moesim.simulator.model.huggingface.layers import attention_fields, ffn_fields
from moesim.simulator.model.huggingface.reader import Reader

_LEGAL = {"full_attention": "full", "sliding_attention": "sliding"}


def step(r: Reader) -> dict[str, Any]:
    """Step 3.5 Flash and 3.7 Flash.

    Norms of queries and keys, one gate a head, and a shared expert are fixed in the modelling code
    (Step3p7Attention, Step3p7MLP); `attention_other_setting` gives layers with a window
    heads of their own.
    """
    fields = core(r, tied=False)
    layers = fields["n_layers"]
    r.flag("use_head_wise_attn_gate", "one gate a head", True)
    r.flag("use_qk_norm", "norms of queries and keys", True)
    gate = "head" if r.config.get("use_head_wise_attn_gate", True) else False
    full = gqa(r, own_head_dim=True, qk_norm=r.config.get("use_qk_norm", True), output_gate=gate)
    window = r.integer("sliding_window", meaning="attention window, tokens")
    kinds = {"full": full, "sliding": windowed(full | _other_heads(r), window)}
    modules = r.integer("num_nextn_predict_layers", meaning="MTP modules", least=0, absent=0, null=0)
    if r.has("layer_types"):
        names = r.per_layer(
            "layer_types", layers=layers, legal=_LEGAL, meaning="attention of a layer", further=modules
        )
    else:  # every fourth layer sees all tokens (configuration of the published models, which list the layers)
        names = tuple("sliding" if i % 4 else "full" for i in range(layers))
    r.refuse_unless("scoring_func", "sigmoid", "scores from logits")
    bias = r.flag("use_moe_router_bias", "balance bias of the gate", True)
    moe = routed(r, "sigmoid", score_bias=bias)
    r.seen.add("n_shared_experts")
    width = r.integer("share_expert_dim", "share_expert_dims", meaning="width of the shared expert")
    moe |= {"shared_experts": 1, "shared_ffn": width}
    dense = r.integer("intermediate_size", meaning="width of the dense FFN")
    fields |= attention_fields(names[:layers], kinds) | ffn_fields(_halves(r, layers), moe, dense)
    if not modules:
        return fields
    last = names[layers] if len(names) > layers else names[layers - 1]
    # MTP modules are dense, as moe_layers_enum names none; layer_types lists theirs behind the layers.
    several = len(set(names[:layers])) > 1
    return fields | {"mtp_layers": modules, "mtp_layer": layer_kind(DENSE, last if several else None)}


def _other_heads(r: Reader) -> dict[str, int]:
    if not r.has("attention_other_setting"):
        return {}
    other = r.inner("attention_other_setting", "heads of the layers with a window")
    return {
        "heads": other.integer("num_attention_heads", meaning="query heads of layers with a window"),
        "kv_heads": other.integer(
            "num_attention_groups", meaning="key and value heads of layers with a window"
        ),
        "head_dim": other.integer("head_dim", meaning="width of a head in layers with a window"),
    }


def _halves(r: Reader, layers: int) -> tuple[str, ...]:
    if not r.has("moe_layers_enum"):
        first = r.integer("first_k_dense_replace", meaning="first layers that stay dense", least=0)
        return tuple(DENSE if i < first else ROUTED for i in range(layers))
    r.seen.add("first_k_dense_replace")
    chosen = set(r.indices("moe_layers_enum", layers=layers, meaning="layers with experts"))
    return tuple(ROUTED if i in chosen else DENSE for i in range(layers))
