"""LongCat-Flash: two latent attentions and two dense FFNs a layer, and experts beside the first FFN."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.huggingface.core import core
from moesim.simulator.model.huggingface.experts import routed
from moesim.simulator.model.huggingface.latent import mla
from moesim.simulator.model.huggingface.layers import ffn_fields
from moesim.simulator.model.huggingface.reader import Reader


def longcat_flash(r: Reader) -> dict[str, Any]:
    """LongCat-Flash.

    A layer is read as two: the experts and the first dense FFN have the same input, so that FFN is their
    shared expert; the second attention and FFN are a dense layer (LongcatFlashDecoderLayer).
    """
    layers = 2 * r.layers("num_layers")
    fields = core(r, layers=layers, tied=False)
    r.refuse_used("ngram_vocab_size_ratio", "emb_neighbor_num", why="embeddings of n-grams")
    r.refuse_unless("router_bias", False, "bias of the router's projection")
    width = r.integer("ffn_hidden_size", meaning="width of the dense FFNs")
    moe = routed(r, "softmax", score_bias=True) | {"shared_experts": 1, "shared_ffn": width}
    zero = r.integer("zero_expert_num", meaning="experts that compute nothing", least=0, absent=0, null=0)
    if zero:
        r.refuse_unless("zero_expert_type", "identity", "experts that compute nothing")
        moe |= {"zero_experts": zero}
    note = (
        "the shortcut over which experts exchange rows while the next attention and FFN compute: transfers "
        "are hidden as in other models only"
    )
    ffn = ffn_fields((ROUTED, DENSE) * (layers // 2), moe, width)
    return fields | {"attention": mla(r)} | ffn | {"not_modelled": [note]}
