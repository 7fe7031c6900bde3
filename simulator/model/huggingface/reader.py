"""Reads the keys of a Hugging Face config with type checks, and records what each key was taken for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.layer_pattern import MAX_LAYERS

MOST = 10**8
"""Largest legal number, far above any real width or vocabulary; a larger one is a mistake."""

_T = TypeVar("_T")

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Understood:
    """One key of the file with its value and meaning."""

    key: str
    value: Any
    meaning: str


@dataclass(slots=True)
class Reader:
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
