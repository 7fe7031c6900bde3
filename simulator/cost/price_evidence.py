"""The evidence of a price, as a value that the price carries (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moesim.simulator.cost.moved import Moved


class EntryReading(NamedTuple):
    """Seconds of compute that one calibration entry priced, and their sum weighted by relative error."""

    entry: str
    seconds: float
    error_s: float


@dataclass(frozen=True, slots=True)
class PriceEvidence:
    """Calibration entries behind a price, notes on assumptions and extrapolations, and readings of compute.

    Each entry has at most one reading. `combined` adds the evidence of several prices.
    """

    entries: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()
    """Assumptions, and readings outside the measured range."""
    readings: tuple[EntryReading, ...] = ()
    reads: frozenset[tuple[str, float]] = frozenset()
    """(entry, x in SI units) at which curves of transfers were read."""

    @classmethod
    def of(
        cls, entries: Iterable[str], notes: Iterable[str] = (), reads: Iterable[tuple[str, float]] = ()
    ) -> PriceEvidence:
        """Evidence without readings of compute; empty texts are left out."""
        return cls(
            frozenset(e for e in entries if e), frozenset(n for n in notes if n), reads=frozenset(reads)
        )

    def __or__(self, other: PriceEvidence) -> PriceEvidence:
        """The evidence of the sum of two prices."""
        if other is NO_EVIDENCE:
            return self
        if self is NO_EVIDENCE:
            return other
        return combined(((self, 1.0), (other, 1.0)))

    def mean_errors(self) -> dict[str, float]:
        """Relative error of every entry that priced compute, the mean of its readings weighted by seconds."""
        return {r.entry: r.error_s / r.seconds for r in self.readings if r.seconds > 0.0}


NO_EVIDENCE = PriceEvidence()


def combined(parts: Iterable[tuple[PriceEvidence, float]]) -> PriceEvidence:
    """The evidence of a sum of (evidence, times) prices; a share of a price is a fraction of one time.

    The times weight the readings; all entries and notes are included, however rarely a price was used.
    """
    entries: set[str] = set()
    notes: set[str] = set()
    reads: set[tuple[str, float]] = set()
    sums: dict[str, tuple[float, float]] = {}
    for part, times in parts:
        entries |= part.entries
        if part.notes:
            notes |= part.notes
        if part.reads:
            reads |= part.reads
        for entry, seconds, error_s in part.readings:
            known = sums.get(entry)
            if known is None:
                sums[entry] = times * seconds, times * error_s
            else:
                sums[entry] = known[0] + times * seconds, known[1] + times * error_s
    readings = tuple([EntryReading(entry, *both) for entry, both in sums.items()])
    return PriceEvidence(frozenset(entries), frozenset(notes), readings, frozenset(reads))


@dataclass(frozen=True, slots=True)
class PricedSeconds:
    """A duration and its evidence, with the bytes that a GPU sends meanwhile over NICs and scale-up ports.

    Where compute hides a part of the duration, all bytes are still sent.
    """

    seconds: float = 0.0
    evidence: PriceEvidence = NO_EVIDENCE
    nic_bytes: float = 0.0
    scale_up_bytes: float = 0.0

    def moved(self, what: str) -> Moved:
        """Its bytes under a name."""
        return Moved(what, self.nic_bytes, self.scale_up_bytes)
