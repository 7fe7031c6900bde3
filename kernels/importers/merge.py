"""Imported entries into a profile of one's own: what one machine cannot show, from other tools' logs."""

from __future__ import annotations

from moesim.hwmodels.calibration import CalibrationProfile, Entry
from moesim.hwmodels.errors import InputError


def merge(
    base: CalibrationProfile, added: CalibrationProfile, *, name: str | None = None
) -> CalibrationProfile:
    """`base` with the entries of `added` before its own; an entry of the same id is replaced.

    A replaced entry's source stays readable in the note of the new one. Raises InputError where the two
    describe different accelerators, or `added` holds nothing.
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
    # The entries of the includes are in both profiles already: a file that includes them again would
    # define the replaced ones twice.
    fields |= {"name": name or base.name, "include": ()}
    fields["evidence"] = f"{base.evidence} Merged from {added.name}: {', '.join(new)}."
    return CalibrationProfile.model_validate(fields)


def _replacing(entry: Entry, old: Entry | None) -> Entry:
    if old is None or old == entry:
        return entry
    text = f"replaces the entry from {old.source}"
    return entry.model_copy(update={"note": f"{entry.note}; {text}" if entry.note else text})
