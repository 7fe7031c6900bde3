"""GLM-4.5 to 4.7 with experts; GLM-5 has DeepSeek-V3.2's architecture and is read in deepseek.py."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core, mtp
from moesim.simulator.model.huggingface.experts import deepseek_experts
from moesim.simulator.model.huggingface.grouped_query import gqa
from moesim.simulator.model.huggingface.layers import dense_first, ffn_fields
from moesim.simulator.model.huggingface.reader import Reader


def glm4_moe(r: Reader) -> dict[str, Any]:
    """GLM-4.5, 4.6 and 4.7: grouped-query attention whose output has no bias, and DeepSeek-V3's gate."""
    fields = core(r, tied=False)  # text parts of multimodal files leave the key out (Glm4MoeConfig)
    layers = fields["n_layers"]
    bias = r.flag("attention_bias", "bias of queries, keys and values")
    norms = r.flag("use_qk_norm", "norms of queries and keys")
    attention = gqa(r, own_head_dim=True, qkv_bias=bias, qk_norm=norms)
    moe = deepseek_experts(r, method="noaux_tc", scoring="sigmoid")  # fixed in the modelling code (Glm4Moe)
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    return fields | {"attention": attention} | ffn_fields(dense_first(r, layers), moe, width) | mtp(r)
