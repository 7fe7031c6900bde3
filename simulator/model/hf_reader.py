"""Typed access to the keys of a Hugging Face config, with an account of what was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moesim.hwmodels.errors import InputError

MOST = 10**8
"""Far above any real width or vocabulary: a larger number is a mistake."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Understood:
    """One key of the file, its value and what it means here."""

    key: str
    value: Any
    meaning: str


@dataclass(slots=True)
class Reader:
    """Typed access to the keys of one file; remembers what was read and what it was taken for."""

    config: dict[str, Any]
    place: str
    prefix: str
    understood: list[Understood] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def take(self, keys: tuple[str, ...], meaning: str, absent: Any = _MISSING) -> Any:
        """The value under the one of `keys` (aliases) that the file has."""
        present = [key for key in keys if key in self.config]
        self.seen.update(present)
        if not present:
            if absent is not _MISSING:
                return absent
            raise InputError(
                f"{self.place}: the key {self.prefix}{' or '.join(keys)} is missing ({meaning}). The "
                "defaults of a model class are not the model: add the key with the value that the model has"
            )
        value = self.config[present[0]]
        for key in present[1:]:
            if self.config[key] != value:
                raise InputError(
                    f"{self.place}: {self.prefix}{present[0]}={value!r} and {self.prefix}{key}="
                    f"{self.config[key]!r} mean the same thing and differ; keep one of them"
                )
        self.understood.append(Understood(f"{self.prefix}{present[0]}", value, meaning))
        return value

    def integer(
        self, *keys: str, meaning: str, least: int = 1, absent: Any = _MISSING, null: Any = _MISSING
    ) -> Any:
        """A whole number from `least` to MOST.

        `absent` stands for a missing key and `null` for null, where the format gives them a meaning.
        """
        value = self.take(keys, meaning, absent)
        if value is None and null is not _MISSING:
            return null
        if value is absent:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise InputError(
                f"{self.place}: {self.prefix}{keys[0]}={value!r} must be a whole number from "
                f"{least} to {MOST} ({meaning})"
            )
        return value

    def flag(self, key: str, meaning: str, absent: Any = _MISSING) -> bool:
        """True or false."""
        value = self.take((key,), meaning, absent)
        if not isinstance(value, bool):
            raise InputError(f"{self.place}: {self.prefix}{key}={value!r} must be true or false ({meaning})")
        return value

    def text(self, key: str, meaning: str) -> str:
        """A word."""
        value = self.take((key,), meaning)
        if not isinstance(value, str):
            raise InputError(f"{self.place}: {self.prefix}{key}={value!r} must be a text ({meaning})")
        return value

    def refuse_unless(self, key: str, legal: Any, why: str) -> None:
        """Stop at a feature that would change the shape; an absent key means the feature is absent."""
        value = self.take((key,), why, absent=legal)
        if value != legal:
            raise InputError(
                f"{self.place}: {self.prefix}{key}={value!r} is not modelled ({why}); only {legal!r} can be "
                "imported"
            )

    def unread(self) -> list[str]:
        """Keys that play no role in the shape."""
        return [f"{self.prefix}{key}" for key in self.config if key not in self.seen]
