"""Compares two profiles of one machine: the points that moved beyond their stated errors, shape by shape."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import erfc, hypot, inf, sqrt

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile, Entry, GemmTable, Law, MeasuredCurve, Prior
from moesim.hwmodels.provenance import Sourced

# -- profiles --------------------------------------------------------------------------------------

NUMBERS = ("launch_gap", "kernel_floor")
"""Numbers of a profile that stand outside its entries."""

RULE = "a shape or point counts as changed where it moved by more than both profiles' stated errors together"


class Drift(Struct, frozen=True):
    """Relative change of an entry (new / old - 1) over the `points` compared (0: only one profile has it)."""

    id: str
    points: int
    median: float
    worst: float
    worst_at: str
    allowed: float
    """Sum of both stated errors, the threshold for every point."""
    changed: tuple[tuple[str, float], ...] = ()
    """Shapes or points beyond the threshold with their changes, the largest first."""
    note: str = ""

    @property
    def drifted(self) -> bool:
        """Whether any shape or point changed by more than both stated errors."""
        return bool(self.changed)

    @property
    def summary(self) -> str:
        """The changed shapes or points in words, or the note where none changed."""
        if not self.changed:
            return self.note
        shown = ", ".join(f"{key} {change:+.1%}" for key, change in self.changed)
        return f"{len(self.changed)} of {self.points} changed: {shown}"


def compare(old: CalibrationProfile, new: CalibrationProfile) -> list[Drift]:
    """One row per entry: drifted ones first, then by size of change, then those that only one profile has.

    Entries are matched without their profile's name ("mine.gemm_fp8" as "gemm_fp8"). Tables are compared at
    equal shapes, curves and laws at equal x, since a value between two measured points has no stated error.
    Pure. Profiles of two accelerators can be compared too; the rows then show how far they are apart.
    """
    before, after = entries_by_id(old), entries_by_id(new)
    rows = [
        _row(id_, change_by_point, sum(errors), note)
        for id_, change_by_point, errors, note, _ in _common(old, new)
    ]
    rows.sort(key=lambda row: (not row.drifted, -abs(row.worst), row.id))
    for id_ in sorted(after.keys() ^ before.keys()):
        where = "only in the new profile" if id_ in after else "only in the old profile"
        rows.append(Drift(id_, 0, 0.0, 0.0, "", 0.0, note=where))
    return rows


Errors = tuple[float, float]
Common = tuple[str, dict[str, float], Errors, str, bool]


def _common(old: CalibrationProfile, new: CalibrationProfile) -> Iterator[Common]:
    """(id, change by point, both errors, note, whether nothing differs) of what both profiles state."""
    before, after = entries_by_id(old), entries_by_id(new)
    for id_, entry in after.items():
        if (first := before.get(id_)) is not None:
            alone = len(_points(first).keys() ^ _points(entry).keys())
            note = f"{alone} points in one profile only" if alone else ""
            errors = first.residual.relative, entry.residual.relative
            yield id_, changes(first, entry), errors, note, first == entry
    for name in NUMBERS:
        one, other = getattr(old, name), getattr(new, name)
        if one is not None and other is not None and one.value:
            change = {"value": other.value / one.value - 1.0}
            yield name, change, (stated_error(one), stated_error(other)), "", one == other


def verdict(rows: Sequence[Drift]) -> str:
    """One sentence with the numbers of changed entries and points, and the rule."""
    both = [row for row in rows if row.points]
    points, changed = sum(row.points for row in both), sum(len(row.changed) for row in both)
    drifted = sum(row.drifted for row in both)
    return f"{drifted} of {len(both)} common entries changed, at {changed} of {points} points: {RULE}"


def changes(old: Entry, new: Entry) -> dict[str, float]:
    """Relative change of an entry at each shape or point that both versions have (pure)."""
    before, after = _points(old), _points(new)
    return {
        name: value / before[key][1] - 1.0
        for key, (name, value) in after.items()
        if key in before and before[key][1]
    }


def entries_by_id(profile: CalibrationProfile) -> dict[str, Entry]:
    """Entries by id, without the profile's name where the shorter id is unambiguous."""
    entries = list(profile.entries())
    ids = {entry.id for entry in entries}
    bare = {entry.id: entry.id.removeprefix(f"{profile.name}.") for entry in entries}
    return {entry.id if bare[entry.id] in ids else bare[entry.id]: entry for entry in entries}


def _row(id_: str, change_by_point: Mapping[str, float], allowed: float, note: str = "") -> Drift:
    if not change_by_point:
        return Drift(id_, 0, 0.0, 0.0, "", allowed, note="no common points")
    ranked = sorted(change_by_point.items(), key=lambda item: (-abs(item[1]), item[0]))
    changed = tuple((key, change) for key, change in ranked if abs(change) > allowed)
    worst_at, worst = ranked[0]
    median = statistics.median(change_by_point.values())
    return Drift(id_, len(change_by_point), median, worst, worst_at, allowed, changed, note)


def stated_error(number: Sourced) -> float:
    """Half the width of a figure's range over its value; 0 where it states no range."""
    ends = number.range
    return 0.0 if ends is None else (ends[1] - ends[0]) / 2.0 / number.value


def _points(entry: Entry) -> dict[Hashable, tuple[str, float]]:
    """The points of an entry by a key that identifies each, with the name to display and the value."""
    if isinstance(entry, GemmTable):
        seen: Counter[Hashable] = Counter()
        points: dict[Hashable, tuple[str, float]] = {}
        for row in entry.points:
            shape = (row[:4], row[5:])
            seen[shape] += 1  # a shape may stand in a table more than once
            words = ["x".join(f"{x:.9g}" for x in row[:3])]
            words += [f"in {row[3]:g} groups"] if row[3] != 1 else []
            words += [*map(str, row[5:]), *([f"({seen[shape]})"] if seen[shape] > 1 else [])]
            points[shape, seen[shape]] = " ".join(words), entry.flop_per_s(row)
        return points
    if isinstance(entry, Prior):
        return {"fraction": ("fraction", entry.fraction)}
    if isinstance(entry, MeasuredCurve) or (isinstance(entry, Law) and entry.points):
        places = zip(entry.curve.points, entry.points, strict=True)
        defined = (0.0, 1.0) if isinstance(entry, Law) else None  # every law starts at (0, 1) by definition
        return {f"{x:.9g}": (f"{shown[0]:g}", y) for (x, y), shown in places if (x, y) != defined}
    return {}


# -- shapes ----------------------------------------------------------------------------------------

LEVEL = 0.05
"""Chance of a single false alarm over all shapes together, which the correction keeps to."""


class PointDrift(Struct, frozen=True):
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
    found = [
        PointDrift(id_, point, change, *errors)
        for id_, change_by_point, errors, _, same in _common(old, new)
        if not same
        for point, change in change_by_point.items()
    ]
    found.sort(key=lambda p: (-p.significance, -abs(p.change), p.entry, p.point))
    kept: list[PointDrift] = []
    clear = True
    for number, point in enumerate(found):
        clear = clear and point.is_beyond and point.chance <= LEVEL / (len(found) - number)
        kept.append(replace(point, is_clear=clear))
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
