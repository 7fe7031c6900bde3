"""Reads the keys of a Hugging Face config with type checks, and records what each key was taken for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moesim.hwmodels.errors import InputError

MOST = 10**8
"""Largest legal number, far above any real width or vocabulary; a larger one is a mistake."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Understood:
    """One key of the file with its value and meaning."""

    key: str
    value: Any
    meaning: str


@dataclass(slots=True)
class Reader:
    """Typed access to the keys of one file, which records the keys that were read."""

    config: dict[str, Any]
    place: str
    prefix: str
    understood: list[Understood] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def take(self, keys: tuple[str, ...], meaning: str, absent: Any = _MISSING) -> Any:
        """Return the value of the one of `keys` (aliases) that the file has, or `absent`.

        Raises InputError where no key is present and `absent` is not given, and where aliases differ.
        """
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
        """Read a whole number from `least` to MOST.

        `absent` and `null` are the values of a missing key and of null, where the format defines them.
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

    def positive(self, key: str, meaning: str) -> float | None:
        """Read a positive number; None where the key is absent or null."""
        value = self.take((key,), meaning, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise InputError(f"{self.place}: {self.prefix}{key}={value!r} must be above 0 ({meaning})")
        return float(value)

    def flag(self, key: str, meaning: str, absent: Any = _MISSING) -> bool:
        """Read a boolean."""
        value = self.take((key,), meaning, absent)
        if not isinstance(value, bool):
            raise InputError(f"{self.place}: {self.prefix}{key}={value!r} must be true or false ({meaning})")
        return value

    def text(self, key: str, meaning: str) -> str:
        """Read a text."""
        value = self.take((key,), meaning)
        if not isinstance(value, str):
            raise InputError(f"{self.place}: {self.prefix}{key}={value!r} must be a text ({meaning})")
        return value

    def refuse_unless(self, key: str, legal: Any, why: str) -> None:
        """Raise InputError unless `key` has the `legal` value or is absent; other values change the shape."""
        value = self.take((key,), why, absent=legal)
        if value != legal:
            raise InputError(
                f"{self.place}: {self.prefix}{key}={value!r} is not modelled ({why}); only {legal!r} can be "
                "imported"
            )

    def unread(self) -> list[str]:
        """Keys that were not read and have no effect on the shape."""
        return [f"{self.prefix}{key}" for key in self.config if key not in self.seen]
