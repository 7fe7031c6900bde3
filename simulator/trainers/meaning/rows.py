"""Rows of the summary: every argument with its value, its place and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["key", "default", "base", "irrelevant", "not priced", "ignored"]
"""How an argument counts: it sets a scenario key, the trainer's default does so, the base does so, it changes
nothing, it has an effect that is not priced, or the user said that it is to be ignored."""


@dataclass(frozen=True, slots=True)
class MeaningRow:
    """One line of the summary. `place` is file and line; empty where the file does not say it."""

    argument: str
    value: str
    kind: Kind
    meaning: str
    place: str = ""

    def to_dict(self) -> dict[str, str]:
        """The row as plain data."""
        return {
            "argument": self.argument,
            "value": self.value,
            "kind": self.kind,
            "meaning": self.meaning,
            "place": self.place,
        }


def shown(value: Any) -> str:
    """A value as one short text: words separated by blanks, long texts cut."""
    if value is None or value is True:
        return ""
    text = " ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
