"""Shared by the importers: bounded reading, identification of the accelerator, the profile of the entries."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

from moesim.hwmodels.accelerator import Accelerator, load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.kernels.machine import accelerator_name

MAX_BYTES = 4_000_000
"""Size limit of a log; that of a full sweep is well below a megabyte."""
MOST_LINE = 500
"""Most characters of a line with a result; longer lines are ignored."""


def read_log(path: Path) -> str:
    """The text of a log; raises InputError for a file that is missing, too large, empty or binary."""
    return read_text(path, MAX_BYTES, "log of measurements", strict=False)


def meant_accelerator(named: str | None, device: str | None, place: str) -> Accelerator:
    """The accelerator that the user named, or the one of the device in the log.

    Raises InputError where neither identifies it, or where they contradict each other.
    """
    seen = accelerator_name(device) if device else None
    if named is None and seen is None:
        what = f"the device {device!r} is not a shipped accelerator" if device else "it names no device"
        raise InputError(f"{place}: {what}; say which accelerator was measured (--accelerator h200-sxm)")
    accelerator = load_accelerator(named or seen or "")
    if seen is not None and accelerator.name != seen:
        raise InputError(
            f"{place}: measured on {device!r} ({seen}), not on {accelerator.name}; a profile of another "
            f"accelerator is made from this one's by transfer, not by renaming: use --accelerator {seen}"
        )
    return accelerator


def file_date(path: Path) -> str:
    """Day of the file's last change, for a log that carries no date."""
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, tz=datetime.UTC).date().isoformat()


def imported_profile(
    name: str,
    accelerator: Accelerator,
    curves: Iterable[MeasuredCurve],
    *,
    software: str,
    description: str,
    dispatchers: tuple[str, ...] = (),
) -> CalibrationProfile:
    """A profile of imported curves only, which another profile includes or which is merged into one.

    `dispatchers`: names that the curves give to kernels.
    """
    return CalibrationProfile(
        name=name,
        accelerator=accelerator.name,
        software=software,
        description=description,
        evidence=(
            "Imported as printed, nothing fitted: every entry says which tool printed it and under which "
            "conditions. Operators that it does not cover need the entries of another profile."
        ),
        dispatchers=dispatchers,
        curves=tuple(curves),
    )
