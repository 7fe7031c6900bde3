"""Conditions on plans: what a training framework cannot run, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None
Condition = Scalar | Sequence[Scalar] | Mapping[str, Any]
"""What a fact must be: a value, one of several values, {not: ...}, {above: n} or {below: n}."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Plans that a trainer cannot run: those for which every condition holds.

    `when` maps names of facts (`PlanFacts.values`) to conditions. `because` is the reason as a clause.
    `versions` are those of the trainer that it applies to; empty for all.
    """

    when: Mapping[str, Condition]
    because: str
    versions: tuple[str, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """Names of the facts that it depends on."""
        return frozenset(self.when)

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether a plan with these facts is excluded."""
        return all(holds(condition, values[name]) for name, condition in self.when.items())


def holds(condition: Condition, value: Any) -> bool:
    """Whether a fact meets a condition; a fact of several values meets it if one of them does."""
    if isinstance(value, tuple | frozenset):
        return any(holds(condition, one) for one in value)
    if isinstance(condition, Mapping):
        ((word, limit),) = condition.items()
        if word == "not":
            return not holds(limit, value)
        if value is None:
            return False
        return bool(value > limit if word == "above" else value < limit)
    if isinstance(condition, Sequence) and not isinstance(condition, str):
        return any(same(one, value) for one in condition)
    return same(condition, value)


def same(one: Scalar, other: Any) -> bool:
    """Whether two values are equal and of one kind, so that 1 is not true."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def check_words(condition: Any, place: str) -> None:
    """Raise ValueError for a condition with an unknown word."""
    if isinstance(condition, Mapping) and (
        len(condition) != 1 or next(iter(condition)) not in ("not", "above", "below")
    ):
        raise ValueError(f"{place}: {dict(condition)} is no condition; write not, above or below")


def of_version(entries: Iterable[Exclusion], version: str) -> tuple[Exclusion, ...]:
    """The exclusions that apply to a version."""
    return tuple(entry for entry in entries if not entry.versions or version in entry.versions)
