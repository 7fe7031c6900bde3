"""What every entry of a calibration profile carries: source, kind, date, conditions and residual."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moesim.hwmodels import ranges
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import DateText, Kind, Source
from moesim.hwmodels.units import DIMENSIONS

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
