"""Families with files of a few models each, from Granite and Hunyuan to ERNIE 4.5, Jamba and GPT-2."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED, layer_kind
from moesim.simulator.model.huggingface.families.llama import dense_ffn
from moesim.simulator.model.huggingface.parts import (
    deepseek_experts,
    dense_then_experts,
    gqa,
    groups,
    mla,
    routed,
    scoring_of,
    shared,
    windowed,
    with_windows,
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


@family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM")
def ernie(r: Reader) -> dict[str, Any]:
    """ERNIE 4.5 with experts; the balance bias is part of the modelling code (Ernie4_5_MoeStatics)."""
    fields = core(r)
    layers = fields["n_layers"]
    r.refuse_unless("use_bias", False, "bias of the projections")
    moe = routed(r, "softmax", score_bias=True)
    moe |= shared(r, moe["expert_ffn"], "moe_num_shared_experts")
    start = r.integer("moe_layer_start_index", meaning="first layer that may have experts", least=0)
    # -1 and null mean the last layer (Ernie4_5_MoeConfig).
    last = {"absent": layers - 1, "null": layers - 1}
    end = r.integer("moe_layer_end_index", meaning="last layer that may have experts", least=-1, **last)
    end = layers - 1 if end == -1 else end
    every = r.integer("moe_layer_interval", meaning="every n-th layer between has experts", absent=1)
    names = [ROUTED if start <= i <= end and (i + 1) % every == 0 else DENSE for i in range(layers)]
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    return fields | {"attention": gqa(r)} | ffn_fields(names, moe, width) | mtp(r)


@family("dots1", "Dots1ForCausalLM")
def dots1(r: Reader) -> dict[str, Any]:
    """dots.llm1: norms of queries and keys, and DeepSeek-V3's gate (Dots1TopkRouter)."""
    fields = core(r)
    attention = with_windows(r, gqa(r, bias_key="attention_bias", qk_norm=True), fields["n_layers"])
    moe = deepseek_experts(r, method="noaux_tc", scoring="sigmoid")
    return fields | attention | dense_then_experts(r, fields["n_layers"], moe)


@family("phimoe", "PhiMoEForCausalLM", "PhimoeForCausalLM")
def phimoe(r: Reader) -> dict[str, Any]:
    """Phi-3.5-MoE: layer norms with biases, biases of all projections of the attention."""
    fields = core(r) | {"norm": "layernorm"}  # PhimoeDecoderLayer has LayerNorm whatever the eps is called
    notes = []
    if r.flag("lm_head_bias", "bias of the head", False):
        notes.append("the bias of the head (one number a token of the vocabulary) is left out")
    moe = routed(r, "softmax", width=("intermediate_size",))
    attention = with_windows(r, gqa(r, bias_key="attention_bias"), fields["n_layers"])
    return fields | attention | {"moe": moe, "not_modelled": notes}


@family("dbrx", "DbrxForCausalLM")
def dbrx(r: Reader) -> dict[str, Any]:
    """DBRX: its layer norms have no bias, so they have RMSNorm's sizes."""
    fields = core(r, layers=r.layers("n_layers"), activation="silu")
    attention, ffn = r.inner("attn_config", "attention"), r.inner("ffn_config", "experts")
    heads = r.integer("n_heads", meaning="query heads")
    hidden = fields["hidden"]
    if hidden % heads:
        raise r.error(f"{r.prefix}n_heads={heads} does not divide d_model={hidden}")
    gated = {
        "experts": ffn.integer("moe_num_experts", meaning="routed experts"),
        "top_k": ffn.integer("moe_top_k", meaning="experts a token"),
        "expert_ffn": ffn.integer("ffn_hidden_size", meaning="width of one expert"),
        "scoring": "softmax",
    }
    kv_heads = attention.integer("kv_n_heads", meaning="key and value heads")
    grouped = {"kind": "gqa", "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads}
    return fields | {"attention": grouped, "moe": gated}


@family("olmoe", "OlmoeForCausalLM")
def olmoe(r: Reader) -> dict[str, Any]:
    """OLMoE: norms over all heads of queries and keys together (OlmoeAttention)."""
    fields = core(r)
    moe = routed(r, "softmax", width=("intermediate_size",))
    attention = gqa(r, kv_default=True, bias_key="attention_bias", qk_norm="all-heads")
    return fields | {"attention": attention, "moe": moe}


@family("jamba", "JambaForCausalLM")
def jamba(r: Reader) -> dict[str, Any]:
    """Jamba: Mamba layers, some an attention without rotary embedding; experts in every second layer."""
    fields = core(r)
    layers, hidden = fields["n_layers"], fields["hidden"]
    r.refuse_unless("mamba_proj_bias", False, "bias of the mixer's projections")
    auto = r.config.get("mamba_dt_rank") == "auto"
    rank = 0 if auto else r.integer("mamba_dt_rank", meaning="rank of the step width")
    r.seen.add("mamba_dt_rank")
    r.refuse_unless("mamba_conv_bias", True, "bias of the mixer's convolution")
    mamba = {
        "kind": "mamba",
        "inner": hidden * r.integer("mamba_expand", meaning="inner width over the hidden size"),
        "state": r.integer("mamba_d_state", meaning="state of the mixer"),
        "dt_rank": rank or -(-hidden // 16),  # "auto" means the hidden size / 16, rounded up (JambaConfig)
        "conv": r.integer("mamba_d_conv", meaning="tokens of the convolution"),
        "inner_norms": True,
    }
    kinds = {"mamba": mamba, "attention": gqa(r) | {"rotary": False}}
    names = ["attention" if chosen else "mamba" for chosen in _every(r, layers, "attn_layer")]
    halves = [ROUTED if chosen else DENSE for chosen in _every(r, layers, "expert_layer")]
    moe = routed(r, "softmax", width=("intermediate_size",))
    if moe["experts"] == 1:
        halves = [DENSE] * layers
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    return fields | attention_fields(names, kinds) | ffn_fields(halves, moe, width)


def _every(r: Reader, layers: int, name: str) -> list[bool]:
    period = r.integer(f"{name}_period", meaning="every n-th layer")
    offset = r.integer(f"{name}_offset", meaning="first such layer", least=0)
    return [i % period == offset for i in range(layers)]


@family("gpt2", "GPT2LMHeadModel")
def gpt2(r: Reader) -> dict[str, Any]:
    """GPT-2: learned positions, layer norms and biases; the head is the table (GPT2LMHeadModel)."""
    gelu = ("gelu_new", "gelu", "gelu_pytorch_tanh")
    fields = core(
        r, layers=r.layers("n_layer"), activations=gelu, activation_key="activation_function", tied=True
    )
    hidden = fields["hidden"]
    heads = r.integer("n_head", meaning="heads")
    if hidden % heads:
        raise r.error(f"{r.prefix}n_head={heads} does not divide n_embd={hidden}")
    attention = {
        "kind": "gqa", "heads": heads, "kv_heads": heads, "head_dim": hidden // heads,
        "qkv_bias": True, "o_bias": True, "rotary": False,
    }  # fmt: skip
    # An absent or null n_inner means four times the hidden size (GPT2Config).
    width = r.integer("n_inner", meaning="width of the FFN", absent=4 * hidden, null=4 * hidden)
    return fields | {
        "attention": attention,
        "dense_ffn": width,
        "ffn_gated": False,
        "ffn_bias": True,
        "norm": "layernorm",
        "learned_positions": r.integer("n_positions", "n_ctx", meaning="rows of the table of positions"),
    }


@family("granite", "GraniteForCausalLM")
def granite(r: Reader) -> dict[str, Any]:
    """Granite 3, dense: Llama's layers with factors that change no size."""
    fields = core(r)
    attention = gqa(r, kv_default=True, bias_key="attention_bias")
    return fields | {"attention": attention, "dense_ffn": dense_ffn(r)}


@family("granitemoe", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", also=("granitemoeshared",))
def granite_moe(r: Reader) -> dict[str, Any]:
    """Granite 3 with experts; `shared_intermediate_size` adds a shared expert (GraniteMoeShared)."""
    fields = core(r)
    moe = routed(r, "softmax", width=("intermediate_size",))
    width = r.integer("shared_intermediate_size", meaning="width of the shared expert", least=0, absent=0)
    moe |= {"shared_experts": 1, "shared_ffn": width} if width else {}
    return fields | {"attention": gqa(r, kv_default=True, bias_key="attention_bias"), "moe": moe}


@family("granitemoehybrid", "GraniteMoeHybridForCausalLM")
def granite_hybrid(r: Reader) -> dict[str, Any]:
    """Granite 4 H: Mamba-2 in most layers, and a feed-forward half in every layer.

    The shared FFN stands alone where there are no experts (GraniteMoeHybridDecoderLayer).
    """
    fields = core(r)
    layers, hidden = fields["n_layers"], fields["hidden"]
    r.refuse_unless("mamba_proj_bias", False, "bias of the mixer's projections")
    heads = r.integer("mamba_n_heads", meaning="heads of the mixer")
    inner = hidden * r.integer("mamba_expand", meaning="inner width over the hidden size")
    stated = r.take(("mamba_d_head",), "width of a mixer's head")
    if stated not in ("auto", inner // heads) or inner % heads:
        raise r.error(
            f"{r.prefix}mamba_d_head={stated!r} and mamba_n_heads={heads} must multiply to mamba_expand "
            f"times hidden_size, {inner}"
        )
    mixer = {
        "kind": "mamba2",
        "heads": heads,
        "head_dim": inner // heads,
        "groups": r.integer("mamba_n_groups", meaning="groups of the mixer's heads"),
        "state": r.integer("mamba_d_state", meaning="state of a mixer's head"),
        "conv": r.integer("mamba_d_conv", meaning="tokens of the convolution"),
        "conv_bias": r.flag("mamba_conv_bias", "bias of the convolution"),
        "chunk": r.integer("mamba_chunk_size", meaning="tokens of one chunk"),
    }
    rotary = r.take(("position_embedding_type",), "rope for a rotary embedding", None) == "rope"
    attention = gqa(r, kv_default=True, bias_key="attention_bias") | ({} if rotary else {"rotary": False})
    legal = {"mamba": "mamba", "linear_attention": "mamba", "attention": "full", "full_attention": "full"}
    keys = ("layer_types", "layers_block_type")
    names = r.per_layer(*keys, layers=layers, legal=legal, meaning="mixer or attention")
    fields |= attention_fields(names, {"mamba": mixer, "full": attention})
    width = r.integer("shared_intermediate_size", meaning="width of the shared FFN")
    if not r.has("num_local_experts") or r.config["num_local_experts"] == 0:
        r.seen.update(("num_local_experts", "num_experts_per_tok", "intermediate_size"))
        return fields | {"dense_ffn": width}
    moe = routed(r, "softmax", width=("intermediate_size",))
    return fields | {"moe": moe | {"shared_experts": 1, "shared_ffn": width}}


@family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", also=("hunyuan",))
def hunyuan(r: Reader) -> dict[str, Any]:
    """Hunyuan A13B: one shared expert as wide as a routed one; numbers may be lists with one entry a layer.

    Norms of queries and keys and the shared expert are part of the modelling code (HunYuanMoEV1)."""
    fields = core(r)
    layers = fields["n_layers"]
    r.refuse_unless("use_cla", False, "layers that share keys and values")
    r.refuse_unless("mlp_bias", False, "bias of the FFN projections")
    r.refuse_unless("use_mixed_mlp_moe", True, "experts beside a shared FFN")
    r.refuse_unless("use_qk_norm", True, "norms of queries and keys")
    r.refuse_unless("moe_layer_num_skipped", 0, "layers without experts")
    width_key = "moe_intermediate_size" if r.has("moe_intermediate_size") else "intermediate_size"
    r.seen.update(("intermediate_size", "num_shared_expert"))
    count = 1
    if r.has("num_shared_expert"):
        count = r.uniform("num_shared_expert", layers=layers, meaning="shared experts")
    width = r.uniform(width_key, layers=layers, meaning="width of one expert")
    moe = {
        "experts": r.uniform("num_experts", layers=layers, meaning="routed experts"),
        "top_k": r.uniform("moe_topk", layers=layers, meaning="experts a token"),
        "expert_ffn": width,
        "scoring": "softmax",
        "shared_experts": count,
        "shared_ffn": width,
    }
    return fields | {"attention": gqa(r, bias_key="attention_bias", qk_norm=True), "moe": moe}


@family("hy_v3", "HYV3ForCausalLM")
def hunyuan_v3(r: Reader) -> dict[str, Any]:
    """Hunyuan 3; norms of queries and keys, a sigmoid and a balance bias are fixed in the code (HYV3)."""
    fields = core(r)
    r.refuse_unless("mlp_bias", False, "bias of the FFN projections")
    attention = gqa(r, own_head_dim=True, bias_key="attention_bias", qk_norm=True)
    width = ("moe_intermediate_size", "expert_hidden_dim")
    moe = routed(r, "sigmoid", width=width, score_bias=True)
    moe |= shared(r, moe["expert_ffn"])
    return fields | {"attention": attention} | dense_then_experts(r, fields["n_layers"], moe) | mtp(r)


@family("longcat_flash", "LongcatFlashForCausalLM")
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
    shortcut = "the shortcut over which experts exchange rows while the next attention and FFN compute"
    note = f"{shortcut}: transfers are hidden as in other models only"
    ffn = ffn_fields((ROUTED, DENSE) * (layers // 2), moe, width)
    return fields | {"attention": mla(r)} | ffn | {"not_modelled": [note]}


@family("mimo_v2_flash", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", also=("mimo_v2",))
def mimo_v2(r: Reader) -> dict[str, Any]:
    """MiMo-V2-Flash."""
    fields = core(r)
    layers = fields["n_layers"]
    window = r.integer("sliding_window", "sliding_window_size", meaning="attention window, tokens")
    r.seen.add("attention_chunk_size")
    bias = r.flag("attention_bias", "bias of queries, keys and values", False)
    full = _attention(r, "", bias, "add_full_attention_sink_bias")
    sliding = windowed(_attention(r, "swa_", bias, "add_swa_attention_sink_bias"), window)
    names = r.per_layer(
        "hybrid_layer_pattern", layers=layers, legal={0: "full", 1: "sliding"}, meaning="1 for a window"
    )
    moe = deepseek_experts(r, method="noaux_tc")
    attention = attention_fields(names, {"full": full, "sliding": sliding})
    return fields | attention | dense_then_experts(r, layers, moe) | mtp(r)


def _attention(r: Reader, prefix: str, bias: bool, sinks: str) -> dict[str, Any]:
    return {
        "kind": "gqa",
        "heads": r.integer(f"{prefix}num_attention_heads", meaning="query heads"),
        "kv_heads": r.integer(f"{prefix}num_key_value_heads", meaning="key and value heads"),
        "head_dim": r.integer(f"{prefix}head_dim", meaning="width of a query or key head"),
        "v_head_dim": r.integer(f"{prefix}v_head_dim", meaning="width of a value head"),
        "qkv_bias": bias,
        "sinks": r.flag(sinks, "one logit a head that joins every softmax"),
    }


_WINDOWS = {"full_attention": "full", "sliding_attention": "sliding"}


@family("step3p5", "Step3p5ForCausalLM", "Step3p7FlashForCausalLM", also=("step3p7", "step3p7_text"))
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
    heads: dict[str, int] = {}
    if r.has("attention_other_setting"):
        o, of_window = (
            r.inner("attention_other_setting", "heads of the layers with a window"),
            "with a window",
        )
        heads = {
            "heads": o.integer("num_attention_heads", meaning=f"query heads of layers {of_window}"),
            "kv_heads": o.integer(
                "num_attention_groups", meaning=f"key and value heads of layers {of_window}"
            ),
            "head_dim": o.integer("head_dim", meaning=f"width of a head in layers {of_window}"),
        }
    kinds = {"full": full, "sliding": windowed(full | heads, window)}
    modules = r.integer("num_nextn_predict_layers", meaning="MTP modules", least=0, absent=0, null=0)
    if r.has("layer_types"):
        meaning = "attention of a layer"
        names = r.per_layer("layer_types", layers=layers, legal=_WINDOWS, meaning=meaning, further=modules)
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


def _halves(r: Reader, layers: int) -> tuple[str, ...]:
    if not r.has("moe_layers_enum"):
        first = r.integer("first_k_dense_replace", meaning="first layers that stay dense", least=0)
        return tuple(DENSE if i < first else ROUTED for i in range(layers))
    r.seen.add("first_k_dense_replace")
    chosen = set(r.indices("moe_layers_enum", layers=layers, meaning="layers with experts"))
    return tuple(ROUTED if i in chosen else DENSE for i in range(layers))


@family("gpt_oss", "GptOssForCausalLM")
def gpt_oss(r: Reader) -> dict[str, Any]:
    """gpt-oss 20B and 120B; sinks, router bias and expert biases are fixed in the modelling code (GptOss)."""
    fields = core(r)
    attention = gqa(r, own_head_dim=True, bias_key="attention_bias", sinks=True)
    window = r.integer("sliding_window", meaning="attention window, tokens")
    layers, meaning = fields["n_layers"], "attention of a layer"
    names = r.per_layer("layer_types", layers=layers, legal=_WINDOWS, meaning=meaning)
    kinds = {"sliding": windowed(attention, window), "full": attention}
    moe = routed(r, "softmax", width=("intermediate_size",), router_bias=True, expert_bias=True)
    if "numerics" in fields and r.has("swiglu_limit"):
        r.take(("swiglu_limit",), "clamp of the experts' activation; for trainers only")
    return fields | attention_fields(names, kinds) | {"moe": moe}


@family("bailing_moe", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", also=("bailing_moe_v2",))
def bailing_moe(r: Reader) -> dict[str, Any]:
    """Ling-lite, Ling-plus and Ling 2.0.

    What the first generation leaves out is as in modeling_bailing_moe.py: a softmax, no balance bias, no
    norms of queries and keys.
    """
    fields = core(r)
    layers = fields["n_layers"]
    r.refuse_unless("norm_head", False, "normalised weights of the head")
    r.refuse_unless("multi_gate", False, "gates of their own for images and sound")
    qkv_bias = r.flag("use_qkv_bias", "bias of queries, keys and values")
    o_bias = r.flag("use_bias", "bias of the attention's output and of the FFN", False)
    if o_bias:
        raise r.error(
            f"{r.prefix}use_bias=true is not modelled (bias of the experts); only false can be imported"
        )
    norms = r.flag("use_qk_norm", "norms of queries and keys", False)
    bias = r.flag("moe_router_enable_expert_bias", "balance bias of the gate", False)
    moe = routed(r, scoring_of(r, "score_function", absent="softmax"), score_bias=bias)
    width = r.integer(
        "moe_shared_expert_intermediate_size", meaning="width of one shared expert", absent=moe["expert_ffn"]
    )
    moe |= shared(r, width) | groups(r, "top2-sum")
    dense = r.integer("intermediate_size", meaning="width of the dense FFN")
    attention = gqa(r, qkv_bias=qkv_bias, qk_norm=norms)
    return fields | {"attention": attention} | ffn_fields(dense_first(r, layers), moe, dense) | mtp(r)


@family("bailing_hybrid", "BailingHybridForCausalLM")
def bailing_hybrid(r: Reader) -> dict[str, Any]:
    """Ling 3.0 Flash: delta attention with full-rank gates, and latent attention with a gate a head.

    Both gates and the sigmoid of the router are fixed in the modelling code (BailingHybrid).
    """
    fields = core(r)
    layers = fields["n_layers"]
    r.seen.update(("short_conv_kernel_size", "layer_group_size"))
    delta = {
        "kind": "kda",
        "heads": r.integer("linear_num_heads", meaning="heads of the delta attention"),
        "head_dim": r.integer("linear_head_dim", meaning="width of a head of the delta attention"),
        "conv": r.integer("linear_conv_kernel_dim", meaning="tokens of the convolution"),
        "full_rank_gate": True,
        "full_rank_decay": True,
    }
    kinds = {"kda": delta, "mla": mla(r, full_query=True, output_gate="head")}
    legal = {"linear_attention": "kda", "full_attention": "mla"}
    names = r.per_layer("layer_types", layers=layers, legal=legal, meaning="attention of a layer")
    moe = routed(r, "sigmoid", score_bias=True)
    moe |= shared(r, moe["expert_ffn"]) | groups(r, "top2-sum", "num_expert_group", "topk_group")
    return fields | attention_fields(names, kinds) | dense_then_experts(r, layers, moe) | mtp(r)
