"""Builds the model that the arguments describe, and recognises shipped models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.simulator.model.attention import GQA, MLA
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.meaning.given import Given
from moesim.simulator.trainers.megatron.layout import parse_frequency

_UNCOMPARED = ("name", "source", "not_modelled", "numerics", "published")
"""Keys of a model file that change neither sizes nor prices."""


def as_data(shape: ModelShape) -> dict[str, Any]:
    """A shape as the keys of a model file."""
    data: dict[str, Any] = shape.model_dump(mode="json", exclude_none=True)
    return data


def known_model(shape: ModelShape, base: Scenario) -> Any:
    """The base's model or the name of a shipped one, if it has the same sizes; else None."""
    if same_sizes(shape, base.shape):
        return base.to_dict()["model"]
    return next((name for name in shipped_models() if same_sizes(shape, load_model(name))), None)


def same_sizes(one: ModelShape, other: ModelShape, *but: str) -> bool:
    """Whether two shapes are the same model, whatever their names, sources and keys in `but`."""
    first, second = (
        {key: value for key, value in as_data(shape).items() if key not in (*_UNCOMPARED, *but)}
        for shape in (one, other)
    )
    return first == second


PATHS = {
    "num-layers": ("n_layers",),
    "hidden-size": ("hidden",),
    "ffn-hidden-size": ("dense_ffn",),
    "num-attention-heads": ("attention", "heads"),
    "num-query-groups": ("attention", "kv_heads"),
    "kv-channels": ("attention", "head_dim"),
    "num-experts": ("moe", "experts"),
    "moe-router-topk": ("moe", "top_k"),
    "moe-ffn-hidden-size": ("moe", "expert_ffn"),
    "mtp-num-layers": ("mtp_layers",),
    "vocab-size": ("vocab",),
    "padded-vocab-size": ("vocab",),
}
"""Where in a model file the value of an argument is."""


def changed_model(given: Given, base: ModelShape, name: str) -> ModelShape:
    """The base's shape with the stated sizes, and a row for each.

    Raises InputError for a size that the base's model does not have, and for sizes that do not fit together.
    """
    data = as_data(base)
    for argument, path in PATHS.items():
        if not given.has(argument):
            continue
        section = data
        if given.integer(argument, 0, least=0) == 0 and path[0] not in data:
            given.explain(argument, "base", f"the base's model {base.name} has no {path[0]} either")
            continue
        for part in path[:-1]:
            if part not in section:
                raise InputError(f"{given.place(argument)}: the base's model {base.name} has no {part}")
            section = section[part]
        if path[-1] not in section:
            text = f"the base's model {base.name} has no {'.'.join(path)}"
            given.explain(argument, "irrelevant", text)
            continue
        section[path[-1]] = given.integer(argument, 0, least=0)
        given.explain(argument, "key", f"model.{'.'.join(path)} = {section[path[-1]]}")
    if "moe" in data:  # a model that has fewer layers now has no dense ones beyond its last
        dense = data["moe"].get("dense_layers", ())
        data["moe"]["dense_layers"] = [layer for layer in dense if layer < data["n_layers"]]
    source = {"kind": "derived", "reference": f"{base.name}, changed by {name}"}
    return validate_model(ModelShape, data | {"name": name, "source": source}, "the model of the launch file")


VOCABULARY = (
    "vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by", "no-pad-vocab-size",
    "disable-pad-vocab-size",
)  # fmt: skip


def read_vocabulary(
    given: Given, model: Mapping[str, Any], base: Scenario, tp: int, stated: int | None
) -> int:
    """Rows of the embedding: padded as stated, else the vocabulary rounded up as Megatron-LM does.

    `model` is the rest of the model; `stated` is a vocabulary that the user gives. The base's vocabulary
    counts where the file has none and the rest is the base's model. Raises InputError with the remedy where
    the size is unknown.
    """
    for name in VOCABULARY:
        if given.has(name):
            given.explain(name, "key", "part of the model (vocab)")
    if given.has("padded-vocab-size"):
        return given.integer("padded-vocab-size", 0)
    if stated is not None:
        given.explain("vocab-size", "key", f"vocab {stated} by --vocab-size of this command")
        return _padded(given, stated, tp)
    if given.has("vocab-size"):
        return _padded(given, given.integer("vocab-size", 0), tp)
    if _is(model, base.shape):
        why = "the file names only a tokenizer, and the rest is the base's model"
        given.explain("vocab-size", "base", f"vocab = {base.shape.vocab}: {why}")
        return base.shape.vocab
    alike = [name for name in shipped_models() if _is(model, load_model(name))]
    hint = f" (the rest is {alike[0]}: --vocab-size {load_model(alike[0]).vocab})" if alike else ""
    raise InputError(
        "the size of the vocabulary is unknown: the file has neither --vocab-size nor --padded-vocab-size, "
        f"and tokenizers are not read; give --vocab-size N{hint}, or a --base with this model"
    )


def _padded(given: Given, size: int, tp: int) -> int:
    if given.flag("no-pad-vocab-size") or given.flag("disable-pad-vocab-size"):
        return size
    multiple = given.integer("make-vocab-size-divisible-by", 128) * tp
    return -(-size // multiple) * multiple


def _is(model: Mapping[str, Any], other: ModelShape) -> bool:
    """Whether the model has the sizes of another one, whose vocabulary it may then have."""
    shape = validate_model(ModelShape, {**model, "vocab": other.vocab}, "the model of the launch file")
    return same_sizes(shape, other, "mtp_layers")


NEEDED = ("num-layers", "hidden-size", "num-attention-heads")
"""Arguments without which Megatron-LM builds no model."""

MODEL_ARGUMENTS = (
    *NEEDED, "encoder-num-layers", "ffn-hidden-size", "group-query-attention", "num-query-groups",
    "kv-channels", "multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim",
    "qk-pos-emb-head-dim", "v-head-dim", "qk-layernorm", "num-experts", "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size", "moe-shared-expert-gate", "moe-layer-freq",
    "moe-router-topk", "moe-router-score-function", "moe-router-enable-expert-bias",
    "moe-router-num-groups", "moe-router-group-topk", "untie-embeddings-and-output-weights", "swiglu",
    "quick-geglu", "squared-relu", "openai-gelu", "normalization", "position-embedding-type",
    "use-rotary-position-embeddings", "no-position-embedding", "disable-bias-linear", "add-qkv-bias",
    "mtp-num-layers", "window-size", "window-attn-skip-freq", "softmax-type",
)  # fmt: skip
"""Arguments that describe the model, apart from its vocabulary."""


def read_shape(
    given: Given, base: Scenario, name: str, tp: int, vocab: int | None, like_base: bool
) -> ModelShape:
    """Set the scenario's model to the one that the arguments describe, and return its shape.

    The model is the base's where the arguments say nothing about it. `vocab` is a vocabulary that the user
    states. Raises InputError for a model that is described in part, and for one that is not modelled.
    """
    stated = [argument for argument in (*MODEL_ARGUMENTS, *VOCABULARY) if given.has(argument)]
    missing = [argument for argument in NEEDED if not given.has(argument)]
    if given.has("encoder-num-layers") and NEEDED[0] in missing:
        missing.remove(NEEDED[0])
    if missing and like_base:
        return _with_changes(given, base, name, stated)
    if len(missing) == len(NEEDED):
        for argument in stated:
            given.explain(argument, "base", "the file does not describe the whole model; the base's counts")
        given.explain("num-layers", "base", f"model = {base.shape.name}: the file describes none")
        given.keys["model"] = base.to_dict()["model"]
        return base.shape
    if missing:
        raise InputError(
            f"--{missing[0]} is missing: the file describes a model, and Megatron-LM needs it; add it"
        )
    data = _described(given, name, f"arguments of {name}")
    size = read_vocabulary(given, data, base, tp, vocab)
    shape = validate_model(ModelShape, {**data, "vocab": size}, "the model of the launch file")
    known = known_model(shape, base)
    given.keys["model"] = known or as_data(shape)
    what = "part of the model (model: ...)"
    if isinstance(known, str):
        what = f"model = {known}, which has these sizes"
    for argument in stated:
        if argument not in VOCABULARY:
            given.explain(argument, "key", what)
    return shape


def _with_changes(given: Given, base: Scenario, name: str, stated: list[str]) -> ModelShape:
    for argument in ("window-size", "softmax-type"):
        missing = not base.shape.features & {"sliding", "attention-sinks"}
        if argument in stated and missing and given.value(argument) != "vanilla":
            raise InputError(
                f"{given.place(argument)}: the base's model {base.shape.name} has none; give a --base with "
                "this model"
            )
    for argument in stated:
        if argument not in PATHS:
            text = f"the file does not describe the whole model; {base.shape.name}'s"
            given.explain(argument, "base", text)
    if not any(argument in PATHS for argument in stated):
        given.explain("num-layers", "base", f"model = {base.shape.name}: the file describes none")
        given.keys["model"] = base.to_dict()["model"]
        return base.shape
    shape = changed_model(given, base.shape, name)
    given.keys["model"] = known_model(shape, base) or as_data(shape)
    return shape


def _described(given: Given, name: str, reference: str) -> dict[str, Any]:
    """Keys of the model without its vocabulary."""
    layers = given.integer("num-layers" if given.has("num-layers") else "encoder-num-layers", 0, most=1000)
    hidden = given.integer("hidden-size", 0, most=10**7)
    gated = given.flag("swiglu") or given.flag("quick-geglu")
    ffn = given.integer("ffn-hidden-size", int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden)
    not_modelled = list(_norm_and_positions(given))
    biases = not given.flag("disable-bias-linear")
    moe = _experts(given, layers, ffn, biases)
    if biases and (moe is None or moe["dense_layers"]):
        not_modelled.append("biases of the feed-forward layers (no --disable-bias-linear)")
    if moe is not None and not gated:
        raise InputError(
            "the experts have no gate (--swiglu is missing), and experts of two projections are not "
            "modelled; add --swiglu"
        )
    dense = moe is None or bool(moe["dense_layers"])
    data: dict[str, Any] = {
        "name": name,
        "source": {"kind": "derived", "reference": reference},
        "n_layers": layers,
        "hidden": hidden,
        **_attentions(given, hidden, biases, layers),
        "ffn_gated": gated or not dense,
        "mtp_layers": given.integer("mtp-num-layers", 0, least=0, most=100),
        "tied_embeddings": not given.flag("untie-embeddings-and-output-weights"),
        "not_modelled": not_modelled,
    }
    if dense:
        data["dense_ffn"] = ffn
    if moe is not None:
        data["moe"] = moe
    return data


def _norm_and_positions(given: Given) -> tuple[str, ...]:
    notes = []
    if given.text("normalization", "LayerNorm", ("LayerNorm", "RMSNorm")) != "RMSNorm":
        text = "the real step is slower: LayerNorm is priced as RMSNorm"
        given.explain("normalization", "not priced", text)
        notes.append("LayerNorm, which is priced as RMSNorm")
    if position_embedding(given) in POSITIONS:
        note, text = POSITIONS[position_embedding(given)]
        given.explain("position-embedding-type", "not priced", text)
        notes.append(note)
    return tuple(notes)


POSITIONS = {
    "learned_absolute": (
        "learned position embeddings",
        "the real step is slower and it needs more memory: the table of learned positions is not priced",
    ),
    "alibi": (
        "ALiBi",
        "the real step is slower: the distances that ALiBi adds to the scores are not priced",
    ),
}
"""Kinds of positions that are not priced, with the note on the model and the meaning of the argument."""


def position_embedding(given: Given) -> str:
    """The kind of position embedding that Megatron-LM takes."""
    if given.flag("use-rotary-position-embeddings"):
        return "rope"
    kinds = ("learned_absolute", "rope", "mrope", "yarn", "relative", "none", "alibi")
    return given.text("position-embedding-type", "learned_absolute", kinds)


def _attention(given: Given, hidden: int, biases: bool) -> dict[str, Any]:
    heads = given.integer("num-attention-heads", 0, most=10**6)
    if given.flag("multi-latent-attention"):
        rank = given.integer("q-lora-rank", 0) if given.has("q-lora-rank") else None
        latent = MLA(
            heads=heads,
            q_lora_rank=rank,
            kv_lora_rank=given.integer("kv-lora-rank", 32),
            qk_nope_dim=given.integer("qk-head-dim", 128),
            qk_rope_dim=given.integer("qk-pos-emb-head-dim", 64),
            v_dim=given.integer("v-head-dim", 128),
        )
        return latent.model_dump(mode="json", exclude_none=True)
    if not given.has("kv-channels") and hidden % heads:
        raise InputError(f"{given.place('num-attention-heads')}: does not divide --hidden-size {hidden}")
    grouped = given.flag("group-query-attention")
    groups = given.integer("num-query-groups", 1) if grouped else heads
    if heads % groups:
        raise InputError(f"{given.place('num-query-groups')}: does not divide --num-attention-heads {heads}")
    if given.has("num-query-groups") and not grouped:
        text = (
            "Megatron-LM reads it only with --group-query-attention; every head has its own keys and values"
        )
        given.explain("num-query-groups", "irrelevant", text)
    attention = GQA(
        heads=heads,
        kv_heads=groups,
        head_dim=given.integer("kv-channels", hidden // heads),
        qkv_bias=biases or given.flag("add-qkv-bias"),
        o_bias=biases,
        qk_norm=given.flag("qk-layernorm"),
        rotary=position_embedding(given) in ("rope", "mrope", "yarn"),
    )
    return attention.model_dump(mode="json", exclude_none=True)


def _attentions(given: Given, hidden: int, biases: bool, layers: int) -> dict[str, Any]:
    """The attention of all layers, or attention with and without a window and the layers that have each."""
    attention = _attention(given, hidden, biases)
    if given.text("softmax-type", "vanilla", ("vanilla", "off-by-one", "learnable")) == "learnable":
        if attention["kind"] != "gqa":
            raise InputError(f"{given.place('softmax-type')}: sinks of latent attention are not modelled")
        attention["sinks"] = True
    elif given.has("softmax-type"):
        given.explain("softmax-type", "irrelevant", "one more term of the softmax, in the same kernels")
    window = _window(given)
    if window is None:
        return {"attention": attention}
    if attention["kind"] != "gqa":
        raise InputError(f"{given.place('window-size')}: windows of latent attention are not modelled")
    sliding = {**attention, "kind": "sliding", "window": window}
    flags = _windowed_layers(given, layers)
    if all(flags):
        return {"attention": sliding}
    if not any(flags):
        return {"attention": attention}
    names = ["sliding" if flag else "full" for flag in flags]
    period = next(n for n in range(1, layers + 1) if layers % n == 0 and names == names[:n] * (layers // n))
    return {"attentions": {"sliding": sliding, "full": attention}, "attention_layers": names[:period]}


def _window(given: Given) -> int | None:
    """Tokens that a query attends to, its own included; None without a window."""
    if not given.has("window-size"):
        return None
    value = given.value("window-size")
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    match = re.fullmatch(r"\(?\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*\)?", text)
    if match is None or int(match[2]) not in (0, -1) or int(match[1]) < -1:
        raise InputError(
            f"{given.place('window-size')}: is no window before a query; write --window-size LEFT,0 with the "
            "tokens on its left"
        )
    return None if int(match[1]) == -1 else int(match[1]) + 1


def _windowed_layers(given: Given, layers: int) -> list[bool]:
    """Which layers have the window: all, all but every Nth, or as a list says (1 is with a window)."""
    name = "window-attn-skip-freq"
    if not given.has(name):
        return [True] * layers
    value = given.value(name)
    if not isinstance(value, tuple) and "[" not in str(value):
        every = given.integer(name, 1)
        return [number % every != 0 for number in range(1, layers + 1)]
    return [bool(flag) for flag in _frequency(given, name, layers)]


def _frequency(given: Given, name: str, layers: int) -> tuple[int, ...]:
    """The entries of a list by layer; raises InputError where there are not as many as layers."""
    value = given.value(name)
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    flags = parse_frequency(text.strip("'\""), layers)
    if len(flags) != layers:
        raise InputError(f"{given.place(name)}: has {len(flags)} entries, and the model {layers} layers")
    return flags


def _experts(given: Given, layers: int, ffn: int, biases: bool) -> dict[str, Any] | None:
    experts = given.integer("num-experts", 0, least=0, most=10**6)
    if not experts:
        return None
    width = given.integer("moe-ffn-hidden-size", ffn)
    top_k = given.integer("moe-router-topk", 2)
    shared = given.integer("moe-shared-expert-intermediate-size", 0, least=0)
    parts = shared // width if shared and shared % width == 0 else int(shared > 0)
    name = "moe-layer-freq"
    flags = _frequency(given, name, layers) if given.has(name) else (1,)
    if not any(flags):
        raise InputError(f"{given.place(name)}: leaves no layer with experts; drop --num-experts")
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn": width,
        "shared_experts": parts,
        "shared_ffn": shared // parts if parts else 0,
        "shared_gate": given.flag("moe-shared-expert-gate"),
        "scoring": given.text("moe-router-score-function", "softmax", ("softmax", "sigmoid")),
        "score_bias": given.flag("moe-router-enable-expert-bias"),
        **({"router_bias": True, "expert_bias": True} if biases else {}),
        "dense_layers": [number for number, flag in enumerate(flags) if not flag],
        **_groups(given, top_k),
    }


def _groups(given: Given, top_k: int) -> Mapping[str, Any]:
    """Groups of the gate. Megatron-LM ranks a group by the sum of its best top_k / group_topk scores."""
    if not given.has("moe-router-num-groups"):
        return {}
    groups = given.integer("moe-router-num-groups", 1)
    reached = given.integer("moe-router-group-topk", 0) if given.has("moe-router-group-topk") else groups
    if reached >= groups:
        return {"groups": 1, "groups_per_token": 1}
    best = top_k // reached
    if best not in (1, 2):
        text = f"the direction is unknown: a group counts by its {best} best scores, and by two of them here"
        given.explain("moe-router-group-topk", "not priced", text)
    score = "best" if best <= 1 else "top2-sum"
    return {"groups": groups, "groups_per_token": reached, "group_score": score}
