"""What prices stand on: calibration entries, how sure their readings are, what was extrapolated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Evidence:
    """What the prices stand on: calibration entries used, and every reading out of its measured range."""

    entries: set[str] = field(default_factory=set)
    extrapolated: set[str] = field(default_factory=set)
    weighed: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of every entry that priced compute: seconds, and seconds times the error of that reading."""

    def weigh(self, entry: str, seconds: float, residual: float) -> None:
        """Note the error of one reading, which grows where a shape was not measured."""
        before = self.weighed.get(entry, (0.0, 0.0))
        self.weighed[entry] = before[0] + seconds, before[1] + seconds * residual

    def residual(self, entry: str) -> float:
        """Mean error of an entry's readings by seconds; 0 where it priced no compute."""
        seconds, weighed = self.weighed.get(entry, (0.0, 0.0))
        return weighed / seconds if seconds > 0.0 else 0.0

    def add(self, entries: Iterable[str], extrapolated: Iterable[str]) -> None:
        """Note entries and extrapolations of one price."""
        self.entries.update(entries)
        self.extrapolated.update(extrapolated)
