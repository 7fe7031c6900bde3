"""Turns the rows of a calibration into the entries of a profile.

Entries that the simulator reads by id (ep.*, p2p.*, collective.*) have these ids; the others are named
`<profile>.<what>` or by measurement. Nothing is filled in by hand; an entry appears only if rows support it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moesim.hwmodels.calibration import CalibrationProfile, Entry, GemmTable, Law, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.kernels.calibrate.entries_common import Rows
from moesim.kernels.calibrate.entries_compute import attention, gemms, interference, memory, small
from moesim.kernels.calibrate.entries_links import collectives, expert_parallel, forwarding, point_to_point


def entries(rows: Rows) -> list[Entry]:
    """Every entry that the rows support, in the order of the makers."""
    makers: tuple[Callable[[Rows], Iterable[Entry]], ...] = (
        expert_parallel,
        forwarding,
        point_to_point,
        collectives,
        gemms,
        attention,
        memory,
        interference,
        small,
    )
    return [entry for make in makers for entry in make(rows)]


def as_profile(profile: CalibrationProfile, found: Sequence[Entry]) -> CalibrationProfile:
    """The profile with these entries; raises InputError where two have one id."""
    ids = [entry.id for entry in found]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise InputError(f"the entries {', '.join(twice)} appear twice in {profile.name}")
    return CalibrationProfile.model_validate(
        {
            **{name: getattr(profile, name) for name in type(profile).model_fields},
            "gemm_tables": tuple(e for e in found if isinstance(e, GemmTable)),
            "curves": tuple(e for e in found if isinstance(e, MeasuredCurve)),
            "laws": tuple(e for e in found if isinstance(e, Law)),
        }
    )
