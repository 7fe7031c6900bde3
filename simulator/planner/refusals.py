"""Counts the refused plans by reason, with one example of each reason."""

from __future__ import annotations

import re

from msgspec import Struct, field

_NUMBER = re.compile(r"(?<![A-Za-z\d])\d[\d,.]*(?![A-Za-z\d])")
_DETAIL = re.compile(r"[;(:].*", re.DOTALL)

TOO_SLOW = "too slow for the deadline or budget, whatever else"
"""Reason for a plan whose lower bound is above the longest allowed step."""

FULL = "out of memory"
AT_RISK = "at risk: in use it fits, but not with what framework and allocator may reserve"
"""Reason for a plan that a search with its default head-room leaves out; a head-room of 0 admits it."""
NO_HEADROOM = "less head-room than was asked for"
FULL_OR_NO_HEADROOM = "out of memory, or without the head-room"
"""Reason in a fleet, whose search does not tell the two apart."""


class Refusal(Struct, frozen=True):
    """Plans refused for one reason."""

    reason: str
    count: int
    example: str


class Refusals(Struct):
    """Counts of refused plans by reason, in order of first appearance."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, count: int, example: str) -> None:
        """Count plans under a reason, of which the first example is kept."""
        if count > 0:
            self.counts[reason] = self.counts.get(reason, 0) + count
            self.examples.setdefault(reason, example)

    def add_error(self, message: str, count: int, plan: str) -> None:
        """Count plans under the reason of an error message, which is its first clause without numbers."""
        self.add(reason_of(message), count, f"{plan}: {message}")

    def merge(self, other: Refusals) -> None:
        """Add the counts of `other` to these."""
        for reason, count in other.counts.items():
            self.add(reason, count, other.examples[reason])

    @property
    def total(self) -> int:
        """Number of all refused plans."""
        return sum(self.counts.values())

    def rows(self) -> tuple[Refusal, ...]:
        """The reasons, most frequent first; ties go by text."""
        order = sorted(self.counts, key=lambda reason: (-self.counts[reason], reason))
        return tuple(Refusal(reason, self.counts[reason], self.examples[reason]) for reason in order)


def refusal_text(refused: Refusals, first: str, widen: str) -> str:
    """Why a search has no plan: a first sentence, the most frequent reasons, and what to widen."""
    rows = refused.rows()[:4]
    listed = "; ".join(f"{row.count:,} x {row.reason} ({row.example})" for row in rows)
    return f"{first}. Refused: {listed or 'nothing'}; widen the space, the {widen} or the limits"


def reason_of(message: str) -> str:
    """The kind of an error: its text up to the first detail, with every number replaced by n.

    >>> reason_of("parallel.ep=64 does not divide experts=100; nearest: 50, 100")
    'parallel.ep=n does not divide experts=n'
    """
    start = message.split(": ", 1)[1] if message.startswith("schedule ") and ": " in message else message
    prefix = message[: len(message) - len(start)]
    return _NUMBER.sub("n", prefix + _DETAIL.sub("", start)).strip()
