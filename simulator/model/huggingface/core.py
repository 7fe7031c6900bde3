"""Reads what every family states: layers, hidden size, vocabulary, tied embeddings, and trainers' numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moesim.simulator.model.huggingface.reader import Reader, Understood

_SILU = ("silu", "swiglu")
_EPSILON = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "norm_eps",
    "norm_epsilon",
)
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
_SCALE = ("routed_scaling_factor", "moe_router_scaling_factor", "router_scaling_factor")


def core(
    r: Reader,
    *,
    layers: int | None = None,
    activations: Collection[str] = _SILU,
    activation_key: str = "hidden_act",
    activation: str | None = None,
    tied: bool | None = None,
    vocab: int | None = None,
) -> dict[str, Any]:
    """Fields that every family has.

    `layers` is given where the key is not `num_hidden_layers`. The activation is read from `activation_key`
    and must be one of `activations`, or is `activation` where the modelling code fixes it. `tied` and
    `vocab` are the values where the files leave `tie_word_embeddings` and `vocab_size` out.
    """
    if activation is None:
        activation = r.text(activation_key, meaning="activation of the FFN", absent=next(iter(activations)))
        if activation not in activations:
            raise r.error(
                f"{r.prefix}{activation_key}={activation!r} is not modelled (activation of the FFN); known "
                f"here: {', '.join(activations)}"
            )
    fields = {
        "n_layers": r.layers() if layers is None else layers,
        "hidden": r.integer("hidden_size", "d_model", "n_embd", meaning="hidden size"),
        "vocab": r.integer(
            "vocab_size", meaning="vocabulary", **({} if vocab is None else {"absent": vocab})
        ),
        "tied_embeddings": _tied(r, tied),
    }
    return fields | numerics(r, activation)


def _tied(r: Reader, absent: bool | None) -> bool:
    key, meaning = "tie_word_embeddings", "the head shares the embedding table"
    if key not in r.config and isinstance(r.outer.get(key), bool):
        r.understood.append(Understood(key, r.outer[key], meaning))
        return bool(r.outer[key])
    return r.flag(key, meaning) if absent is None else r.flag(key, meaning, absent)


def numerics(r: Reader, activation: str) -> dict[str, Any]:
    """Read the numbers that only a trainer needs, where the file states them."""
    numbers: dict[str, Any] = {
        "rope_theta": _rope_theta(r),
        "norm_epsilon": r.positive(*_present(r, _EPSILON), meaning="epsilon of the norms; for trainers only"),
        "router_scale": r.positive(
            *_present(r, _SCALE), meaning="factor on the experts' weights; for trainers only"
        ),
        "context": _context(r),
    }
    if activation not in _SILU:
        numbers["activation"] = activation
    stated = {name: value for name, value in numbers.items() if value is not None}
    return {"numerics": stated} if stated else {}


def _context(r: Reader) -> int | None:
    """Longest sequence that the file names; None where it names none."""
    meaning = "longest sequence; shown only"
    context: int | None = r.integer(*_present(r, _CONTEXT), meaning=meaning, absent=None, null=None)
    return context


def _present(r: Reader, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The first of `keys` that the file states, since some files repeat an epsilon under another name."""
    found = [key for key in keys if key in r.config]
    r.seen.update(found)
    return (found[0],) if found else keys[:1]


def _rope_theta(r: Reader) -> float | None:
    """Base of the rotary embedding: of the layers with full attention, where a file states several."""
    if "rope_theta" in r.config and not isinstance(r.config["rope_theta"], list):
        return r.positive("rope_theta", meaning="base of the rotary embedding; for trainers only")
    for key in ("rope_parameters", "rope_scaling"):
        inner = r.config.get(key)
        if isinstance(inner, dict):
            inner = inner.get("full_attention", inner)
        if isinstance(inner, dict) and "rope_theta" in inner:
            r.seen.add(key)
            reader = Reader(inner, r.place, f"{r.prefix}{key}.", understood=r.understood)
            return reader.positive("rope_theta", meaning="base of the rotary embedding; for trainers only")
    return None


def mtp(r: Reader, *keys: str) -> dict[str, Any]:
    """Multi-token-prediction modules; none where the file does not name them."""
    keys = keys or ("num_nextn_predict_layers", "num_mtp_layers")
    count = r.integer(*keys, meaning="MTP modules", least=0, absent=0, null=0)
    return {"mtp_layers": count} if count else {}
