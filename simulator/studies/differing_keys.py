"""The keys in which scenarios differ, and names that tell scenarios apart by them (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesim.simulator.scenario import Scenario

MOST_CHANGES = 3
"""Differing keys that the name of a scenario in a comparison states."""

MOST_VALUE = 30
"""Most characters of a value in such a name."""


def own_names(scenarios: Sequence[Scenario]) -> list[str]:
    """Names of scenarios, each told apart from an earlier one of the same name by its differing keys.

    `Scenario.replace` keeps the name, so a changed copy would otherwise be called like its original: a copy
    with communication.sms=8 is called "NAME, communication.sms=8".
    """
    names: list[str] = []
    first: dict[str, Scenario] = {}
    for scenario in scenarios:
        original = first.setdefault(scenario.name, scenario)
        names.append(_told_apart(original, scenario))
    return names


def _told_apart(original: Scenario, scenario: Scenario) -> str:
    """The name of a scenario with its keys that differ from those of `original`."""
    changes = [f"{key}={_short_value(new)}" for key, (_, new) in differing_keys(original, scenario).items()]
    more = len(changes) - MOST_CHANGES
    shown = changes[:MOST_CHANGES] + ([f"{more} more keys"] if more > 0 else [])
    return ", ".join([scenario.name, *shown])


def _short_value(value: object) -> str:
    """A value of a key in a name: null for an absent key, cut where it is long."""
    text = "null" if value is None else str(value)
    return text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 3]}..."


def differing_keys(first: Scenario, other: Scenario) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, defaults included; for a key with a default in both, only `.value` counts."""
    chosen = {item.key for item in first.defaults} & {item.key for item in other.defaults}
    found = differences(first.resolved(), other.resolved())
    return {
        key: values
        for key, values in found.items()
        if key.endswith(".value") or key.rpartition(".")[0] not in chosen
    }


def differences(first: dict[str, Any], other: dict[str, Any], at: str = "") -> dict[str, tuple[Any, Any]]:
    """(first, other) values by dotted key, for all keys that differ; None for an absent key."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*first, *(k for k in other if k not in first)]:
        a, b = first.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{at}{key}.")
        elif a != b:
            found[f"{at}{key}"] = (a, b)
    return found
