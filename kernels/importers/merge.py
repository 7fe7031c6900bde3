"""Merges imported entries into another profile, to add what one machine cannot measure."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.calibration import CalibrationProfile, Entry, MeasuredCurve
from moesim.hwmodels.calibration_entry import ReplacedCurve
from moesim.hwmodels.errors import InputError


def merge(
    base: CalibrationProfile, added: CalibrationProfile, *, name: str | None = None
) -> CalibrationProfile:
    """`base` with the entries of `added` before its own; an entry of the same id is replaced.

    The note of a new entry names the source of the entry that it replaces, and a new curve keeps the
    points of the old one. Raises InputError where the two profiles describe different accelerators, or
    `added` is empty.
    """
    if added.accelerator not in (base.accelerator, "any") and base.accelerator != "any":
        raise InputError(
            f"profile {added.name!r} describes {added.accelerator} and {base.name!r} describes "
            f"{base.accelerator}: entries of one accelerator do not stand for another (see transfer)"
        )
    new = {entry.id: entry for entry in added.entries()}
    if not new:
        raise InputError(f"profile {added.name!r} holds no entry to merge into {base.name!r}")
    old = {entry.id: entry for entry in base.entries()}
    fields = {key: getattr(base, key) for key in type(base).model_fields}
    for kind in ("gemm_tables", "curves", "laws", "priors"):
        fresh = tuple(_replacing(entry, old.get(entry.id), base.name) for entry in getattr(added, kind))
        fields[kind] = fresh + tuple(entry for entry in getattr(base, kind) if entry.id not in new)
    fields["dispatchers"] = tuple(dict.fromkeys((*added.dispatchers, *base.dispatchers)))
    # Both profiles already hold the entries of their includes; including these again would define the
    # replaced entries twice.
    fields |= {"name": name or base.name, "include": ()}
    fields["evidence"] = f"{base.evidence} Merged from {added.name}: {', '.join(new)}."
    return CalibrationProfile.model_validate(fields)


def _replacing(entry: Entry, old: Entry | None, profile: str) -> Entry:
    """The new entry with the source, and for a curve also the points, of the one that it replaces."""
    if old is None or old == entry:
        return entry
    text = f"replaces the entry from {old.source}"
    update: dict[str, Any] = {"note": f"{entry.note}; {text}" if entry.note else text}
    if isinstance(entry, MeasuredCurve) and isinstance(old, MeasuredCurve) and _same_units(entry, old):
        before = ReplacedCurve(profile=profile, source=old.source, date=old.date, points=old.points)
        update["replaces"] = before
    return entry.model_copy(update=update)


def _same_units(entry: MeasuredCurve, old: MeasuredCurve) -> bool:
    return (entry.x_unit, entry.y_unit) == (old.x_unit, old.y_unit)
