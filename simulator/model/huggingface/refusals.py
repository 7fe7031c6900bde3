"""Says what a file is that is not a language model's configuration, and which family comes nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.model.huggingface.reader import Reader
from moesim.simulator.model.huggingface.registry import FAMILIES, Family

NEEDED = "give the config.json beside it, which has hidden_size and num_hidden_layers"

_MOST_NAMED = 6


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda data: any(key in data for key in keys)


def _all(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda data: all(key in data for key in keys)


_FILES: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("the index of safetensors files", _has("weight_map")),
    ("the configuration of an adapter such as LoRA, not of its base model", _has("peft_type", "lora_alpha")),
    ("the configuration of a diffusers pipeline or part", _has("_diffusers_version")),
    ("a tokenizer's vocabulary and rules (tokenizer.json)", _all("pre_tokenizer", "model")),
    ("a tokenizer's configuration", _has("tokenizer_class", "added_tokens_decoder", "chat_template")),
    (
        "the configuration of an image, video or audio preprocessor",
        _has("image_processor_type", "feature_extractor_type", "processor_class", "image_mean"),
    ),
    ("a DeepSpeed configuration", _has("train_micro_batch_size_per_gpu", "zero_optimization")),
    ("a quantisation section alone", _all("producer", "quantization")),
    ("a quantisation section alone", _has("quant_method", "quant_algo", "config_groups", "quantization")),
    ("a trainer's state", _all("global_step", "log_history")),
    (
        "a generation configuration",
        _has("max_new_tokens", "do_sample", "temperature", "top_p", "_from_model_config", "eos_token_id"),
    ),
    ("a map of special tokens", _has("bos_token", "eos_token", "unk_token", "pad_token")),
)
"""Files that lie beside a config.json, and how each is recognised, the surest first."""

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
    return next((title for title, matches in _FILES if matches(data)), None)


def refuse_other_files(data: Mapping[str, Any], place: str) -> None:
    """Raise InputError, with what the file is, for one that cannot be a decoder's configuration."""
    title = what_else(data)
    if title is not None:
        raise InputError(f"{place}: this is {title}, which does not describe a model; {NEEDED}")
    if data.get("is_encoder_decoder") is True:
        raise InputError(
            f"{place}: is_encoder_decoder=true: a model with encoder and decoder; only decoders can be read"
        )
    architecture = str(_first(data.get("architectures")))
    encoder = architecture.endswith(_ENCODERS) or (
        architecture.endswith("Model") and "position_embedding_type" in data and "is_decoder" not in data
    )
    if encoder and str(data.get("model_type")) not in FAMILIES:
        raise InputError(
            f"{place}: architectures={architecture!r} is an encoder such as BERT; only decoders, whose "
            "architecture ends in ForCausalLM, can be imported"
        )


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None


def unknown_family(reader: Reader, family: object) -> InputError:
    """The error for a family that is not registered: the nearest by keys and by name, and what decides."""
    known = ", ".join(sorted(FAMILIES))
    if family is None:
        stated = "a file without model_type and architectures, of which one names the family,"
    else:
        stated = f"model_type={str(family)[:80]!r}"
    fit = min((_fit(name, reader, str(family)) for name in FAMILIES), key=_preference)
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


def _preference(fit: _Fit) -> tuple[bool, int, float, str]:
    """Order of the fits: all keys read, then most keys that decide, then the name that is most alike."""
    return not fit.whole, -len(fit.keys), -fit.similarity, fit.name


def _fit(name: str, reader: Reader, stated: str) -> _Fit:
    trial = Reader(dict(reader.config), reader.place, "", outer=reader.outer)
    whole = _reads(FAMILIES[name], trial)
    read = {understood.key for understood in trial.understood if understood.key in reader.config}
    similarity = SequenceMatcher(None, stated[:80].lower(), name).ratio()
    return _Fit(name, whole, tuple(sorted(read - _COMMON)), similarity)


def _reads(family: Family, trial: Reader) -> bool:
    try:
        family(trial)
    except InputError:
        return False
    return True


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
