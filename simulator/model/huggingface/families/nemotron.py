"""Nemotron: the dense models with squared ReLU, and Nemotron-H, a hybrid whose layers are one half each."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED, layer_kind
from moesim.simulator.model.huggingface.parts import gqa, groups, routed
from moesim.simulator.model.huggingface.reader import Reader, attention_fields, core, family, ffn_fields
from moesim.simulator.model.shape import MAX_LAYERS, NONE

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Layers of hybrid_override_pattern (configuration_nemotron_h.py of the published models)."""
_BLOCKS = {name: name for name in ("mamba", "attention", "mlp", "moe")}


@family("nemotron", "NemotronForCausalLM")
def nemotron(r: Reader) -> dict[str, Any]:
    """Nemotron-4, Minitron and Nemotron 3 8B: layer norms with biases, and an FFN without gate."""
    fields = core(r, activations=("relu2",))
    attention = gqa(r, bias_key="attention_bias")
    ffn_bias = r.flag("mlp_bias", "bias of the FFN projections", False)
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    extra = {"norm": "layernorm", "ffn_gated": False, "ffn_bias": ffn_bias}
    return fields | extra | {"attention": attention, "dense_ffn": width}


@family("nemotron_h", "NemotronHForCausalLM")
def nemotron_h(r: Reader) -> dict[str, Any]:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: every layer is a mixer, an attention, an FFN or experts.

    The attention has no rotary embedding and the FFN no gate (modeling_nemotron_h.py).
    """
    blocks = _blocks(r, "hybrid_override_pattern", "layers_block_type")
    stated = r.integer("num_hidden_layers", meaning="layers", absent=len(blocks))
    if stated != len(blocks):
        raise r.error(
            f"{r.prefix}num_hidden_layers={stated} but the pattern of the layers has {len(blocks)} entries; "
            "the numbers must be equal"
        )
    fields = core(r, layers=stated, activations=("relu2",), activation_key="mlp_hidden_act")
    for key in ("use_bias", "mlp_bias", "mamba_proj_bias"):
        r.refuse_unless(key, False, "bias of the projections")
    names = [name if name in ("mamba", "attention") else NONE for name in blocks]
    halves = [{"mlp": DENSE, "moe": ROUTED}.get(name, NONE) for name in blocks]
    kinds: dict[str, dict[str, Any]] = {}
    if "mamba" in blocks:
        kinds["mamba"] = {
            "kind": "mamba2",
            "heads": r.integer("mamba_num_heads", meaning="heads of the mixer"),
            "head_dim": r.integer("mamba_head_dim", meaning="width of a mixer's head"),
            "groups": r.integer("n_groups", meaning="groups of the mixer's heads"),
            "state": r.integer("ssm_state_size", meaning="state of a mixer's head"),
            "conv": r.integer("conv_kernel", meaning="tokens of the convolution"),
            "conv_bias": r.flag("use_conv_bias", "bias of the convolution"),
            "chunk": r.integer("chunk_size", meaning="tokens of one chunk"),
        }
    if "attention" in blocks:
        kinds["attention"] = gqa(r, bias_key="attention_bias") | {"rotary": False}
    moe = _experts(r) if "moe" in blocks else None
    width = r.integer("intermediate_size", meaning="width of the dense FFN") if "mlp" in blocks else None
    fields |= attention_fields(names, kinds) | ffn_fields(halves, moe, width) | {"ffn_gated": False}
    return fields | _modules(r, kinds, moe)


def _blocks(r: Reader, pattern_key: str, list_key: str) -> tuple[str, ...]:
    """Kinds of the layers, from the letters of a pattern or from a list of names."""
    if r.has(list_key):
        r.seen.add(pattern_key)
        value = r.config[list_key]
        known = max(1, min(len(value), MAX_LAYERS)) if isinstance(value, list) else 1
        return r.per_layer(list_key, layers=known, legal=_BLOCKS, meaning="kind of a layer")
    pattern = r.text(pattern_key, meaning="letters of the layers, M mixer, * attention, - FFN, E experts")
    if len(pattern) > MAX_LAYERS or not pattern:
        raise r.error(f"{r.prefix}{pattern_key} has {len(pattern)} letters; 1 to {MAX_LAYERS} are legal")
    for index, letter in enumerate(pattern):
        if letter not in _LETTERS:
            raise r.error(
                f"{r.prefix}{pattern_key}: layer {index} is {letter!r}, which is not modelled; known: "
                f"{', '.join(_LETTERS)}"
            )
    return tuple(_LETTERS[letter] for letter in pattern)


def _experts(r: Reader) -> dict[str, Any]:
    moe = routed(r, "sigmoid", score_bias=True) | {"expert_gated": False}
    moe |= groups(r, "top2-sum")
    if r.integer("n_shared_experts", meaning="shared experts", least=0, absent=0, null=0):
        # The key is the width of all shared experts together (NemotronHMOE).
        width = r.integer("moe_shared_expert_intermediate_size", meaning="width of the shared experts")
        moe |= {"shared_experts": 1, "shared_ffn": width}
    latent = r.integer(
        "moe_latent_size", meaning="width of the rows that experts get", absent=None, null=None
    )
    return moe | ({"latent": latent} if latent else {})


def _modules(r: Reader, kinds: dict[str, Any], moe: dict[str, Any] | None) -> dict[str, Any]:
    """MTP modules, whose pattern is an attention followed by experts or an FFN."""
    count = r.integer("num_nextn_predict_layers", meaning="MTP modules", least=0, absent=0, null=0)
    keys = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if not count:
        r.seen.update(keys)
        return {}
    blocks = _blocks(r, *keys)
    if moe is None or blocks != ("attention", "moe") or "attention" not in kinds:
        raise r.error(
            f"{r.prefix}{keys[1]}: MTP modules of {', '.join(blocks)} are not modelled; only attention and "
            "moe can be imported"
        )
    return {"mtp_layers": count, "mtp_layer": layer_kind(ROUTED, "attention")}
