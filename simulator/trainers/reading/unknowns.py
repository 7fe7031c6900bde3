"""Unknown values inside texts: each is one mark of private characters, so that texts stay plain strings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Unknown

OPEN, CLOSE = "\ue000", "\ue001"
PRIVATE = re.compile("[\ue000\ue001]")
"""Characters that a file must not hold, because marks are made of them."""
MARK = re.compile("\ue000(\\d{1,7})\ue001")
_MOST_SHOWN = 160
_MOST_ALTERNATIVES = 200_000
_MOST_OPTIONS = 20
"""Most alternatives of one value that a message shows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that depends on a condition which the file does not decide.

    `alternatives` are the values of the branches, each a tuple of texts: one for a variable, one for each
    element of an array. `condition` says on what it depends.
    """

    alternatives: tuple[tuple[str, ...], ...]
    condition: str


class Unknowns:
    """The unknown values of one reading; a mark in a text is an index into them."""

    def __init__(self) -> None:
        """Begins without an unknown value."""
        self._entries: list[Unknown | Choice] = []
        self._index: dict[Unknown | Choice, int] = {}
        self._alternatives = 0

    def mark(self, entry: Unknown | Choice) -> str:
        """The mark that stands for an unknown value inside a text."""
        if isinstance(entry, Choice):
            self._alternatives += sum(map(len, entry.alternatives))
            if self._alternatives > _MOST_ALTERNATIVES:
                raise InputError(
                    f"the values that conditions leave open are more than {_MOST_ALTERNATIVES:,}, the limit; "
                    "give the variables of the conditions, or write the arguments out"
                )
        if entry not in self._index:
            self._index[entry] = len(self._entries)
            self._entries.append(entry)
        return f"{OPEN}{self._index[entry]}{CLOSE}"

    def entry(self, text: str) -> Unknown | Choice | None:
        """The unknown value of a text that is one mark and nothing else, or None."""
        match = MARK.fullmatch(text)
        return self._entries[int(match[1])] if match else None

    def shown(self, text: str) -> str:
        """The text with its unknown parts as the file writes them."""
        return self._shown(text, 0)

    def value(self, text: str) -> str | Unknown:
        """A text without marks as it is; any other as an Unknown with the reason of its first mark."""
        match = MARK.search(text)
        if match is None:
            return text
        return Unknown(self.shown(text), self.reason(text))

    def reason(self, text: str) -> str:
        """Why the first unknown part of a text has no value."""
        match = MARK.search(text)
        if match is None:
            return ""
        entry = self._entries[int(match[1])]
        if isinstance(entry, Unknown):
            return entry.reason
        return f"depends on {entry.condition}"

    def _shown(self, text: str, depth: int) -> str:
        def one(match: re.Match[str]) -> str:
            entry = self._entries[int(match[1])]
            if isinstance(entry, Unknown):
                return entry.text
            if depth > 3:
                return "..."
            first = entry.alternatives[:_MOST_OPTIONS]
            options = [self._shown(" ".join(option), depth + 1) or "nothing" for option in first]
            return " or ".join(dict.fromkeys([*options, *["..."][: len(entry.alternatives) - len(first)]]))

        shown = MARK.sub(one, text)
        return shown if depth == 0 or len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + "..."


def is_known(*texts: str) -> bool:
    """Whether no text holds the mark of an unknown value."""
    return not any(OPEN in text for text in texts)


def merged_words(
    ours: tuple[str, ...], theirs: tuple[str, ...], condition: str, unknowns: Unknowns
) -> tuple[str, ...]:
    """The words of two branches: what they share, and one choice for the part where they differ."""
    if ours == theirs:
        return ours
    most = min(len(ours), len(theirs))
    start = next((n for n in range(most) if ours[n] != theirs[n]), most)
    end = next((n for n in range(most - start) if ours[-1 - n] != theirs[-1 - n]), most - start)
    middle = (ours[start : len(ours) - end], theirs[start : len(theirs) - end])
    mark = unknowns.mark(Choice(_flat(middle, condition, unknowns), condition))
    return (*ours[:start], mark, *ours[len(ours) - end :])


def merged_text(ours: str, theirs: str, condition: str, unknowns: Unknowns) -> str:
    """The text of two branches: their shared first words, and one choice for the rest."""
    if ours == theirs:
        return ours
    most = min(len(ours), len(theirs))
    start = next((n for n in range(most) if ours[n] != theirs[n]), most)
    longer = ours if len(ours) > len(theirs) else theirs
    if not (start == most and longer[start].isspace()):
        while start and not ours[start - 1].isspace():
            start -= 1
    rests = (ours[start:], theirs[start:])
    some = [rest for rest in rests if rest]
    before = " " if all(rest[0].isspace() for rest in some) else ""
    after = " " if all(rest[-1].isspace() for rest in some) else ""
    options = _flat(((rest.strip(),) for rest in rests), condition, unknowns)
    if len(options) == 1:
        return ours[:start] + before + options[0][0] + after
    return ours[:start] + before + unknowns.mark(Choice(options, condition)) + after


def _flat(
    options: Iterable[tuple[str, ...]], condition: str, unknowns: Unknowns
) -> tuple[tuple[str, ...], ...]:
    """Alternatives without those that are a choice of the same condition themselves, and without repeats."""
    flat: list[tuple[str, ...]] = []
    for option in options:
        entry = unknowns.entry(option[0]) if len(option) == 1 else None
        flat += entry.alternatives if isinstance(entry, Choice) else [option]
    return tuple(dict.fromkeys(flat))
