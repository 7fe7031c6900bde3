"""Compares two profiles shape by shape: each difference with its own error bar, the clearest first (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import erfc, hypot, inf, sqrt

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.drift import NUMBERS, changes, entries_by_id, stated_error

LEVEL = 0.05
"""Chance of a single false alarm over all shapes together, which the correction keeps to."""


@dataclass(frozen=True, slots=True)
class PointDrift:
    """Relative change (new / old - 1) of one shape or point of an entry, with the errors of both versions.

    Errors are relative, as each profile states them for the entry. `is_clear`: the change exceeds its error
    bar even after the correction for the number of comparisons.
    """

    entry: str
    point: str
    change: float
    old_error: float
    new_error: float
    is_clear: bool = False

    @property
    def error(self) -> float:
        """Error bar of the change if both errors are independent: the root of the sum of their squares."""
        return hypot(self.old_error, self.new_error)

    @property
    def significance(self) -> float:
        """The change in units of its error bar; infinite for a change of figures that state no error."""
        if self.error == 0.0:
            return 0.0 if self.change == 0.0 else inf
        return abs(self.change) / self.error

    @property
    def chance(self) -> float:
        """Probability of so large a change by chance, if stated errors are standard deviations."""
        return erfc(self.significance / sqrt(2.0))

    @property
    def is_beyond(self) -> bool:
        """Whether the change exceeds both stated errors together, as in `drift.compare`."""
        return abs(self.change) > self.old_error + self.new_error


def compare_points(old: CalibrationProfile, new: CalibrationProfile) -> tuple[PointDrift, ...]:
    """Every shape and point that both profiles state, the most significant change first.

    An entry that both took from the same source is no comparison and is left out (see `shared_entries`).

    The correction is Holm's: the n-th clearest of N changes counts as clear where its chance is at most
    LEVEL / (N - n + 1), and all clearer ones are.
    """
    found = sorted(_all(old, new), key=lambda p: (-p.significance, -abs(p.change), p.entry, p.point))
    kept: list[PointDrift] = []
    clear = True
    for number, point in enumerate(found):
        clear = clear and point.is_beyond and point.chance <= LEVEL / (len(found) - number)
        kept.append(
            PointDrift(
                point.entry, point.point, point.change, point.old_error, point.new_error, is_clear=clear
            )
        )
    return tuple(kept)


def verdict_of_points(points: Sequence[PointDrift]) -> str:
    """How many shapes changed, how many would by chance, and how many are left after the correction."""
    beyond = [point for point in points if point.is_beyond]
    clear = sum(point.is_clear for point in points)
    entries = len({point.entry for point in beyond})
    # The threshold is the plain sum of both errors, which is more than one standard deviation.
    expected = sum(
        erfc((p.old_error + p.new_error) / p.error / sqrt(2.0)) if p.error else 0.0 for p in points
    )
    first = (
        f"{len(beyond)} of {len(points)} shapes and points, in {entries} "
        f"{'entry' if entries == 1 else 'entries'}, changed by more than both stated errors together"
    )
    if not beyond:
        return f"{first}."
    return (
        f"{first}; {clear} of them stay clear after correction for {len(points)} comparisons (Holm, "
        f"{LEVEL:.0%} in all). If stated errors are standard deviations, about {expected:.0f} would be "
        "beyond them by chance alone."
    )


def shared_entries(old: CalibrationProfile, new: CalibrationProfile) -> int:
    """Number of entries that both profiles have from the same source, with the same figures."""
    before = entries_by_id(old)
    return sum(before.get(id_) == entry for id_, entry in entries_by_id(new).items())


CAUTION = (
    "Many comparisons find some large change by chance: judge a single shape by the corrected verdict. "
    "Entries state errors of different meaning (largest, median or rms error, spread of repeats), which the "
    "last table lists. Shapes of one entry were fitted together, so that their errors are not independent."
)


def _all(old: CalibrationProfile, new: CalibrationProfile) -> Iterator[PointDrift]:
    before, after = entries_by_id(old), entries_by_id(new)
    for id_, entry in after.items():
        if id_ in before and before[id_] != entry:
            errors = before[id_].residual.relative, entry.residual.relative
            for point, change in changes(before[id_], entry).items():
                yield PointDrift(id_, point, change, *errors)
    for name in NUMBERS:
        first, other = getattr(old, name), getattr(new, name)
        if first is not None and other is not None and first.value and first != other:
            change = other.value / first.value - 1.0
            yield PointDrift(name, "value", change, stated_error(first), stated_error(other))
