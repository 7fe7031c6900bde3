"""What the importers share: bounded reading, the accelerator that is meant, the profile around entries."""

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
"""A log of a full sweep is well below a megabyte."""
MOST_LINE = 500
"""Characters of a line that a tool prints; longer ones hold no result."""


def read_log(path: Path) -> str:
    """The text of a log; raises InputError for a file that is missing, too large, empty or binary."""
    return read_text(path, MAX_BYTES, "log of measurements", strict=False)


def meant_accelerator(named: str | None, device: str | None, place: str) -> Accelerator:
    """The accelerator that was named, or that the log's device is.

    Raises InputError when neither says it, or when they contradict each other.
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
    """Day of the file's last change: when a log carries no date of its own."""
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, tz=datetime.UTC).date().isoformat()


def imported_profile(
    name: str, accelerator: Accelerator, curves: Iterable[MeasuredCurve], *, software: str, description: str
) -> CalibrationProfile:
    """A profile that holds imported curves only; another profile includes it, or it is merged by hand."""
    return CalibrationProfile(
        name=name,
        accelerator=accelerator.name,
        software=software,
        description=description,
        evidence=(
            "Imported as printed, nothing fitted: every entry says which tool printed it and under which "
            "conditions. Operators that it does not cover need the entries of another profile."
        ),
        curves=tuple(curves),
    )
