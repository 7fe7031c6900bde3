"""Calibration profiles without some of their entries, to see what these entries do to a prediction."""

from __future__ import annotations

from fnmatch import fnmatchcase

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError

_KEPT = 32
_made: dict[tuple[int, tuple[str, ...]], tuple[CalibrationProfile, CalibrationProfile]] = {}
"""Profiles by the identity of the whole one, which is kept beside them so that its id stays taken."""


def without_entries(profile: CalibrationProfile, names: tuple[str, ...]) -> CalibrationProfile:
    """The profile without the entries of these ids; `*` in a name stands for any text.

    Rates are then taken from the next entry or prior that fits. The same profile and names give the same
    object. Raises InputError for a name without `*` that no entry has.
    """
    if not names:
        return profile
    key = (id(profile), names)
    if key not in _made:
        if len(_made) >= _KEPT:
            _made.clear()
        _made[key] = (profile, _without(profile, names))
    return _made[key][1]


def _without(profile: CalibrationProfile, names: tuple[str, ...]) -> CalibrationProfile:
    ids = {entry.id for entry in profile.entries()}
    for name in names:
        if "*" not in name and name not in ids:
            raise InputError(
                f"without_entries: profile {profile.name!r} has no entry {name!r}; give the id of one of its "
                f"{len(ids)} entries, or a pattern "
                "with *"
            )
    gone = {id_ for id_ in ids if any(fnmatchcase(id_, name) for name in names)}
    kept = {
        field: tuple(entry for entry in getattr(profile, field) if entry.id not in gone)
        for field in ("gemm_tables", "curves", "laws", "priors")
    }
    return profile.model_copy(update=kept)
