"""Shared by the importers: bounded reading, identification of the accelerator, the profile of the entries."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from moesim.hwmodels.accelerator import Accelerator, load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Entry, MeasuredCurve
from moesim.hwmodels.calibration_entry import ReplacedCurve
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.ranges import BY_DIMENSION
from moesim.hwmodels.units import parse_quantity
from moesim.kernels.machine import accelerator_name


class ImportOption(Struct, frozen=True):
    """A fact that a log may lack: the reader's parameter for it, and its help text.

    `flag` is the option of the command line; "" means `--` and the parameter. `dimension` is that of a
    quantity with a unit, such as bytes_per_s; `choices` are the only values, where there are few.
    """

    parameter: str
    help: str
    flag: str = ""
    type: type[str] | type[int] = str
    default: str | int | None = None
    required: bool = False
    dimension: str = ""
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """The option as it is written on the command line."""
        return self.flag or f"--{self.parameter.replace('_', '-')}"

    def value(self, given: str | int | None) -> Any:
        """The value for the reader; raises InputError, with the option, for an unusable value."""
        if given is None:
            return None
        if self.choices and given not in self.choices:
            raise InputError(f"{self.option} {given}: {' or '.join(self.choices)} is expected")
        if not self.dimension:
            return given
        try:
            quantity = parse_quantity(str(given), self.dimension)
        except InputError as error:
            raise InputError(f"{self.option}: {error}") from None
        problem = BY_DIMENSION[self.dimension].problem(quantity, self.dimension)
        if problem:
            raise InputError(f"{self.option}: {problem}")
        return quantity


class CalibrationImporter(Struct, frozen=True):
    """One kind of log: `read` turns it into a profile and takes `options` as keyword arguments.

    With `several`, `read` takes a list of paths instead of one. It raises InputError for a file that is no
    such log.
    """

    name: str
    """Name of the command `moesim import NAME`."""
    help: str
    log: str
    """Help text on the log file."""
    read: Callable[..., CalibrationProfile]
    options: tuple[ImportOption, ...] = ()
    several: bool = False


NIC = ImportOption(
    "nic_bytes_per_s",
    'Nominal NIC rate per GPU, such as "400 Gb/s", for several nodes.',
    flag="--nic",
    dimension="bytes_per_s",
)
"""The option for the NIC rate, which several importers need."""


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
    if (
        isinstance(entry, MeasuredCurve)
        and isinstance(old, MeasuredCurve)
        and (entry.x_unit, entry.y_unit) == (old.x_unit, old.y_unit)
    ):
        before = ReplacedCurve(profile=profile, source=old.source, date=old.date, points=old.points)
        update["replaces"] = before
    return entry.model_copy(update=update)


def finite(value: object, where: str, most: float = math.inf) -> float:
    """A number of a log below `most`; raises InputError for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number < most):
        limit = f" below {most:g}" if math.isfinite(most) else ""
        raise InputError(f"{where}: {str(value)[:40]!r} is not a number{limit}")
    return number
