"""What the entries of a calibration profile have in common, measured curves, and board power."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from math import fsum
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import DateText, Kind, Source
from moesim.hwmodels.units import DIMENSIONS

# -- groups that communication SMs slow down alike -------------------------------------------------

LawGroup = Literal["gemm_sm_aware", "gemm_sm_unaware", "attention", "memory_bound", "communication"]

FORMER_GROUPS: Final[dict[str, LawGroup]] = {"gemm_told": "gemm_sm_aware", "gemm_untold": "gemm_sm_unaware"}
_FORMER_WORDS = {'"sm_aware":': '"told":', **{f'"{now}"': f'"{then}"' for then, now in FORMER_GROUPS.items()}}

SM_AWARE = AliasChoices("sm_aware", "told")
"""Key of a table that says whether its kernels are SM-aware, under its name or the former one."""


def _current(value: object) -> object:
    return FORMER_GROUPS.get(value, value) if isinstance(value, str) else value


AnyLawGroup = Annotated[LawGroup, BeforeValidator(_current)]
"""A group in a file, under its name or the former one."""


def entry_id_suffix(group: LawGroup) -> str:
    """Last part of an entry's id; it keeps the former name, so that older profiles can be compared."""
    return next((then for then, now in FORMER_GROUPS.items() if now == group), group)


def with_former_names(text: str) -> str:
    """The JSON text of a profile with the former names, which its hash has always been computed from.

    JSON escapes a quotation mark inside a text, so only keys and whole values are replaced.
    """
    for now, then in _FORMER_WORDS.items():
        text = text.replace(now, then)
    return text


# -- entries ---------------------------------------------------------------------------------------

Duty = Literal["sustained", "burst", "not stated"]
"""`sustained`: long enough for the clock to settle at the power limit, as in a training step; `burst`: a few
milliseconds from idle, at a higher clock; `not stated`: the source of a published figure does not say."""


def check_value(place: str, value: float, dimension: str) -> None:
    """Raise ValueError for a value that no measurement can have."""
    allowed = ranges.CURVES.get(dimension)
    shown = dimension if dimension in DIMENSIONS else "fraction"
    problem = "" if allowed is None else allowed.problem(value, shown)
    if problem:
        raise ValueError(f"{place}: {problem}")


class PlainPart(Frozen, str_strip_whitespace=True):
    """A part of a profile; texts lose the white space around them."""


class Elsewhere(PlainPart):
    """Relative uncertainty of an entry on accelerators that it was not measured on."""

    architecture: str = Field(min_length=3)
    """Architecture that the entry was measured on; `relative` holds on all others."""
    relative: Annotated[float, Field(ge=0.0, lt=1.0)]
    meaning: str = Field(min_length=3)


class Residual(PlainPart):
    """Relative uncertainty of an entry (0.04 is +-4 %) and its meaning."""

    relative: Annotated[float, Field(ge=0.0, lt=1.0)]
    meaning: str = Field(min_length=3)
    elsewhere: Annotated[Elsewhere | None, Field(exclude_if=lambda value: value is None)] = None
    """Replaces this residual on accelerators of another architecture."""

    def on(self, architecture: str) -> Residual | Elsewhere:
        """The uncertainty on accelerators of an architecture."""
        other = self.elsewhere
        return other if other is not None and other.architecture != architecture else self


_Group = Annotated[int | None, Field(ge=1, exclude_if=lambda value: value is None)]


class Conditions(PlainPart):
    """Conditions of a measurement; None where the source does not state one."""

    compute_sms: int | None = None
    communication_sms: Annotated[int, Field(ge=0)] = 0
    beside_communication: bool = False
    device: str | None = None
    driver: str | None = None
    clocks: str | None = None
    note: str | None = None
    duty: Annotated[Duty | None, Field(exclude_if=lambda value: value is None)] = None
    """How long the kernels ran back to back; shipped rates of GEMMs and attention all say it."""
    whole_backward: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """Whether a rate of attention's backward was timed with the kernels before and after its core."""
    ranks: _Group = None
    """GPUs of the group that ran a collective, with the nodes that they are on."""
    nodes: _Group = None
    own_group_only: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """Whether a curve of bus bandwidth serves groups of its own size alone; so do those that are shipped."""
    row_bytes: Annotated[float | None, Field(gt=0, exclude_if=lambda value: value is None)] = None
    """Bytes of the rows that a dispatcher moved, where a law gives its time for other rows (eq. X22)."""
    rows_a_token: Annotated[float | None, Field(gt=0, exclude_if=lambda value: value is None)] = None
    """Ranks that a token went to in that measurement, its own included."""


class Entry(PlainPart):
    """Fields that every calibration entry has."""

    id: str = Field(min_length=3)
    source: Source
    kind: Kind
    date: DateText
    residual: Residual
    conditions: Conditions = Conditions()
    note: str | None = None


# -- measured curves -------------------------------------------------------------------------------


class Reading(NamedTuple):
    """One value read from a curve; where `extrapolated`, `note` says how the value was chosen."""

    value: float
    extrapolated: bool
    note: str


class Curve(Frozen):
    """A measured dependence y(x), piecewise linear in x or in log x.

    `points` are (x, y) with strictly increasing x, in the units that `x_unit` and `y_unit` name.
    Outside the first and last x the reading is the end value and is flagged; a curve is never continued
    beyond what was measured.
    """

    id: str = Field(min_length=1)
    x_name: str
    x_unit: str
    y_name: str
    y_unit: str
    points: tuple[tuple[float, float], ...] = Field(min_length=1)
    interpolation: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _points_are_a_function(self) -> Self:
        for x, y in self.points:
            if not (math.isfinite(x) and math.isfinite(y)):
                raise ValueError(f"curve {self.id!r}: point ({x}, {y}) is not finite")
        for (x0, _), (x1, _) in zip(self.points, self.points[1:], strict=False):
            if x1 <= x0:
                raise ValueError(f"curve {self.id!r}: x must increase strictly, but {x1:g} follows {x0:g}")
        if self.interpolation == "log" and self.points[0][0] <= 0:
            raise ValueError(
                f"curve {self.id!r}: interpolation in log x needs x > 0, not {self.points[0][0]:g}"
            )
        return self

    @cached_property
    def xs(self) -> tuple[float, ...]:
        """The measured x values, increasing."""
        return tuple(x for x, _ in self.points)

    @cached_property
    def ys(self) -> tuple[float, ...]:
        """The measured y values, in the order of `xs`."""
        return tuple(y for _, y in self.points)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy, validated again; pydantic's own copy would keep the old cached columns."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **(update or {})})

    def at(self, x: float) -> Reading:
        """The value at x; outside the measured range it is the end value and flagged.

        Raises ValueError when x is not a number.
        """
        if math.isnan(x):
            raise ValueError(f"curve {self.id!r}: {self.x_name} is not a number")
        xs, ys = self.xs, self.ys
        if x < xs[0] or x > xs[-1]:
            return Reading(ys[0] if x < xs[0] else ys[-1], True, self._note(x))
        right = bisect.bisect_left(xs, x)
        if xs[right] == x:
            return Reading(ys[right], False, "")
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        log = self.interpolation == "log"
        weight = math.log(x / x0) / math.log(x1 / x0) if log else (x - x0) / (x1 - x0)
        # The clamp keeps rounded values between the two measured ones.
        value = min(max(y0 + (y1 - y0) * weight, min(y0, y1)), max(y0, y1))
        return Reading(value, False, "")

    def _note(self, x: float) -> str:
        return (
            f"{self.id}: {self.x_name} {x:g} {self.x_unit} is outside the measured "
            f"{self.xs[0]:g} to {self.xs[-1]:g}; the end value is held"
        )


# -- board power -----------------------------------------------------------------------------------

LoadClass = Literal["gemm", "attention", "memory"]
"""Kernels whose power differs: GEMMs of any format, core attention, and all others."""

_STEPS = 40
"""Halvings of the interval in which the clock is searched."""

Exponent = Annotated[float, Field(ge=0.0, le=6.0)]


class ClassPower(PlainPart):
    """Power of one class of kernels over the board's limit, and how its rate follows the clock."""

    power: Annotated[float, Field(gt=0.0, le=3.0)]
    """Power at the reference clock."""
    power_exponent: Exponent
    """Exponent of the clock in the power above that of waiting."""
    rate_exponent: Exponent
    """Exponent of the clock in the rate."""
    alone_clock: Annotated[float, Field(gt=0.1, le=10.0)] = 1.0
    """Clock at which sustained rates of this class alone were measured, over the reference."""


class PowerLaw(Entry):
    """Power and clock of a GPU at its limit; the reference clock is that of GEMMs back to back."""

    most_clock: Annotated[float, Field(ge=1.0, le=10.0)]
    """Highest clock over the reference."""
    wait: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Power while nothing computes, over the limit."""
    collective: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Power while only kernels of collectives run, over the limit."""
    classes: Mapping[LoadClass, ClassPower]

    def power(self, of: LoadClass, clock: float) -> float:
        """Power of a class over the limit, at a clock over the reference."""
        own = self.classes[of]
        return float(self.wait + (own.power - self.wait) * clock**own.power_exponent)


def load_clock(
    law: PowerLaw,
    seconds: Callable[[float], Mapping[LoadClass, float]],
    *,
    wait: float = 0.0,
    collective: float = 0.0,
    beside: float = 0.0,
    cap: float = 1.0,
) -> float:
    """Clock over the reference at which the mean power is `cap` of the limit, or the highest (eq. C33).

    `seconds`: time of each class at a clock. `wait`, `collective`: seconds without compute, alone and beside
    kernels of collectives. `beside`: seconds of compute beside which collectives run. The clock may be below
    the reference.
    """

    def above(clock: float) -> bool:
        parts = seconds(clock)
        total = fsum(parts.values()) + wait + collective
        spent = fsum(law.power(of, clock) * s for of, s in parts.items())
        drawn = law.wait * wait + law.collective * collective + (law.collective - law.wait) * beside
        return spent + drawn > cap * total

    low, high = 0.3, law.most_clock
    if not above(high):
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return low


# -- curves that were replaced ---------------------------------------------------------------------


class ReplacedCurve(Frozen):
    """The curve that an imported one of the same id replaced; units as in the new one."""

    profile: str
    """Name of the profile that held it."""
    source: Source
    date: DateText
    points: tuple[tuple[float, float] | tuple[float, float, str], ...]
