"""Imports Hugging Face `config.json` files from the keys that they state, never from class defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import resolved
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import dump_mapping, load_mapping
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.model.huggingface.families import (
    deepseek,
    gemma,
    llama,
    minimax,
    nemotron,
    others,
    qwen,
)
from moesim.simulator.model.huggingface.reader import (
    ARCHITECTURES,
    FAMILIES,
    MOST,
    OTHER_NAMES,
    Reader,
    Understood,
)
from moesim.simulator.model.shape import MAX_LAYERS, ModelShape

_LINEAGES = (deepseek, gemma, llama, minimax, nemotron, others, qwen)
"""Modules whose functions have registered the families that they read."""


def family_of(name: object) -> str | None:
    """The family that reads a `model_type`, or None."""
    if not isinstance(name, str):
        return None
    name = OTHER_NAMES.get(name, name)
    return name if name in FAMILIES else None


# -- what a file is that is not a language model's configuration, and which family comes nearest -------

NEEDED = "give the config.json beside it, which has hidden_size and num_hidden_layers"

_MOST_NAMED = 6


_FILES = (
    ("the index of safetensors files", "weight_map"),
    ("the configuration of an adapter such as LoRA, not of its base model", "peft_type lora_alpha"),
    ("the configuration of a diffusers pipeline or part", "_diffusers_version"),
    ("a tokenizer's vocabulary and rules (tokenizer.json)", "pre_tokenizer+model"),
    ("a tokenizer's configuration", "tokenizer_class added_tokens_decoder chat_template"),
    ("the configuration of an image, video or audio preprocessor",
     "image_processor_type feature_extractor_type processor_class image_mean"),
    ("a DeepSpeed configuration", "train_micro_batch_size_per_gpu zero_optimization"),
    ("a quantisation section alone", "quant_method quant_algo config_groups quantization"),
    ("a trainer's state", "global_step+log_history"),
    ("a generation configuration",
     "max_new_tokens do_sample temperature top_p _from_model_config eos_token_id"),
    ("a map of special tokens", "bos_token eos_token unk_token pad_token"),
)  # fmt: skip
"""Files that lie beside a config.json, with keys (`+` joins those that come together) of which any tells
them, the surest first."""

_SIZES = ("hidden_size", "num_hidden_layers", "d_model", "n_embd", "n_layer", "n_layers", "num_layers")
_ENCODERS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForPreTraining")


def what_else(data: Mapping[str, Any]) -> str | None:
    """What a mapping is that names no size of a model, or None where it may be a model's configuration."""
    if any(key in data for key in _SIZES) or any(
        isinstance(v, dict) and "hidden_size" in v for v in data.values()
    ):
        return None
    if "model_type" in data and "_diffusers_version" not in data:
        return None
    return next(
        (title for title, keys in _FILES if any(set(key.split("+")) <= data.keys() for key in keys.split())),
        None,
    )


def refuse_other_files(data: Mapping[str, Any], place: str) -> None:
    """Raise InputError, with what the file is, for one that cannot be a decoder's configuration."""
    title = what_else(data)
    if title is not None:
        raise InputError(f"{place}: this is {title}, which does not describe a model; {NEEDED}")
    if data.get("is_encoder_decoder") is True:
        raise InputError(
            f"{place}: is_encoder_decoder=true: a model with encoder and decoder; only decoders can be read"
        )
    architecture = str(_architecture(data))
    encoder = architecture.endswith(_ENCODERS) or (
        architecture.endswith("Model") and "position_embedding_type" in data and "is_decoder" not in data
    )
    if encoder and str(data.get("model_type")) not in FAMILIES:
        raise InputError(
            f"{place}: architectures={architecture!r} is an encoder such as BERT; only decoders, whose "
            "architecture ends in ForCausalLM, can be imported"
        )


def unknown_family(reader: Reader, family: object) -> InputError:
    """The error for a family that is not registered: the nearest by keys and by name, and what decides."""
    known = ", ".join(sorted(FAMILIES))
    if family is None:
        stated = "a file without model_type and architectures, of which one names the family,"
    else:
        stated = f"model_type={str(family)[:80]!r}"
    # All keys read, then most keys that decide, then the name that is most alike.
    fit = min(
        (_fit(name, reader, str(family)) for name in FAMILIES),
        key=lambda fit: (not fit.whole, -len(fit.keys), -fit.similarity, fit.name),
    )
    by_name = "" if fit.whole else nearest(str(family), list(FAMILIES))
    text = f"{reader.prefix}{stated} is not of a family that can be imported{by_name}"
    if fit.keys or fit.whole:
        listed = ", ".join(f"{reader.prefix}{key}" for key in fit.keys[:_MOST_NAMED] or ("hidden_size",))
        hint = "can be read" if fit.whole else "comes nearest"
        text += (
            f"; by its keys ({listed}) it {hint} as {fit.name}: if it has that architecture under a new "
            f"name, write --as {fit.name}"
        )
    return InputError(
        f"{reader.place}: {text}; known families: {known}. Another model can be described by hand in a model "
        "file (see the shipped ones for the keys)."
    )


class _Fit(NamedTuple):
    """How a file's keys fit a family: its name, whether all could be read, and the keys that decide."""

    name: str
    whole: bool
    keys: tuple[str, ...]
    similarity: float


def _fit(name: str, reader: Reader, stated: str) -> _Fit:
    trial = Reader(dict(reader.config), reader.place, "", outer=reader.outer)
    whole = True
    try:
        FAMILIES[name](trial)
    except InputError:
        whole = False
    read = {understood.key for understood in trial.understood if understood.key in reader.config}
    similarity = SequenceMatcher(None, stated[:80].lower(), name).ratio()
    return _Fit(name, whole, tuple(sorted(read - _COMMON)), similarity)


_COMMON = frozenset(
    [
        "hidden_act",
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "tie_word_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "attention_bias",
        "mlp_bias",
        "max_position_embeddings",
        "routed_scaling_factor",
        "sliding_window",
        "use_sliding_window",
    ]
)
"""Keys of so many families that they do not decide between them."""


# -- towers of multimodal models, which are left out, counted by a plain vision transformer's formula ---

_TOWERS = ("vision_config", "audio_config", "vision_tower_config", "thinker_config")
_WIDTH = ("hidden_size", "vt_hidden_size", "embed_dim")
_DEPTH = ("depth", "num_hidden_layers", "vt_num_hidden_layers")
_FFN = ("intermediate_size", "vt_intermediate_size")


def tower_notes(data: Mapping[str, Any]) -> list[str]:
    """Towers that are left out of a multimodal model's file, with their sizes where the file has them."""
    notes = []
    for key, config in ((key, data.get(key)) for key in _TOWERS):
        if isinstance(config, dict):
            size, formula = tower_parameters(config), "billion parameters by a plain ViT's formula"
            about = f"about {size / 1e9:.2g} {formula}" if size else "its size is not stated"
            notes.append(f"the tower of {key} ({about}) is left out")
    return notes


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Approximate parameters of a vision transformer, or 0 where the keys are not there.

    Attention of four square projections, an FFN of two, and the embedding of patches, without projector.
    """
    width, depth, ffn = (_number(config, keys) for keys in (_WIDTH, _DEPTH, _FFN))
    if not (width and depth and depth <= MAX_LAYERS):
        return 0
    patch = _number(config, ("patch_size",)) or 0
    channels = _number(config, ("in_channels", "num_channels")) or 3
    layer = 4 * width * width + 2 * width * (ffn or 4 * width)
    return depth * layer + channels * patch * patch * width


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MOST), 0)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,79}")
"""Names that a configuration may give its model; anything else, such as a path, is no name."""

NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which the files of multimodal models describe the language model."""


class ImportedModel(Struct, frozen=True):
    """A shape, with the keys of its file that were understood and those that were ignored.

    `shape.not_modelled` names the features that are left out.
    """

    shape: ModelShape
    understood: tuple[Understood, ...]
    ignored: tuple[str, ...]


def import_hf(path: str | Path, name: str | None = None, as_family: str | None = None) -> ImportedModel:
    """Read a Hugging Face config.json of a known family.

    `name`: the model's; None takes it from the file, or else writes the family and the parameters.
    `as_family`: the family whose keys the file has, whatever its `model_type` says; None takes the file's.
    Raises InputError naming file and key for an unknown family (with the nearest and the keys that decide),
    for a file that is no model's configuration, a missing or contradictory key, a value of the wrong type,
    and a feature that would change the shape in a way that is not modelled.
    """
    imported = shape_from_config(load_mapping(path, configuration=True), str(path), as_family)
    if name is None:
        return imported
    if not _NAME.fullmatch(name):
        raise InputError(
            f"name {name[:80]!r}: write 2 to 80 letters, digits, dots, dashes and underscores, beginning "
            "with a letter or digit"
        )
    return replace(imported, shape=imported.shape.model_copy(update={"name": name}))


def shape_from_config(data: dict[str, Any], place: str, as_family: str | None = None) -> ImportedModel:
    """Do as `import_hf` for a mapping that was already read from `place`."""
    refuse_other_files(data, place)
    reader = Reader(data, place, "")
    for key in NESTED:  # the language model is the file itself, or a part of a multimodal model's file
        if isinstance(inner := data.get(key), dict) and "hidden_size" not in data:
            reader = Reader(inner, place, f"{key}.", outer=data)
            break
    family = _family(reader, data) if as_family is None else family_of(as_family)
    if family is None:
        known, given = list(FAMILIES), str(as_family)
        raise InputError(
            f"--as {given[:80]!r} is not a family{nearest(given, known)}; known families: "
            f"{', '.join(sorted(known))}"
        )
    fields = FAMILIES[family](reader)
    left_out = list(fields.pop("not_modelled", ()))
    left_out += tower_notes(data)
    if reader.prefix:
        left_out.append(f"everything outside {reader.prefix[:-1]} (the file describes a multimodal model)")
    stated = _stated_name(data, place)
    source = {"kind": "published", "reference": f"Hugging Face config {Path(place).name} ({family})"}
    fields |= {"name": stated or family, "source": source, "not_modelled": left_out}
    if (formats := published_formats(reader, data)) is not None:
        fields["published"] = formats
    shape = validate_model(ModelShape, fields, place)
    if stated is None:
        size = parameters_total(shape)
        counted = f"{size / 1e12:.3g}t" if size >= 1e12 else f"{size / 1e9:.3g}b"
        shape = shape.model_copy(update={"name": f"{family}-{counted}"})
    read = {understood.key for understood in reader.understood}
    outside = [key for key in data if reader.prefix and f"{key}." != reader.prefix and key not in read]
    return ImportedModel(shape, tuple(reader.understood), (*outside, *reader.unread()))


# -- formats of the published weights, from `quantization_config` and DeepSeek-V4's `expert_dtype` -----

_METHODS = {"fp8": "fp8", "mxfp4": "mxfp4", "modelopt/FP8": "fp8", "modelopt/NVFP4": "nvfp4"}
_PACKED = {"float 8": "fp8", "float 4": "nvfp4", "int 4": "int4"}
_EXPERT_TYPES = {"fp4": "mxfp4", "fp8": "fp8", "bf16": "bf16"}
_ATTENTION = re.compile(r"(self_)?attn[.*]*$")
"""A module that is not converted and that is a whole attention, as `model.layers.*.self_attn`."""
_INT4 = "published in INT4, which is counted as MXFP4: BF16 inputs too (on cards without FP4), smaller scales"


def published_formats(reader: Reader, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Formats of linear layers and of experts that a file states, or None where it states none.

    What is not understood is None with a note, which only serving refuses. `mxfp4` converts experts only
    (transformers' Mxfp4Config); elsewhere attention that is not converted leaves all outside experts BF16.
    """
    for config, prefix in ((reader.config, reader.prefix), (data, "")):
        stated, experts = config.get("quantization_config"), config.get("expert_dtype")
        if not isinstance(stated, dict):
            continue
        found = _format_of(stated)
        if found is None:
            method = str(stated.get("quant_method"))[:40]
            note = f"the weights were published by quant_method={method!r} in a format that is not priced"
            return {"linear": None, "experts": None, "note": note}
        kept = [stated.get(key) for key in ("modules_to_not_convert", "ignore", "exclude_modules")]
        names = [str(name) for some in kept if isinstance(some, list) for name in some]
        apart = stated.get("quant_method") == "mxfp4" or any(map(_ATTENTION.search, names))
        note, priced = (_INT4, "mxfp4") if found == "int4" else ("", found)
        reader.understood.append(Understood(f"{prefix}quantization_config", found, "published weights"))
        formats: dict[str, Any] = {"linear": "bf16" if apart else priced, "experts": priced, "note": note}
        if experts is not None:
            formats["experts"] = _EXPERT_TYPES.get(str(experts))
            reader.understood.append(Understood(f"{prefix}expert_dtype", experts, "published experts"))
            if formats["experts"] is None:
                formats["note"] = f"expert_dtype={str(experts)[:40]!r} is not priced"
        return formats
    return None


def _format_of(stated: Mapping[str, Any]) -> str | None:
    """The one format of all that a `quantization_config` converts, or None."""
    method = stated.get("quant_method")
    if method == "modelopt":
        method = f"modelopt/{stated.get('quant_algo')}"
    if method != "compressed-tensors":
        return _METHODS.get(str(method))
    if "mxfp4" in str(stated.get("format")):
        return "mxfp4"
    groups = stated.get("config_groups")
    weights = (
        [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    )
    found = {
        _PACKED.get(f"{w.get('type')} {w.get('num_bits')}") if isinstance(w, dict) else None for w in weights
    }
    return found.pop() if len(found) == 1 else None


def to_yaml(shape: ModelShape, width: int = 100) -> str:
    """Write a model file from which `load_model` reads an equal shape; absent parts are left out.

    `width`: characters after which lines break at words.
    """
    return dump_mapping(shape.model_dump(mode="json", exclude_none=True), width)


def _family(reader: Reader, data: Mapping[str, Any]) -> str:
    """The family that a file names: by its architecture, else by its model type, else by its wrapper's.

    The architecture names the modelling code, which renamed models keep, so it decides where both are known.
    """
    for config in (reader.config, data):
        stated = config.get("model_type")
        if "model_type" in config and not isinstance(stated, str):
            raise reader.error(f"model_type={str(stated)[:80]!r} must be a text (family)")
        by_code, by_type = ARCHITECTURES.get(_architecture(config) or ""), family_of(stated)
        same = by_code and by_type and FAMILIES[by_code] is FAMILIES[by_type]
        family = by_type if same else by_code or by_type
        if family is None:
            continue
        for key in ("architectures", "model_type"):
            if key in config:
                prefix = reader.prefix if config is reader.config else ""
                reader.understood.append(Understood(f"{prefix}{key}", config[key], f"family: {family}"))
                reader.seen.update((key,) if config is reader.config else ())
        return family
    raise unknown_family(
        reader, reader.config.get("model_type", data.get("model_type")) or _architecture(data)
    )


def _architecture(data: Mapping[str, Any]) -> str | None:
    stated = data.get("architectures")
    first = stated[0] if isinstance(stated, list) and stated else None
    return first if isinstance(first, str) else None


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
