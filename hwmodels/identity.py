"""A key that stands for one object that never changes, for functions that keep what they computed from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class SameObject(Generic[Value]):
    """Equals only another key of the same object, so that `lru_cache` neither hashes nor compares contents.

    The key keeps the object alive. Functions that are cached so must be pure, and their values immutable.
    """

    value: Value

    def __hash__(self) -> int:
        """Hash of the object's identity."""
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        """Whether both keys stand for the same object."""
        return isinstance(other, SameObject) and self.value is other.value
