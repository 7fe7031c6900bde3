"""Imports Hugging Face `config.json` files from the keys that they state, never from class defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import resolved
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import dump_mapping, load_mapping
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.model.hf_reader import Reader, Understood
from moesim.simulator.model.layer_pattern import MAX_LAYERS
from moesim.simulator.model.shape import ModelShape

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,79}")
"""Names that a configuration may give its model; anything else, such as a path, is no name."""

NESTED = ("text_config", "llm_config")
"""Keys under which the files of multimodal models describe the language model."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A shape, with the keys of its file that were understood and those that were ignored.

    `shape.not_modelled` names the features that are left out.
    """

    shape: ModelShape
    understood: tuple[Understood, ...]
    ignored: tuple[str, ...]


def import_hf(path: str | Path, name: str | None = None) -> ImportedModel:
    """Read a Hugging Face config.json of a known family.

    `name`: the model's; None takes it from the file, or else writes the family and the parameters.
    Raises InputError naming file and key for an unknown `model_type`, a missing key, a value of the
    wrong type, and a feature that would change the shape in a way that is not modelled.
    """
    imported = shape_from_config(load_mapping(path), str(path))
    if name is None:
        return imported
    if not _NAME.fullmatch(name):
        raise InputError(
            f"name {name[:80]!r}: write 2 to 80 letters, digits, dots, dashes and underscores, beginning "
            "with a letter or digit"
        )
    return replace(imported, shape=imported.shape.model_copy(update={"name": name}))


def shape_from_config(data: dict[str, Any], place: str) -> ImportedModel:
    """Do as `import_hf` for a mapping that was already read from `place`."""
    config, prefix = data, ""
    if str(data.get("model_type")) not in FAMILIES:
        for key in NESTED:
            if isinstance(inner := data.get(key), dict):
                config, prefix = inner, f"{key}."
    reader = Reader(config, place, prefix)
    family = reader.text("model_type", "family")
    if family not in FAMILIES:
        raise InputError(
            f"{place}: {prefix}model_type={family!r} is not a family that can be imported"
            f"{nearest(family, list(FAMILIES))}; known families: {', '.join(sorted(FAMILIES))}. Another "
            "model can be described by hand in a model file (see the shipped ones for the keys)."
        )
    fields = _common(reader) | FAMILIES[family](reader)
    left_out = list(fields.pop("not_modelled", ()))
    if prefix:
        left_out.append(f"everything outside {prefix[:-1]} (the file describes a multimodal model)")
    stated = _stated_name(data, place)
    fields["name"] = stated or family
    fields["source"] = {
        "kind": "published",
        "reference": f"Hugging Face config {Path(place).name} ({family})",
    }
    shape = validate_model(ModelShape, fields | {"not_modelled": left_out}, place)
    if stated is None:
        size = parameters_total(shape)
        counted = f"{size / 1e12:.3g}t" if size >= 1e12 else f"{size / 1e9:.3g}b"
        shape = shape.model_copy(update={"name": f"{family}-{counted}"})
    outside = [key for key in data if prefix and f"{key}." != prefix]
    return ImportedModel(shape, tuple(reader.understood), (*outside, *reader.unread()))


def to_yaml(shape: ModelShape) -> str:
    """Write a model file from which `load_model` reads an equal shape; absent parts are left out."""
    return dump_mapping(shape.model_dump(mode="json", exclude_none=True))


def _stated_name(data: Mapping[str, Any], place: str) -> str | None:
    """The name of a model: its file's, that in the file, or that of Hugging Face's download folder.

    None where only the name of some folder is known, which need not be the model's.
    """
    path = Path(place)
    if path.stem != "config":
        return path.stem
    written = data.get("_name_or_path")
    last = written.rstrip("/").rpartition("/")[2] if isinstance(written, str) else ""
    if _NAME.fullmatch(last):
        return last
    cached = next((part for part in resolved(path).parts if part.startswith("models--")), "")
    return cached.rpartition("--")[2] or None


def _common(r: Reader) -> dict[str, Any]:
    r.refuse_unless("hidden_act", "silu", "activation of the FFN: gate and up projection with SiLU")
    return {
        "n_layers": _layers(r),
        "hidden": r.integer("hidden_size", meaning="hidden size"),
        "vocab": r.integer("vocab_size", meaning="vocabulary"),
        "tied_embeddings": r.flag("tie_word_embeddings", "the head shares the embedding table"),
        **_numerics(r),
    }


def _numerics(r: Reader) -> dict[str, Any]:
    """Read the numbers that only a trainer needs, where the file states them."""
    numbers = {
        "rope_theta": r.positive("rope_theta", "base of the rotary embedding; for trainers only"),
        "norm_epsilon": r.positive("rms_norm_eps", "epsilon of RMSNorm; for trainers only"),
        "router_scale": r.positive(
            "routed_scaling_factor", "factor on the experts' weights; for trainers only"
        ),
    }
    stated = {name: value for name, value in numbers.items() if value is not None}
    return {"numerics": stated} if stated else {}


def _layers(r: Reader) -> int:
    layers: int = r.integer("num_hidden_layers", meaning="layers")
    if layers > MAX_LAYERS:
        raise InputError(
            f"{r.place}: {r.prefix}num_hidden_layers={layers} is above the limit of {MAX_LAYERS}"
        )
    return layers


def _gqa(
    r: Reader, *, kv_default: bool = False, own_head_dim: bool = False, qkv_bias: bool | None = None
) -> dict[str, Any]:
    """Read the keys of grouped-query attention.

    `own_head_dim` is true for families whose head_dim is independent of the hidden size; in the others an
    absent or null head_dim means hidden size / heads by definition of the format, not by a class default.
    With `kv_default` an absent or null num_key_value_heads means num_attention_heads (Llama). `qkv_bias` None
    reads the bias from attention_bias, which also gives the output projection a bias.
    """
    heads = r.integer("num_attention_heads", meaning="query heads")
    kv_absent = {"absent": heads, "null": heads} if kv_default else {}
    kv_heads = r.integer("num_key_value_heads", meaning="key and value heads", **kv_absent)
    hidden = r.config["hidden_size"]
    if own_head_dim or r.config.get("head_dim") is not None:
        head_dim = r.integer("head_dim", meaning="width of one head")
    else:
        r.seen.add("head_dim")
        if hidden % heads:
            raise InputError(
                f"{r.place}: {r.prefix}num_attention_heads={heads} does not divide hidden_size={hidden} and "
                "head_dim is absent; add head_dim"
            )
        head_dim = hidden // heads
        r.understood.append(Understood(f"{r.prefix}head_dim", head_dim, "hidden_size / num_attention_heads"))
    bias = r.flag("attention_bias", "bias of the attention projections", False) if qkv_bias is None else False
    return {
        "kind": "gqa",
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "qkv_bias": qkv_bias or bias,
        "o_bias": bias,
    }


def _sliding_window(r: Reader) -> list[str]:
    if r.flag("use_sliding_window", "sliding-window attention is used", True) is False:
        r.seen.add("sliding_window")
        return []
    window = r.integer("sliding_window", meaning="attention window, tokens", absent=None, null=None)
    if window is None:
        return []
    return [f"sliding_window={window}: attention is priced in full, too high for sequences beyond the window"]


def _dense_ffn(r: Reader) -> int:
    r.refuse_unless("mlp_bias", False, "bias of the FFN projections")
    return r.integer("intermediate_size", meaning="width of the dense FFN")  # type: ignore[no-any-return]


def _llama(r: Reader) -> dict[str, Any]:
    return {"attention": _gqa(r, kv_default=True), "dense_ffn": _dense_ffn(r)}


def _mistral(r: Reader) -> dict[str, Any]:
    attention = _gqa(r, qkv_bias=False)
    return {"attention": attention, "dense_ffn": _dense_ffn(r), "not_modelled": _sliding_window(r)}


def _qwen2(r: Reader) -> dict[str, Any]:
    attention = _gqa(r, qkv_bias=True)
    return {"attention": attention, "dense_ffn": _dense_ffn(r), "not_modelled": _sliding_window(r)}


def _qwen3(r: Reader) -> dict[str, Any]:
    attention = _gqa(r, own_head_dim=True) | {"qk_norm": True}
    return {"attention": attention, "dense_ffn": _dense_ffn(r), "not_modelled": _sliding_window(r)}


def _mixtral(r: Reader) -> dict[str, Any]:
    moe = {
        "experts": r.integer("num_local_experts", "num_experts", meaning="routed experts"),
        "top_k": r.integer("num_experts_per_tok", meaning="experts a token"),
        "expert_ffn": r.integer("intermediate_size", meaning="width of one expert"),
        "scoring": "softmax",
    }
    return {"attention": _gqa(r, qkv_bias=False), "moe": moe, "not_modelled": _sliding_window(r)}


def _qwen_moe(r: Reader) -> dict[str, Any]:
    layers = r.config["num_hidden_layers"]
    experts = r.integer("num_experts", "num_local_experts", meaning="routed experts")
    step = r.integer("decoder_sparse_step", meaning="every n-th layer has experts")
    only = r.take(("mlp_only_layers",), "layers that stay dense")
    if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
        raise InputError(f"{r.place}: {r.prefix}mlp_only_layers={only!r} must be a list of layer indices")
    dense = [i for i in range(layers) if i in only or (i + 1) % step]
    width = r.integer("intermediate_size", meaning="width of the dense FFN (unused where no layer is dense)")
    moe = {
        "experts": experts,
        "top_k": r.integer("num_experts_per_tok", meaning="experts a token"),
        "expert_ffn": r.integer("moe_intermediate_size", meaning="width of one expert"),
        "scoring": "softmax",
        "dense_layers": dense,
    }
    return {"moe": moe, "dense_ffn": width if dense else None, "not_modelled": _sliding_window(r)}


def _qwen3_moe(r: Reader) -> dict[str, Any]:
    return _qwen_moe(r) | {"attention": _gqa(r, own_head_dim=True) | {"qk_norm": True}}


def _qwen2_moe(r: Reader) -> dict[str, Any]:
    fields = _qwen_moe(r)
    shared = r.integer("shared_expert_intermediate_size", meaning="width of the shared expert")
    fields["moe"] |= {"shared_experts": 1, "shared_ffn": shared, "shared_gate": True}
    return fields | {"attention": _gqa(r, qkv_bias=True)}


def _mla(r: Reader) -> dict[str, Any]:
    r.refuse_unless("attention_bias", False, "bias of the attention projections")
    r.seen.add("num_key_value_heads")  # MLA expands to all heads; the file repeats the number
    return {
        "kind": "mla",
        "heads": r.integer("num_attention_heads", meaning="heads"),
        "q_lora_rank": r.integer(
            "q_lora_rank", meaning="width of the compressed query; null for none", null=None
        ),
        "kv_lora_rank": r.integer("kv_lora_rank", meaning="width of the compressed keys and values"),
        "qk_nope_dim": r.integer("qk_nope_head_dim", meaning="query-key width without rotation"),
        "qk_rope_dim": r.integer("qk_rope_head_dim", meaning="query-key width with rotation"),
        "v_dim": r.integer("v_head_dim", meaning="value width of one head"),
    }


_TOPK_METHODS: dict[str, tuple[str | None, bool]] = {
    "noaux_tc": ("top2-sum", True),
    "group_limited_greedy": ("best", False),
    "greedy": (None, False),
}
"""(ranking of the groups, whether a balance bias enters the choice) for every topk_method."""


def _deepseek_moe(r: Reader) -> dict[str, Any]:
    layers = r.config["num_hidden_layers"]
    first = r.integer("first_k_dense_replace", meaning="first layers that stay dense", least=0)
    every = r.integer("moe_layer_freq", meaning="every n-th layer after them has experts")
    method = r.text("topk_method", "how groups are ranked")
    if method not in _TOPK_METHODS:
        raise InputError(
            f"{r.place}: {r.prefix}topk_method={method!r} is not modelled; known: {', '.join(_TOPK_METHODS)}"
        )
    score, bias = _TOPK_METHODS[method]
    groups = r.integer("n_group", meaning="groups of experts", null=1)
    per_token = r.integer("topk_group", meaning="groups that a token may reach", null=1)
    width = r.integer("moe_intermediate_size", meaning="width of one expert, routed or shared")
    shared = r.integer("n_shared_experts", meaning="shared experts", least=0, null=0)
    limited = per_token < groups and score is not None
    return {
        "experts": r.integer("n_routed_experts", meaning="routed experts"),
        "top_k": r.integer("num_experts_per_tok", meaning="experts a token"),
        "expert_ffn": width,
        "shared_experts": shared,
        "shared_ffn": width if shared else 0,
        "groups": groups if limited else 1,
        "groups_per_token": per_token if limited else 1,
        "group_score": score if limited else None,
        "scoring": r.text("scoring_func", "scores from logits"),
        "score_bias": bias,
        "dense_layers": [i for i in range(layers) if i < first or i % every],
    }


def _deepseek(r: Reader) -> dict[str, Any]:
    moe = _deepseek_moe(r)
    width = r.integer("intermediate_size", meaning="width of the dense FFN (unused where no layer is dense)")
    return {"attention": _mla(r), "moe": moe, "dense_ffn": width if moe["dense_layers"] else None}


def _deepseek_v3(r: Reader) -> dict[str, Any]:
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    return _deepseek(r) | {"mtp_layers": r.integer(*keys, meaning="MTP modules", least=0)}


def _deepseek_v32(r: Reader) -> dict[str, Any]:
    """Read DeepSeek-V3's keys and those of the indexer."""
    fields = _deepseek_v3(r)
    fields["attention"] |= {
        "kind": "dsa",
        "indexer": {
            "heads": r.integer("index_n_heads", meaning="heads of the indexer"),
            "head_dim": r.integer("index_head_dim", meaning="width of one indexer head"),
            "top_k": r.integer("index_topk", meaning="keys that the indexer keeps for one query"),
        },
    }
    return fields


FAMILIES = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "kimi_k2": _deepseek_v3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "qwen2": _qwen2,
}
"""Function that reads the keys of each `model_type`."""
