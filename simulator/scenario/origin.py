"""Where a scenario comes from: its preset or file, the overrides on it, and what was left to the rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.texts import key_and_text, overridden_key, value_of
from moesim.simulator.scenario.overrides import plain


class Change(NamedTuple):
    """A new value for a dotted key; `text` is it as `key=value`, `place` names it in errors."""

    key: str
    value: Any
    text: str
    place: str


@dataclass(frozen=True, slots=True)
class ScenarioOrigin:
    """The data that a scenario was built from, and how they came about. All origins compare as equal.

    `source`: name of the preset or path of the file; None for a scenario that was built in Python. `data`:
    the stated keys, with `overrides` ("key=value") applied; None where the scenario's own dump has them.
    `place`: names the data in errors. `left`: keys that the source states for another accelerator and that
    are left to the rules. `copied`: sections that were replaced since, by `Scenario.model_copy`.
    """

    source: str | None = field(default=None, compare=False)
    data: Mapping[str, Any] | None = field(default=None, compare=False)
    place: str | None = field(default=None, compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)
    left: tuple[str, ...] = field(default=(), compare=False)
    copied: frozenset[str] = field(default=frozenset(), compare=False)

    def changed(
        self, data: Mapping[str, Any], changes: Sequence[Change], left: Sequence[str]
    ) -> ScenarioOrigin:
        """The origin after further changes; an override replaces earlier ones at and below its key."""
        texts = list(self.overrides)
        for change in changes:
            texts = [text for text in texts if not is_at_or_below(overridden_key(text), change.key)]
            texts.append(change.text)
        keys = [change.key for change in changes]
        kept = [key for key in self.left if not any(is_at_or_below(key, other) for other in keys)]
        both = tuple(dict.fromkeys([*kept, *left]))
        return replace(self, data=data, overrides=tuple(texts), left=both)

    def copied_with(self, keys: Sequence[str]) -> ScenarioOrigin:
        """The origin of a copy in which whole sections were replaced."""
        return replace(self, data=None, copied=self.copied | set(keys))

    def all_overrides(self, dump: Mapping[str, Any]) -> tuple[str, ...]:
        """The overrides, and the sections that were replaced since as they stand in `dump`."""
        if self.source is None and self.data is None:
            return ()
        texts = [text for text in self.overrides if overridden_key(text).split(".")[0] not in self.copied]
        return (*texts, *(text_of(key, dump.get(key)) for key in sorted(self.copied)))


def is_at_or_below(key: str, other: str) -> bool:
    """Whether a dotted key is another one or lies below it."""
    return key == other or key.startswith(f"{other}.")


def changes_of(overrides: Sequence[str]) -> list[Change]:
    """The changes of `key=value` texts; raises InputError for a text that is none, and for a value."""
    changes = []
    texts: Sequence[object] = overrides
    for text in texts:
        if not isinstance(text, str):
            raise InputError(
                f"an override is a text key=value, for example 'parallel.ep=32', not {repr(text)[:80]}; give "
                "other arguments by their names"
            )
        key, _ = key_and_text(text, "--set", "key=value, for example parallel.ep=32")
        changes.append(Change(key, value_of(text, f"--set {key}"), text, f"--set {text!r}"))
    return changes


def text_of(key: str, value: object) -> str:
    """A change as `key=value`, which reads back as the same value."""
    data = plain(value)
    short = f"{key}={data}"
    if isinstance(data, str):
        try:
            if value_of(short, key) == data:
                return short
        except InputError:
            pass
    return f"{key}={json.dumps(data, default=str)}"
