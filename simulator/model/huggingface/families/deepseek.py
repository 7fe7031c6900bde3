"""DeepSeekMoE, DeepSeek-V2 to V4 and their like: Kimi-K2, GLM-5, GLM-4.7-Flash, Mistral Small 4.

Sources: the published config.json files, the reports (arXiv 2405.04434, 2412.19437, 2512.02556) and, for what
the files leave out, the modelling code of Hugging Face transformers 5.23.
"""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import ROUTED, layer_kind
from moesim.simulator.model.huggingface.parts import (
    deepseek_experts,
    dense_then_experts,
    dsa_fields,
    gqa,
    groups,
    mla,
    routed,
    scoring_of,
    shared,
)
from moesim.simulator.model.huggingface.reader import (
    Reader,
    attention_fields,
    core,
    dense_first,
    family,
    ffn_fields,
    mtp,
)

_RATIOS = {0: "window", 4: "csa", 128: "hca"}
"""Name of V4's attention by the number of tokens that are compressed into one: none, compressed sparse
attention, heavily compressed attention (DeepSeek-V4 model card)."""


def _feed_forward(r: Reader, layers: int, moe: dict[str, Any]) -> dict[str, Any]:
    return dense_then_experts(r, layers, moe, "width of the dense FFN (unused where no layer is dense)")


@family("deepseek", "DeepseekForCausalLM")
def deepseek_v1(r: Reader) -> dict[str, Any]:
    """DeepSeekMoE 16B: multi-head attention, a softmax without groups (modeling_deepseek.py)."""
    fields = core(r)
    moe = deepseek_experts(r, method="greedy")
    attention = gqa(r, bias_key="attention_bias")
    return fields | {"attention": attention} | _feed_forward(r, fields["n_layers"], moe)


@family("deepseek_v2", "DeepseekV2ForCausalLM")
def deepseek_v2(r: Reader) -> dict[str, Any]:
    """DeepSeek-V2 and V2-Lite."""
    fields = core(r)
    moe = deepseek_experts(r, required=True)
    return fields | {"attention": mla(r)} | _feed_forward(r, fields["n_layers"], moe)


@family("deepseek_v3", "DeepseekV3ForCausalLM", also=("kimi_k25",))
@family("kimi_k2")
def deepseek_v3(r: Reader) -> dict[str, Any]:
    """DeepSeek-V3 and R1, and Kimi-K2: the files state the number of MTP modules."""
    return deepseek_v2(r) | _stated_mtp(r)


def _stated_mtp(r: Reader) -> dict[str, Any]:
    """MTP modules of families whose files always state their number; a missing key is an error."""
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    return {"mtp_layers": r.integer(*keys, meaning="MTP modules", least=0)}


@family("deepseek_v32", "DeepseekV32ForCausalLM")
@family("glm_moe_dsa", "GlmMoeDsaForCausalLM")
def deepseek_v32(r: Reader) -> dict[str, Any]:
    """DeepSeek-V3.2 and GLM-5: V3's keys and those of the indexer."""
    fields = core(r)
    layers = fields["n_layers"]
    moe = deepseek_experts(r)
    return fields | dsa_fields(r, layers) | _feed_forward(r, layers, moe) | _stated_mtp(r)


@family("glm4_moe_lite", "Glm4MoeLiteForCausalLM")
def glm_moe_lite(r: Reader) -> dict[str, Any]:
    """GLM-4.7-Flash: latent attention and DeepSeek's gate, both fixed by the modelling code (Glm4MoeLite)."""
    fields = core(r)
    moe = deepseek_experts(r, method="noaux_tc", scoring="sigmoid")
    return fields | {"attention": mla(r)} | _feed_forward(r, fields["n_layers"], moe) | mtp(r)


@family("mistral4", "Mistral4ForCausalLM", "MistralLarge3ForCausalLM")
def mistral4(r: Reader) -> dict[str, Any]:
    """Mistral Small 4 and Large 3: latent attention; the gate is a softmax (Mistral4TopkRouter)."""
    fields = core(r)
    moe = deepseek_experts(r, method="greedy", scoring="softmax")
    return fields | {"attention": mla(r)} | _feed_forward(r, fields["n_layers"], moe) | mtp(r)


@family("deepseek_v4", "DeepseekV4ForCausalLM")
def deepseek_v4(r: Reader) -> dict[str, Any]:
    """DeepSeek-V4: compressed attention, hyper-connections, and experts in every layer."""
    fields = core(r, tied=False)  # files of serving formats leave the key out; the head has its own table
    layers = fields["n_layers"]
    r.refuse_unless("num_key_value_heads", 1, "V4's queries share one head of keys, which are the values too")
    r.refuse_unless("attention_bias", False, "bias of the attention projections")
    modules = r.integer("num_nextn_predict_layers", meaning="MTP modules", least=0, absent=0, null=0)
    ratios = r.per_layer(
        "compress_ratios", layers=layers, legal=_RATIOS, meaning="tokens compressed into one", further=modules
    )
    used = dict.fromkeys(ratios[:layers])
    notes = []
    hashed = r.integer("num_hash_layers", meaning="layers routed by a hash of the token", least=0, absent=0)
    if hashed:
        where = f"in the first {hashed} layers"
        notes.append(f"routing by a table of tokens {where}: counted and priced as a gate")
    fields |= attention_fields(ratios[:layers], _compressed(r))
    if modules:
        fields["mtp_layers"] = modules
        last = ratios[layers] if len(ratios) > layers else ratios[layers - 1]
        if last in used and len(used) > 1:
            fields["mtp_layer"] = layer_kind(ROUTED, last)
        elif last not in used:
            notes.append(f"the MTP module's {last} attention: priced as that of the last layer")
    moe = routed(r, scoring_of(r, absent="sqrtsoftplus"), score_bias=True)
    moe |= shared(r, moe["expert_ffn"])
    r.refuse_unless("topk_method", "noaux_tc", "how experts are chosen")
    streams = r.integer("hc_mult", meaning="residual streams of the hyper-connections", absent=1)
    extra = {"residual_streams": streams} if streams > 1 else {}
    return fields | ffn_fields((ROUTED,) * layers, moe, None) | extra | {"not_modelled": notes}


def _compressed(r: Reader) -> dict[str, dict[str, Any]]:
    base = {
        "kind": "compressed",
        "heads": r.integer("num_attention_heads", meaning="query heads"),
        "head_dim": r.integer("head_dim", meaning="width of one head"),
        "rope_dim": r.integer("qk_rope_head_dim", meaning="rotated part of a head"),
        "q_lora_rank": r.integer("q_lora_rank", meaning="width of the compressed query"),
        "o_groups": r.integer("o_groups", meaning="groups of the output projection"),
        "o_lora_rank": r.integer("o_lora_rank", meaning="width of one group of the output projection"),
        "window": r.integer("sliding_window", meaning="tokens that are kept uncompressed"),
    }
    indexer = {
        "heads": r.integer("index_n_heads", meaning="heads of the indexer"),
        "head_dim": r.integer("index_head_dim", meaning="width of one indexer head"),
        "top_k": r.integer("index_topk", meaning="compressed keys that the indexer keeps for one query"),
    }
    kinds = {name: base | {"ratio": ratio} for ratio, name in _RATIOS.items()}
    kinds["csa"]["indexer"] = indexer
    return kinds


@family("glm4_moe", "Glm4MoeForCausalLM", also=("glm4v_moe", "glm4v_moe_text"))
def glm4_moe(r: Reader) -> dict[str, Any]:
    """GLM-4.5, 4.6 and 4.7: grouped-query attention whose output has no bias, and DeepSeek-V3's gate."""
    fields = core(r, tied=False)  # text parts of multimodal files leave the key out (Glm4MoeConfig)
    bias = r.flag("attention_bias", "bias of queries, keys and values")
    norms = r.flag("use_qk_norm", "norms of queries and keys")
    attention = gqa(r, own_head_dim=True, qkv_bias=bias, qk_norm=norms)
    moe = deepseek_experts(r, method="noaux_tc", scoring="sigmoid")  # fixed in the modelling code (Glm4Moe)
    return fields | {"attention": attention} | dense_then_experts(r, fields["n_layers"], moe) | mtp(r)


@family("kimi_linear", "KimiLinearForCausalLM", also=("kimi_k3",))
def kimi_linear(r: Reader) -> dict[str, Any]:
    """Kimi Linear 48B and the language model of Kimi K3."""
    fields = core(r, activations=("silu", "situ"))
    layers = fields["n_layers"]
    linear = r.inner("linear_attn_config", "Kimi delta attention")
    rotary = not r.flag("mla_use_nope", "latent attention has no rotary embedding")
    gate = "element" if r.flag("mla_use_output_gate", "gate of the attention's output", False) else False
    latent = mla(r, output_gate=gate) | ({} if rotary else {"rotary": False})
    delta = {
        "kind": "kda",
        "heads": linear.integer("num_heads", meaning="heads of the delta attention"),
        "head_dim": linear.integer("head_dim", meaning="width of one head"),
        "conv": linear.integer("short_conv_kernel_size", meaning="tokens of the convolution"),
        "full_rank_gate": linear.flag("use_full_rank_gate", "gates from one projection, not two", False),
    }
    kinds = {"kda": delta, "mla": latent}
    whole = linear.indices("full_attn_layers", layers=layers, first=1, meaning="layers with full attention")
    deltas = linear.indices("kda_layers", layers=layers, first=1, meaning="layers with delta attention")
    if sorted((*whole, *deltas)) != list(range(layers)):
        raise r.error(
            f"{r.prefix}linear_attn_config: full_attn_layers and kda_layers must name each of the {layers} "
            "layers once"
        )
    names = ["mla" if i in set(whole) else "kda" for i in range(layers)]
    moe = routed(r, scoring_of(r, "moe_router_activation_func"), score_bias=True)
    moe |= shared(r, moe["expert_ffn"]) | groups(r, "top2-sum", "num_expert_group", "topk_group")
    r.refuse_unless("topk_method", "noaux_tc", "how experts are chosen")
    maybe: dict[str, Any] = {"absent": None, "null": None}
    row = r.integer("routed_expert_hidden_size", meaning="width of the rows that experts get", **maybe)
    if row is not None:
        normed = r.flag("latent_moe_use_norm", "norm of the experts' rows", False)
        moe |= {"latent": row} | ({"latent_norm": True} if normed else {})
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    notes = []
    block = r.integer("attn_res_block_size", meaning="layers of one attention residual", **maybe)
    if block is not None:
        notes.append(f"attention residuals over blocks of {block} layers: neither counted nor priced")
    fields |= attention_fields(names, kinds) | ffn_fields(dense_first(r, layers), moe, width)
    return fields | mtp(r) | ({"not_modelled": notes} if notes else {})
