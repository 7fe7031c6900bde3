"""Reads the keys of a Hugging Face config with type checks, and records what each key was taken for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.shape import MAX_LAYERS

MOST = 10**8
"""Largest legal number, far above any real width or vocabulary; a larger one is a mistake."""

_T = TypeVar("_T")

_MISSING = object()


class Understood(Struct, frozen=True):
    """One key of the file with its value and meaning."""

    key: str
    value: Any
    meaning: str


class Reader(Struct):
    """Typed access to the keys of one mapping of a file, which records the keys that were read."""

    config: dict[str, Any]
    place: str
    prefix: str
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Keys around `config` in a multimodal model's file, which may state `tie_word_embeddings` for it."""
    understood: list[Understood] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    children: list[Reader] = field(default_factory=list)

    def has(self, key: str) -> bool:
        """Whether the file states a value other than null for `key`."""
        return self.config.get(key) is not None

    def error(self, text: str) -> InputError:
        """Error about this file."""
        return InputError(f"{self.place}: {text}")

    def named(self, keys: tuple[str, ...]) -> str:
        """Full name of the one of `keys` that the file has, or of the first."""
        return f"{self.prefix}{next((key for key in keys if key in self.config), keys[0])}"

    def take(self, keys: tuple[str, ...], meaning: str, absent: Any = _MISSING) -> Any:
        """Return the value of the one of `keys` (aliases) that the file has, or `absent`.

        Raises InputError where no key is present and `absent` is not given, and where aliases differ.
        """
        present = [key for key in keys if key in self.config]
        self.seen.update(present)
        if not present:
            if absent is not _MISSING:
                return absent
            raise self.error(
                f"the key {self.prefix}{' or '.join(keys)} is missing ({meaning}). The "
                "defaults of a model class are not the model: add the key with the value that the model has"
            )
        value = self.config[present[0]]
        for key in present[1:]:
            if self.config[key] != value:
                raise self.error(
                    f"{self.prefix}{present[0]}={value!r} and {self.prefix}{key}="
                    f"{self.config[key]!r} mean the same thing and differ; keep one of them"
                )
        self.understood += [Understood(f"{self.prefix}{key}", value, meaning) for key in present]
        return value

    def integer(
        self, *keys: str, meaning: str, least: int = 1, absent: Any = _MISSING, null: Any = _MISSING
    ) -> Any:
        """Read a whole number from `least` to MOST.

        `absent` and `null` are the values of a missing key and of null, where the format defines them.
        """
        value = self.take(keys, meaning, absent)
        if value is None and null is not _MISSING:
            return null
        if value is absent:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise self.error(
                f"{self.named(keys)}={_short(value)} must be a whole number from "
                f"{least} to {MOST} ({meaning})"
            )
        return value

    def positive(self, *keys: str, meaning: str) -> float | None:
        """Read a positive number; None where the key is absent or null."""
        value = self.take(keys, meaning, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(f"{self.named(keys)}={_short(value)} must be above 0 ({meaning})")
        return float(value)

    def flag(self, key: str, meaning: str, absent: Any = _MISSING) -> bool:
        """Read a boolean."""
        value = self.take((key,), meaning, absent)
        if not isinstance(value, bool):
            raise self.error(f"{self.prefix}{key}={_short(value)} must be true or false ({meaning})")
        return value

    def text(self, *keys: str, meaning: str, absent: Any = _MISSING) -> str:
        """Read a text."""
        value = self.take(keys, meaning, absent)
        if not isinstance(value, str):
            raise self.error(f"{self.named(keys)}={_short(value)} must be a text ({meaning})")
        return value

    def choice(self, *keys: str, legal: Mapping[str, _T], meaning: str, absent: Any = _MISSING) -> _T:
        """Read a text that names one of `legal`, and return what it stands for."""
        value = self.take(keys, meaning, absent)
        if not isinstance(value, str) or value not in legal:
            raise self.error(
                f"{self.named(keys)}={_short(value)} is not modelled ({meaning}); known: {', '.join(legal)}"
            )
        return legal[value]

    def per_layer(
        self, *keys: str, layers: int, legal: Mapping[Any, _T], meaning: str, further: int = 0
    ) -> tuple[_T, ...]:
        """Read a list with one entry a layer, and return what the entries stand for.

        `further` is the number of modules behind the layers that the list may name too. Raises InputError
        for another number of entries and for an entry that is not one of `legal`.
        """
        value = self.take(keys, meaning)
        name = self.named(keys)
        if not isinstance(value, list):
            raise self.error(f"{name}={_short(value)} must be a list with one entry a layer ({meaning})")
        if len(value) not in (layers, layers + further):
            raise self.error(
                f"{name} has {len(value)} entries but the model has {layers} layers; both must be equal"
            )
        for index, entry in enumerate(value):
            if not isinstance(entry, str | int) or isinstance(entry, bool) or entry not in legal:
                raise self.error(
                    f"{name}: layer {index} is {_short(entry)}, which is not modelled; known: "
                    f"{', '.join(map(str, legal))}"
                )
        return tuple(legal[entry] for entry in value)

    def uniform(self, *keys: str, layers: int, meaning: str, least: int = 1) -> int:
        """Read a whole number, or a list that repeats one whole number for every layer."""
        value = self.take(keys, meaning)
        name, first = self.named(keys), value[0] if isinstance(value, list) and value else value
        if isinstance(value, list) and (len(value) != layers or any(entry != first for entry in value)):
            raise self.error(
                f"{name} must repeat one number for each of the {layers} layers; numbers that differ by "
                "layer are not modelled"
            )
        if isinstance(first, bool) or not isinstance(first, int) or not least <= first <= MOST:
            raise self.error(f"{name}={_short(first)} must be a whole number from {least} to {MOST}")
        return first

    def indices(
        self, *keys: str, layers: int, meaning: str, first: int = 0, absent: Any = _MISSING
    ) -> tuple[int, ...]:
        """Read a list of layer indices that count from `first`; the result counts from 0.

        A text of numbers with commas between them is such a list too.
        """
        value = self.take(keys, meaning, absent)
        name = self.named(keys)
        if isinstance(value, str) and len(value) <= 10_000:
            words = [word.strip() for word in value.split(",")]
            if all(word.isascii() and word.isdigit() and len(word) < 8 for word in words):
                value = [int(word) for word in words]
        whole = isinstance(value, list) and len(value) <= layers
        if not whole or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise self.error(f"{name}={_short(value)} must be a list of layer indices ({meaning})")
        for index in value:
            if not first <= index < layers + first:
                raise self.error(
                    f"{name} names layer {index}; the layers run from {first} to {layers + first - 1}"
                )
        return tuple(sorted({index - first for index in value}))

    def inner(self, key: str, meaning: str) -> Reader:
        """Reader of a mapping inside the file; its keys are recorded with the name of `key`."""
        value = self.take((key,), meaning)
        self.understood.pop()  # its keys are recorded one by one
        if not isinstance(value, dict):
            raise self.error(f"{self.prefix}{key}={_short(value)} must be a mapping ({meaning})")
        child = Reader(value, self.place, f"{self.prefix}{key}.", understood=self.understood)
        self.children.append(child)
        return child

    def layers(self, *keys: str) -> int:
        """Read the number of layers."""
        keys = keys or ("num_hidden_layers",)
        layers: int = self.integer(*keys, meaning="layers")
        if layers > MAX_LAYERS:
            raise self.error(f"{self.named(keys)}={layers} is above the limit of {MAX_LAYERS}")
        return layers

    def refuse_unless(self, key: str, legal: Any, why: str) -> None:
        """Raise InputError unless `key` has the `legal` value or is absent; other values change the shape."""
        value = self.take((key,), why, absent=legal)
        if value != legal:
            raise self.error(
                f"{self.prefix}{key}={_short(value)} is not modelled ({why}); only {legal!r} can be imported"
            )

    def refuse_used(self, *keys: str, why: str) -> None:
        """Raise InputError for keys that switch on a part that is not modelled; null, 0 and false are off."""
        for key in keys:
            value = self.take((key,), why, absent=None)
            if value:
                raise self.error(
                    f"{self.prefix}{key}={_short(value)} is not modelled ({why}); only null or 0 can be "
                    "imported"
                )

    def unread(self) -> list[str]:
        """Keys that were not read, or that follow from others, and have no effect on the shape."""
        told = {understood.key for understood in self.understood} | {child.prefix for child in self.children}
        names = [f"{self.prefix}{key}" for key in self.config]
        own = [name for name in names if name not in told and f"{name}." not in told]
        return own + [key for child in self.children for key in child.unread()]


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- registry ----------------------------------------------------------------------------------------

Family = Callable[[Reader], dict[str, Any]]

FAMILIES: dict[str, Family] = {}
"""Function that reads the keys of each `model_type`."""
OTHER_NAMES: dict[str, str] = {}
"""Further values of `model_type` and the family that reads them: text parts, wrappers and renamed models."""
ARCHITECTURES: dict[str, str] = {}
"""Family of each entry of `architectures`, which is tried before `model_type`: it names the modelling code,
and renamed models keep it (Kimi-K2's is DeepseekV3ForCausalLM)."""


def family(name: str, *architectures: str, also: Collection[str] = ()) -> Callable[[Family], Family]:
    """Register a function as the reader of a family, with its modelling classes and further model types."""

    def registered(function: Family) -> Family:
        FAMILIES[name] = function
        OTHER_NAMES.update(dict.fromkeys(also, name))
        ARCHITECTURES.update(dict.fromkeys(architectures, name))
        return function

    return registered


# -- what every family states: layers, hidden size, vocabulary, tied embeddings, trainers' numbers -----

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
        "context": r.integer(
            *_present(r, _CONTEXT), meaning="longest sequence; shown only", absent=None, null=None
        ),
    }
    if activation not in _SILU:
        numbers["activation"] = activation
    stated = {name: value for name, value in numbers.items() if value is not None}
    return {"numerics": stated} if stated else {}


def _present(r: Reader, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The first of `keys` that the file states, since some files repeat an epsilon under another name."""
    found = [key for key in keys if key in r.config]
    r.seen.update(found)
    return (found[0],) if found else keys[:1]


def _rope_theta(r: Reader) -> float | None:
    """Base of the rotary embedding: of the layers with full attention, where a file states several."""
    meaning = "base of the rotary embedding; for trainers only"
    if "rope_theta" in r.config and not isinstance(r.config["rope_theta"], list):
        return r.positive("rope_theta", meaning=meaning)
    for key in ("rope_parameters", "rope_scaling"):
        inner = r.config.get(key)
        if isinstance(inner, dict):
            inner = inner.get("full_attention", inner)
        if isinstance(inner, dict) and "rope_theta" in inner:
            r.seen.add(key)
            reader = Reader(inner, r.place, f"{r.prefix}{key}.", understood=r.understood)
            return reader.positive("rope_theta", meaning=meaning)
    return None


def mtp(r: Reader, *keys: str) -> dict[str, Any]:
    """Multi-token-prediction modules; none where the file does not name them."""
    keys = keys or ("num_nextn_predict_layers", "num_mtp_layers")
    count = r.integer(*keys, meaning="MTP modules", least=0, absent=0, null=0)
    return {"mtp_layers": count} if count else {}


# -- one name a layer as the fields of a model file: patterns with counts, or lists of dense layers ----

_MOST_LISTED = 4
"""Most dense layers that are listed by index."""


def shortest_pattern(names: Sequence[str]) -> list[str]:
    """Shortest list that repeats to `names` a whole number of times, with counts such as `linear*3`."""
    layers = len(names)
    length = next(
        size
        for size in range(1, layers + 1)
        if layers % size == 0 and all(names[i] == names[i - size] for i in range(size, layers))
    )
    runs = [(name, len(list(run))) for name, run in groupby(names[:length])]
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]


def attention_fields(names: Sequence[str], kinds: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Fields of the attention halves: one kind for all layers, or several by name with their pattern.

    `names`: one a layer, from `kinds` or `none`; kinds that no layer has are left out.
    """
    used = dict.fromkeys(names)
    if len(used) == 1 and names[0] in kinds:
        return {"attention": kinds[names[0]]}
    return {
        "attentions": {name: kinds[name] for name in used if name in kinds},
        "attention_layers": shortest_pattern(names),
    }


def ffn_fields(names: Sequence[str], moe: dict[str, Any] | None, dense_ffn: int | None) -> dict[str, Any]:
    """Fields of the feed-forward halves from `moe`, `dense` or `none` for every layer.

    A few dense layers are listed in `moe.dense_layers`, many are written as a pattern.
    """
    routed, dense = ROUTED in names, DENSE in names
    fields: dict[str, Any] = {"moe": moe if routed else None, "dense_ffn": dense_ffn if dense else None}
    indices = [index for index, name in enumerate(names) if name == DENSE]
    if set(names) <= {ROUTED, DENSE} and not (routed and len(indices) > _MOST_LISTED):
        if routed and moe is not None:
            fields["moe"] = moe | {"dense_layers": indices}
        return fields
    return fields | {"ffn_layers": shortest_pattern(names)}


def dense_first(r: Reader, layers: int) -> tuple[str, ...]:
    """Dense FFNs first and experts behind them, by the keys of DeepSeek's files.

    `mlp_layer_types` or a list in `moe_layer_freq` names every layer, and a number there means every n-th.
    """
    listed = r.has("mlp_layer_types") or isinstance(r.config.get("moe_layer_freq"), list)
    first = r.integer(
        "first_k_dense_replace", meaning="first layers that stay dense", least=0,
        **({"absent": None} if listed else {}),
    )  # fmt: skip
    if r.has("mlp_layer_types"):
        legal = {"dense": DENSE, "sparse": ROUTED}
        names = r.per_layer("mlp_layer_types", layers=layers, legal=legal, meaning="feed-forward half")
        r.seen.add("moe_layer_freq")
    elif listed:
        legal_flags = {0: DENSE, 1: ROUTED}
        names = r.per_layer("moe_layer_freq", layers=layers, legal=legal_flags, meaning="1 for experts")
    else:
        every = r.integer("moe_layer_freq", meaning="every n-th layer after them has experts", absent=1)
        return tuple(DENSE if i < first or i % every else ROUTED for i in range(layers))
    if first is not None and any(name == ROUTED for name in names[:first]):
        raise r.error(
            f"{r.prefix}first_k_dense_replace={first} and the list of the layers contradict each other: a "
            "layer before that one has experts; correct one of them"
        )
    return names
