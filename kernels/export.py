"""Writes measured curves to a calibration profile file, reproducibly and with provenance on every entry.

The schema is `moesim.hwmodels.calibration`; a profile is written only if it loads back unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Struct
from pydantic import ValidationError

from moesim.hwmodels.calibration import (
    CalibrationProfile,
    Conditions,
    Duty,
    Entry,
    GemmClass,
    GemmTable,
    Law,
    MeasuredCurve,
    Residual,
)
from moesim.hwmodels.calibration_entry import LawGroup
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import write_atomically
from moesim.hwmodels.provenance import Kind
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import dump_mapping, parse_mapping

SIGNIFICANT_DIGITS = 5
"""Digits of a measured number in the file: finer than any spread, and still readable."""

_FLOW_KEYS = frozenset(
    {"residual", "conditions", "include", "used_for", "also_for", "in_situ_groups", "dispatchers"}
)


class Origin(Struct, frozen=True):
    """The origin of measurements, which goes into the source and conditions of every entry."""

    title: str
    """The measurement, such as "moesim calibrate on 8x NVIDIA H200" or "nccl-tests all_gather_perf"."""
    date: str
    kind: Kind = "measured"
    device: str | None = None
    driver: str | None = None
    clocks: str | None = None
    cuda: str | None = None
    kernels_hash: str | None = None
    command: str | None = None
    note: str | None = None

    def source(self, what: str) -> str:
        """The source text of an entry: who measured `what`, where, with which software."""
        parts = [self.title]
        parts += [f"driver {self.driver}"] if self.driver else []
        parts += [f"CUDA {self.cuda}"] if self.cuda else []
        parts += [f"kernels {self.kernels_hash}"] if self.kernels_hash else []
        parts += [f"command {self.command!r}"] if self.command else []
        return f"{', '.join(parts)}: {what}"

    def conditions(
        self,
        *,
        compute_sms: int | None = None,
        communication_sms: int = 0,
        beside_communication: bool = False,
        note: str | None = None,
        duty: Duty | None = None,
    ) -> Conditions:
        """Conditions of an entry on this machine."""
        notes = [text for text in (note, self.note) if text]
        return Conditions(
            compute_sms=compute_sms,
            communication_sms=communication_sms,
            beside_communication=beside_communication,
            device=self.device,
            driver=self.driver,
            clocks=self.clocks,
            note="; ".join(notes) or None,
            duty=duty,
        )


def significant(value: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    """The value rounded to significant digits; raises InputError for a value that is not finite."""
    if not math.isfinite(value):
        raise InputError(f"a measured value is {value}, which no profile may hold; measure it again")
    return float(f"{value:.{digits - 1}e}")


def residual(relative: float, meaning: str) -> Residual:
    """A stated relative error, at least 0.1 % (nothing here is exact) and below 1."""
    return Residual(relative=significant(min(0.95, max(1e-3, relative)), 3), meaning=meaning)


def curve(
    id_: str,
    points: Iterable[tuple[float, float]],
    *,
    x: tuple[str, str],
    y: tuple[str, str],
    origin: Origin,
    what: str,
    error: Residual,
    conditions: Conditions | None = None,
    interpolation: Literal["linear", "log"] = "linear",
    used_for: Sequence[str] = (),
    note: str | None = None,
) -> MeasuredCurve:
    """A measured curve; `x` and `y` are (name, unit), and points are in these units (see `si_factor`).

    Raises InputError for points that are not a function of x, or a unit that the schema does not know.
    """
    return _entry(
        MeasuredCurve,
        f"curve {id_!r}",
        origin,
        what,
        id=id_,
        x_name=x[0],
        x_unit=x[1],
        y_name=y[0],
        y_unit=y[1],
        points=tuple((significant(px, 8), significant(py)) for px, py in sorted(points)),
        interpolation=interpolation,
        used_for=tuple(used_for),
        residual=error,
        conditions=conditions or origin.conditions(),
        note=note,
    )


def law(
    id_: str,
    group: LawGroup,
    points: Iterable[tuple[float, float]],
    *,
    origin: Origin,
    what: str,
    error: Residual,
    note: str | None = None,
) -> Law:
    """A slow-down law from (communication SMs, time over time alone); raises InputError as `curve` does."""
    slower = tuple((n, significant(s)) for n, s in points)
    fields = {"residual": error, "conditions": origin.conditions(), "note": note}
    return _entry(Law, f"law {id_!r}", origin, what, id=id_, group=group, points=slower, **fields)


def gemm_table(
    id_: str,
    cls: GemmClass,
    dtype: Literal["fp8", "bf16", "fp32"],
    rows: Iterable[tuple[float, float, float, float, float]],
    *,
    sm_aware: bool,
    origin: Origin,
    what: str,
    error: Residual,
    conditions: Conditions,
) -> GemmTable:
    """A table of GEMM rates with rows (m, n, k, groups, FLOP/s); raises InputError as `curve` does."""
    return _entry(
        GemmTable,
        f"table {id_!r}",
        origin,
        what,
        id=id_,
        cls=cls,
        dtype=dtype,
        sm_aware=sm_aware,
        unit="TFLOP/s",
        points=tuple((m, n, k, g, significant(rate / 1e12)) for m, n, k, g, rate in rows),
        residual=error,
        conditions=conditions,
    )


EntryT = TypeVar("EntryT", bound=Entry)


def _entry(kind: type[EntryT], name: str, origin: Origin, what: str, **fields: Any) -> EntryT:
    """An entry with the provenance of `origin`; raises InputError, with its name, for what is refused."""
    try:
        return kind(source=origin.source(what), kind=origin.kind, date=origin.date, **fields)
    except ValidationError as problem:
        reasons = "; ".join(
            item["msg"].removeprefix("Value error, ") for item in problem.errors(include_url=False)
        )
        raise InputError(f"{name} cannot stand in a calibration profile: {reasons}") from None


def carried(entry: Entry, profile_name: str) -> Entry:
    """An entry of another profile, unchanged except for a note that names that profile."""
    text = f"carried unchanged from the profile {profile_name}"
    return entry.model_copy(update={"note": f"{entry.note}; {text}" if entry.note else text})


def profile_mapping(profile: CalibrationProfile) -> dict[str, Any]:
    """Plain data of a profile as a file holds it, without defaults and with times as text with units."""
    data = profile.model_dump(exclude_defaults=True)
    for key in ("launch_gap", "kernel_floor"):
        if key in data:
            data[key]["value"] = _microseconds(data[key]["value"])
            if "between" in data[key]:
                data[key]["between"] = [_microseconds(end) for end in data[key]["between"]]
    return {key: _plain(value) for key, value in data.items()}


def _microseconds(seconds: float) -> str:
    return f"{significant(seconds * 1e6, 9):.12g} us"


def profile_text(profile: CalibrationProfile, *, as_json: bool = False) -> str:
    """The file's text; equal profiles give equal text, and the text reads back to an equal profile.

    Raises InputError where it would not, for example because a number exceeds the text's precision.
    """
    data = profile_mapping(profile)
    if as_json:
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    else:
        text = dump_mapping(data, compact=_FLOW_KEYS)
    name = f"{profile.name}{'.json' if as_json else '.yaml'}"
    back = validate_model(CalibrationProfile, parse_mapping(text, name), name)
    if profile_mapping(back) != data:
        raise InputError(f"{name}: the profile would not read back as it was written; nothing was written")
    return text


def write_profile(profile: CalibrationProfile, path: Path) -> Path:
    """Write a .yaml, .yml or .json profile; an interrupted write leaves the old file unchanged.

    Raises InputError for another extension or a folder that cannot be written.
    """
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise InputError(f"{path}: a profile is a .yaml, .yml or .json file; choose such a name")
    write_atomically(path, [profile_text(profile, as_json=path.suffix.lower() == ".json")])
    return path


def _plain(value: Any) -> Any:
    """Convert tuples to lists and whole floats to ints, as a person would write them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
