"""Merges imported entries into another profile, to add what one machine cannot measure."""

from __future__ import annotations

from moesim.hwmodels.calibration import CalibrationProfile, Entry
from moesim.hwmodels.errors import InputError


def merge(
    base: CalibrationProfile, added: CalibrationProfile, *, name: str | None = None
) -> CalibrationProfile:
    """`base` with the entries of `added` before its own; an entry of the same id is replaced.

    The note of a new entry names the source of the entry that it replaces. Raises InputError where the two
    profiles describe different accelerators, or `added` is empty.
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
        fresh = tuple(_replacing(entry, old.get(entry.id)) for entry in getattr(added, kind))
        fields[kind] = fresh + tuple(entry for entry in getattr(base, kind) if entry.id not in new)
    # Both profiles already hold the entries of their includes; including these again would define the
    # replaced entries twice.
    fields |= {"name": name or base.name, "include": ()}
    fields["evidence"] = f"{base.evidence} Merged from {added.name}: {', '.join(new)}."
    return CalibrationProfile.model_validate(fields)


def _replacing(entry: Entry, old: Entry | None) -> Entry:
    if old is None or old == entry:
        return entry
    text = f"replaces the entry from {old.source}"
    return entry.model_copy(update={"note": f"{entry.note}; {text}" if entry.note else text})
