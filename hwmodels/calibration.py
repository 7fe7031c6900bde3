"""Calibration profiles hold what was measured or published about the kernels of one accelerator."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.calibration_entry import (
    SM_AWARE,
    AnyLawGroup,
    Conditions,
    Curve,
    Duty,
    Elsewhere,
    Entry,
    PlainPart,
    PowerLaw,
    ReplacedCurve,
    Residual,
    check_value,
    with_former_names,
)
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import is_there, resolved
from moesim.hwmodels.frozen import SameObject
from moesim.hwmodels.provenance import DateText, SourcedFraction, SourcedSeconds
from moesim.hwmodels.units import dimension_of, si_factor
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import load_mapping, parse_mapping

__all__ = [
    "CalibrationProfile",
    "Conditions",
    "Duty",
    "Elsewhere",
    "Entry",
    "GemmClass",
    "GemmRow",
    "GemmTable",
    "KernelLaw",
    "Law",
    "MeasuredCurve",
    "Prior",
    "Residual",
    "TraceOrigin",
    "TracedFile",
    "list_profiles",
    "load_profile",
    "profile_hash",
]

PROFILE_DIRECTORY = Path(__file__).parent / "data" / "calibration"

GemmClass = Literal["gemm", "grouped_gemm", "wgrad_gemm", "gate_gemm"]
LARGEST_SIDE = 1e12
"""Upper limit of every number in a table row, in the units of the table."""


GemmRow = tuple[float, float, float, float, float] | tuple[float, float, float, float, float, str]
"""m, n, k, groups, value [, kernel name]; m (k for a weight gradient) is summed over the groups."""


class GemmTable(Entry):
    """Rates or times of GEMMs of one class and format, by shape."""

    cls: GemmClass
    dtype: Literal["fp4", "fp8", "bf16", "fp32"]
    sm_aware: bool = Field(validation_alias=SM_AWARE)
    """Whether these kernels accept a number of SMs to run on and leave the other SMs free."""
    variant: str = ""
    """Kernel family inside the class: a named one serves operators of that variant only, "" all others."""
    unit: Literal["TFLOP/s", "us"]
    points: tuple[GemmRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _positive(self) -> Self:
        for row in self.points:
            if any(not 0 < number <= LARGEST_SIDE for number in row[:5]):
                raise ValueError(
                    f"{self.id}: every number of {list(row)} must be above 0 and at most {LARGEST_SIDE:g}"
                )
            check_value(self.id, self.flop_per_s(row), "flop_per_s")
        return self

    def flop_per_s(self, row: GemmRow) -> float:
        """The rate of one row in FLOP/s, counting 2 m n k operations."""
        if self.unit == "us":
            return 2.0 * row[0] * row[1] * row[2] / (row[4] * 1e-6)
        return row[4] * 1e12


class MeasuredCurve(Entry):
    """A measured y(x). `used_for` names operator classes ("cast") or class/variant ("cast/token").

    `overlapped` restricts a curve to operators that overlap other work (true) or run alone (false).
    """

    x_name: str
    x_unit: str
    y_name: str
    y_unit: str
    points: tuple[tuple[float, float] | tuple[float, float, str], ...] = Field(min_length=1)
    interpolation: Literal["linear", "log"] = "linear"
    used_for: tuple[str, ...] = ()
    overlapped: bool | None = None
    replaces: Annotated[ReplacedCurve | None, Field(exclude_if=lambda value: value is None)] = None
    """What an import replaced in the profile that it was merged into."""

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        try:
            ys, dimension = self.curve.ys, dimension_of(self.y_unit)
        except InputError as error:
            raise ValueError(str(error)) from None
        for y in ys:
            check_value(self.id, y, "share" if self.id.split(".")[-1].endswith("_fraction") else dimension)
        return self

    @cached_property
    def curve(self) -> Curve:
        """The points in SI units."""
        x, y = si_factor(self.x_unit), si_factor(self.y_unit)
        return Curve(
            id=self.id,
            x_name=self.x_name,
            x_unit=self.x_unit if x == 1.0 else f"x {x:g} {self.x_unit}^-1",
            y_name=self.y_name,
            y_unit=self.y_unit if y == 1.0 else f"x {y:g} {self.y_unit}^-1",
            points=self.in_si,
            interpolation=self.interpolation,
        )

    @property
    def in_si(self) -> tuple[tuple[float, float], ...]:
        """The (x, y) points in SI units."""
        x, y = si_factor(self.x_unit), si_factor(self.y_unit)
        return tuple((p[0] * x, p[1] * y) for p in self.points)


class Law(Entry):
    """Slow-down of a group of operators while n SMs communicate: its time over its time alone on all SMs.

    The form `free_sms` is total / (total - n); `table` holds points (n, slow-down) and starts at (0, 1).
    """

    group: AnyLawGroup
    form: Literal["table", "free_sms"] = "table"
    points: tuple[tuple[float, float], ...] = ()

    @model_validator(mode="after")
    def _has_points(self) -> Self:
        if (self.form == "table") != bool(self.points):
            raise ValueError(f"{self.id}: a table law needs points, a free_sms law has none")
        for y in self.curve.ys if self.form == "table" else ():
            check_value(self.id, y, "ratio")
        return self

    @cached_property
    def curve(self) -> Curve:
        """Slow-down as a function of the number of communication SMs (table laws only)."""
        return Curve(
            id=self.id,
            x_name="communication SMs",
            x_unit="SMs",
            y_name="slow-down",
            y_unit="1",
            points=self.points,
        )


class Prior(Entry):
    """A fraction of a datasheet figure, for what no measurement covers (docs/model.md, eqs. H2 and H4)."""

    used_for: tuple[str, ...] = Field(min_length=1)
    dtype: Literal["fp4", "fp8", "bf16", "fp32"] | None = None
    of: Literal["tensor_peak", "memory_bandwidth", "gemm_rate", "gemm_achievable"]
    """What `fraction` multiplies. `gemm_rate` is the measured rate of a dense GEMM of the same shape and
    format. `gemm_achievable` is the accelerator's best GEMM rate in that format; without one the prior is
    skipped."""
    fraction: Annotated[float, Field(gt=0, le=1)]
    low: Annotated[float, Field(gt=0, le=1)]
    high: Annotated[float, Field(gt=0, le=1)]


class KernelLaw(Entry):
    """Time of any shape of a family of inference kernels, whose name follows `serving.` in the id (eq. Q2).

    A call takes `call_us`, `depth_ns` for each element of a contraction, and the longer of bytes at the share
    `bandwidth` of the memory's and FLOPs at the share `peak` of the tensor cores', with `edge` more rows of a
    group, or keys of a query. `lead`: of a module whose kernels Python launches, the share of its host time
    `call_us` that passes before the main kernels. For the exchange between ranks, `bandwidth` is the share of
    the scale-up rate and `peak` that of the NIC rate (eq. Q5).
    """

    call_us: Annotated[float, Field(gt=0, le=1e5)]
    depth_ns: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    bandwidth: Annotated[float, Field(gt=0, le=1)] = 1.0
    peak: Annotated[float, Field(gt=0, le=1)] = 1.0
    edge: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    lead: Annotated[float, Field(ge=0, le=1)] = 0.0


LOST_BESIDE_NCCL = SourcedFraction(
    value=0.213,
    kind="measured",
    source="benchmarks/gpu/results/2026-11-20-h200-x4-beside-nccl.json: median of 14 products (BF16, FP8) "
    "beside an all-gather or reduce-scatter, 4x H200, driver 580.159.04, torch 2.11.0, NCCL 2.28.9, 24 "
    "channels",
    date="2026-11-20",
    between=(0.151, 0.295),
    note="eq. O5; the products and attention of that file from least to most; pointwise kernels lose 0.29 to "
    "0.49; 24 of 132 SMs are 0.182",
)


class TracedFile(PlainPart):
    """One file of a trace, by name and fingerprint."""

    name: str = Field(min_length=1)
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TraceOrigin(PlainPart):
    """The run whose trace gave a profile its rates; a prediction of that run is no test of them."""

    files: tuple[TracedFile, ...] = Field(min_length=1)
    gpu: str
    ranks: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=0)]
    date: DateText
    base: str
    """Profile that gave what the trace did not have."""
    scenario: str = ""
    """Scenario of the run, from which sizes were taken; empty where all are those of the trace."""


class CalibrationProfile(PlainPart):
    """Measured and published data about the kernels of one accelerator under one software stack."""

    name: str
    accelerator: str
    """Name of the accelerator, or "any" for a generic profile that others include."""
    also_for: tuple[str, ...] = ()
    """Other accelerators that the evidence covers; use on any further one is flagged as an assumption."""
    software: str
    description: str
    evidence: str
    """Why these entries were chosen; the choice was made before any end-to-end error was known."""
    include: tuple[str, ...] = ()
    launch_gap: Annotated[SourcedSeconds, ranges.LATENCY] | None = None
    """Idle time between two kernels of one stream."""
    kernel_floor: Annotated[SourcedSeconds, ranges.LATENCY] | None = None
    """Shortest duration of a kernel."""
    lost_beside_nccl: SourcedFraction = LOST_BESIDE_NCCL
    """Seconds that compute loses per second that an overlapped NCCL collective would take alone."""
    power: Annotated[PowerLaw | None, Field(exclude_if=lambda value: value is None)] = None
    """Power of classes of kernels, by which the clock follows the load; without it the clock is that of GEMMs
    back to back."""
    dispatchers: Annotated[tuple[str, ...], Field(exclude_if=lambda value: not value)] = ()
    """Kernels of one's own that the curves `ep.*.<name>` describe; they move tokens in two hops and hold
    buffers as DeepEP's normal ones do."""
    trace: Annotated[TraceOrigin | None, Field(exclude_if=lambda value: value is None)] = None
    """Where the rates come from a trace: the run, by the fingerprints of its files."""
    in_situ_groups: tuple[AnyLawGroup, ...] = ()
    """Groups whose rates were measured beside communication and are also used where none runs."""
    gemm_tables: tuple[GemmTable, ...] = ()
    curves: tuple[MeasuredCurve, ...] = ()
    laws: tuple[Law, ...] = ()
    priors: tuple[Prior, ...] = ()
    kernel_laws: Annotated[tuple[KernelLaw, ...], Field(exclude_if=lambda value: not value)] = ()

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Self:
        seen: set[str] = set()
        for entry in self.entries():
            if entry.id in seen:
                raise ValueError(f"the entry id {entry.id!r} appears twice (includes counted)")
            seen.add(entry.id)
        return self

    _shifted_from: tuple[CalibrationProfile, frozenset[str]] | None = PrivateAttr(None)
    """The profile before entries were shifted within their errors, with their ids; rates may pass a peak."""

    def entries(self) -> Iterator[Entry]:
        """Every entry, in look-up order within its kind."""
        yield from self.gemm_tables
        yield from self.curves
        yield from self.laws
        yield from self.priors
        yield from self.kernel_laws

    def curve(self, id_: str) -> MeasuredCurve:
        """The curve with an id; raises InputError, which lists the existing curves, where there is none."""
        for entry in self.curves:
            if entry.id == id_:
                return entry
        have = ", ".join(c.id for c in self.curves) or "none"
        raise InputError(f"calibration profile {self.name!r} has no curve {id_!r}; it has: {have}")

    def entry(self, id_: str) -> Entry:
        """Any entry by id; raises InputError when it is not in the profile."""
        for entry in self.entries():
            if entry.id == id_:
                return entry
        raise InputError(f"calibration profile {self.name!r} has no entry {id_!r}")


MOST_INCLUDES = 40
"""Most profiles that one may include, directly and through its includes."""


def list_profiles() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(path.stem for path in PROFILE_DIRECTORY.glob("*.yaml"))


def load_profile(name_or_path: str | Path) -> CalibrationProfile:
    """The profile with a shipped name or a file path, its includes merged in (own entries first).

    An include is looked up beside the including file, then among the shipped profiles. Raises InputError
    for an unknown name, a malformed file, an entry that appears twice or an include cycle.
    """
    path = _find(name_or_path, None)
    return _load(str(path), _stamp(path))


_NO_CORRECTION = re.compile(r',"duty":"(?:sustained|not stated)"')
"""A duty that changes no prediction; only the rates of bursts are corrected."""


def profile_hash(profile: CalibrationProfile) -> str:
    """SHA-256 over the merged content. Profiles with equal hashes give equal predictions."""
    return _hash(SameObject(profile))


@lru_cache(maxsize=16)
def _hash(profile: SameObject[CalibrationProfile]) -> str:
    text = _NO_CORRECTION.sub("", with_former_names(profile.value.model_dump_json()))
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=64)
def _load(path: str, stamp: int) -> CalibrationProfile:
    """Merges each version of a file once; a changed file (by its time stamp) is read again."""
    return _merge(Path(path), (), [MOST_INCLUDES])


@lru_cache(maxsize=128)
def _own_entries(path: Path, stamp: int) -> CalibrationProfile:
    """The profile of a file without its includes; a file that many include is read once."""
    return validate_model(CalibrationProfile, load_mapping(path), str(path))


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        return 0  # the reader reports the error


def _find(name_or_path: str | Path, beside: Path | None) -> Path:
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml", ".json")):
        path = Path(text)
        return path if beside is None or path.is_absolute() else beside / path
    for directory in (beside, PROFILE_DIRECTORY):
        if directory is not None and is_there(directory / f"{text}.yaml"):
            return directory / f"{text}.yaml"
    raise InputError(
        f"no calibration profile {text!r}; shipped: {', '.join(list_profiles()) or 'none'}; "
        "or give the path of a .yaml file"
    )


def _merge(path: Path, chain: tuple[Path, ...], left: list[int]) -> CalibrationProfile:
    """The profile of a file with its includes; `left` counts down how many more files may be read."""
    path = resolved(path)
    if path in chain:
        loop = " -> ".join(p.stem for p in (*chain, path))
        raise InputError(f"{path}: calibration profiles include each other: {loop}")
    return _with_includes(_own_entries(path, _stamp(path)), path, (*chain, path), left)


def with_includes_merged(profile: CalibrationProfile) -> CalibrationProfile:
    """A profile from inside another file, with the shipped profiles that it includes merged in.

    The result includes nothing, so it means the same wherever it is read. Raises InputError as
    `load_profile` does.
    """
    merged = _with_includes(profile, Path(f"profile {profile.name}"), (), [MOST_INCLUDES])
    return merged.model_copy(update={"include": ()})


def _with_includes(
    profile: CalibrationProfile, path: Path, chain: tuple[Path, ...], left: list[int]
) -> CalibrationProfile:
    """A profile with its includes; `left` counts down how many more files may be read."""
    left[0] -= len(profile.include)
    if left[0] < 0:
        raise InputError(
            f"{path}: include names {len(profile.include):,} profiles, which makes more than {MOST_INCLUDES} "
            "with those that they include; write their entries into one file"
        )
    for name in profile.include:
        profile = _with(profile, _merge(_find(name, path.parent if chain else None), chain, left), path)
    return profile


def _with(profile: CalibrationProfile, other: CalibrationProfile, path: Path) -> CalibrationProfile:
    """Appends the entries of `other` to those of `profile`; entries that both have stay once."""
    have = {entry.id: entry for entry in profile.entries()}
    for entry in other.entries():
        if entry.id in have and have[entry.id] != entry:
            raise InputError(f"{path}: entry {entry.id!r} of {other.name!r} is already defined differently")
    update: dict[str, Any] = {}
    for field in ("gemm_tables", "curves", "laws", "priors", "kernel_laws"):
        update[field] = (*getattr(profile, field), *(e for e in getattr(other, field) if e.id not in have))
    update |= {
        f: getattr(other, f) for f in ("launch_gap", "kernel_floor", "power") if getattr(profile, f) is None
    }
    update["dispatchers"] = tuple(dict.fromkeys((*profile.dispatchers, *other.dispatchers)))
    if "lost_beside_nccl" not in profile.model_fields_set and "lost_beside_nccl" in other.model_fields_set:
        update["lost_beside_nccl"] = other.lost_beside_nccl
    return profile.model_copy(update=update)


# -- profiles of an accelerator --------------------------------------------------------------------

GENERIC_PROFILE = "generic-roofline"
"""Prices any accelerator from its datasheet peaks."""


def fitting_profiles(accelerator: str) -> list[str]:
    """Names of the shipped profiles that may price an accelerator, the generic one last."""
    fitting = [name for name in list_profiles() if accelerator in accelerators_of(name)]
    return [*fitting, GENERIC_PROFILE]


@lru_cache(maxsize=256)
def accelerators_of(profile: str) -> tuple[str, ...]:
    """The accelerators that a shipped profile may price, read from the head of its file alone."""
    lines = (PROFILE_DIRECTORY / f"{profile}.yaml").read_text("utf-8").splitlines()
    head = "\n".join(line for line in lines if line.startswith(("accelerator:", "also_for:")))
    keys = parse_mapping(head, f"profile {profile}")
    return (keys["accelerator"], *keys.get("also_for", ()))


# -- profiles without some entries -----------------------------------------------------------------


def without_entries(profile: CalibrationProfile, names: tuple[str, ...]) -> CalibrationProfile:
    """The profile without the entries of these ids; `*` in a name stands for any text.

    Rates are then taken from the next entry or prior that fits. The same profile and names give the same
    object. Raises InputError for a name without `*` that no entry has.
    """
    return _without(SameObject(profile), names) if names else profile


@lru_cache(maxsize=32)
def _without(whole: SameObject[CalibrationProfile], names: tuple[str, ...]) -> CalibrationProfile:
    profile = whole.value
    ids = {entry.id for entry in profile.entries()}
    for name in names:
        if "*" not in name and name not in ids:
            raise InputError(
                f"without_entries: profile {profile.name!r} has no entry {name!r}; give the id of one of its "
                f"{len(ids)} entries, or a pattern with *"
            )
    gone = {id_ for id_ in ids if any(fnmatchcase(id_, name) for name in names)}
    kept = {
        field: tuple(entry for entry in getattr(profile, field) if entry.id not in gone)
        for field in ("gemm_tables", "curves", "laws", "priors", "kernel_laws")
    }
    return profile.model_copy(update=kept)
