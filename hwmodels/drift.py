"""Drift between two profiles of one machine, entry by entry."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from moesim.hwmodels.calibration import CalibrationProfile, Entry, GemmTable, Law, MeasuredCurve, Prior


@dataclass(frozen=True, slots=True)
class Drift:
    """How an entry changed: new over old minus 1. `points`: how many were compared (0 = in one only)."""

    id: str
    points: int
    median: float
    worst: float
    worst_at: str
    allowed: float
    """Both stated errors together."""
    note: str = ""

    @property
    def drifted(self) -> bool:
        """Whether the median change is larger than what both profiles state."""
        return abs(self.median) > self.allowed


def compare(old: CalibrationProfile, new: CalibrationProfile) -> list[Drift]:
    """A row an entry: drifted first, then by the size of the change, then what only one profile has.

    Curves are compared at the new profile's points inside the old one's range, tables at equal shapes.
    Pure; profiles of two accelerators can be compared too, which says how far they are apart.
    """
    before = {entry.id: entry for entry in old.entries()}
    after = {entry.id: entry for entry in new.entries()}
    rows = [_drift(before[id_], after[id_]) for id_ in after if id_ in before]
    rows.sort(key=lambda row: (not row.drifted, -abs(row.median), row.id))
    for id_ in sorted(after.keys() ^ before.keys()):
        where = "only in the new profile" if id_ in after else "only in the old profile"
        rows.append(Drift(id_, 0, 0.0, 0.0, "", 0.0, where))
    return rows


def _drift(old: Entry, new: Entry) -> Drift:
    allowed = old.residual.relative + new.residual.relative
    found = changes(old, new)
    if not found:
        return Drift(new.id, 0, 0.0, 0.0, "", allowed, "no common points")
    worst_at = max(found, key=lambda key: abs(found[key]))
    return Drift(new.id, len(found), statistics.median(found.values()), found[worst_at], worst_at, allowed)


def changes(old: Entry, new: Entry) -> Mapping[str, float]:
    """Relative change of an entry by point or shape, at those that both have (pure)."""
    if isinstance(old, GemmTable) and isinstance(new, GemmTable):
        rates = {row[:4]: old.flop_per_s(row) for row in old.points}
        return {
            "x".join(f"{x:g}" for x in row[:3]): new.flop_per_s(row) / rates[row[:4]] - 1.0
            for row in new.points
            if row[:4] in rates
        }
    if isinstance(old, Prior) and isinstance(new, Prior):
        return {"fraction": new.fraction / old.fraction - 1.0}
    if isinstance(old, Law) and isinstance(new, Law) and (not old.points or not new.points):
        return {}
    if (isinstance(old, MeasuredCurve) and isinstance(new, MeasuredCurve)) or (
        isinstance(old, Law) and isinstance(new, Law)
    ):
        found = {}
        for (x, y), shown in zip(new.curve.points, new.points, strict=True):
            reading = old.curve.at(x)
            if not reading.extrapolated and reading.value and (x, y) != (0.0, 1.0):
                found[f"{shown[0]:g}"] = y / reading.value - 1.0
        return found
    return {}
