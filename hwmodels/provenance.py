"""Numbers with provenance: each carries its value, unit, kind, source and date."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_validator,
)

from moesim.hwmodels import ranges
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.units import (
    DIMENSIONS,
    Bytes,
    BytesPerSecond,
    Count,
    FlopPerSecond,
    Fraction,
    GpuHours,
    Hertz,
    KgPerKwh,
    Metres,
    PerNodeDay,
    Quantity,
    Seconds,
    Usd,
    UsdPerHour,
    UsdPerKwh,
    UsdPerWatt,
    UsdPerWattYear,
    Watts,
    format_quantity,
    quantity_text,
)

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

Kind = Literal["spec", "measured", "published", "derived", "assumed"]

UNDATED = "undated"
"""Date of a number that a user stated without one; the shipped data files never use it."""


STATED_IN = "stated in "
"""Prefix of the source of a number that a file gives without one; the file's name follows."""

OWN = "stated by you"
"""Source of a number that the user gave outside a file: with --set, in Python or in the dashboard."""


def _date_text(value: Any) -> Any:
    """Turns an unquoted year, which YAML reads as a number, into text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_a_day(text: str) -> str:
    if text != UNDATED:
        datetime.date.fromisoformat(f"{text}-01-01"[:10])  # pydantic reports the ValueError of a bad date
    return text


DateText = Annotated[
    str,
    Field(pattern=r"^([0-9]{4}(-[0-9]{2}){0,2}|undated)$"),
    AfterValidator(_is_a_day),
    BeforeValidator(_date_text, json_schema_input_type=str),
]
"""YYYY, YYYY-MM or YYYY-MM-DD."""

Source = Annotated[str, Field(min_length=3)]


class Sourced(Frozen, str_strip_whitespace=True):
    """A number with its provenance; each subclass fixes the dimension of `value` (an SI float).

    In a file it is `{value: "3.35 TB/s", kind: spec, source: "...", date: "2023-03"}`. A user may also
    write the quantity alone; it then counts as `assumed`, and its source is the file that holds it.
    """

    dimension: ClassVar[str] = "fraction"
    value: float
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None
    between: Annotated[
        tuple[float, float] | None,
        Field(exclude_if=lambda value: value is None),
        WithJsonSchema(
            {"type": "array", "items": {"type": ["number", "string"]}, "minItems": 2, "maxItems": 2}
        ),
    ] = None
    """Lowest and highest value that the source allows; `value`, between them, is the likeliest.

    A value outside, such as one set by an override, has no range.
    """

    @field_validator("between", mode="before")
    @classmethod
    def _quantities(cls, ends: Any, info: ValidationInfo) -> Any:
        """Parses both ends as `value` is parsed; bare numbers with a dimension come from Python code only."""
        if not isinstance(ends, list | tuple):
            return ends
        if any(isinstance(end, bool) or not isinstance(end, str | int | float) for end in ends):
            raise ValueError("between must be two values, the low and the high one, such as [0.1, 0.2]")
        return [Quantity(cls.dimension).read(end, info) for end in ends]

    @field_serializer("between", when_used="json")
    def _texts(self, ends: tuple[float, float] | None) -> list[float] | list[str] | None:
        if ends is None or "" in DIMENSIONS[self.dimension].units:
            return None if ends is None else list(ends)
        return [quantity_text(end, self.dimension) for end in ends]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.between is not None and not 0.0 < self.between[0] <= self.between[1]:
            raise ValueError(f"between {list(self.between)} must be a low and a high value above 0")
        return self

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        allowed = ranges.BY_DIMENSION.get(self.dimension)
        if allowed is not None:
            ranges.check(self, allowed)
        return self

    @property
    def range(self) -> tuple[float, float] | None:
        """The range around the value; None where none is stated or the value lies outside it."""
        ends = self.between
        return ends if ends is not None and ends[0] <= self.value <= ends[1] else None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(data, str) or (isinstance(data, int | float) and not isinstance(data, bool)):
            place = (info.context or {}).get("place") or "Python code"
            return {"value": data, "kind": "assumed", "source": f"{STATED_IN}{place}", "date": UNDATED}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Schema of either the long form or the short one (see `_short_form`)."""
        short = {"type": ["number", "string"] if "" in DIMENSIONS[cls.dimension].units else "string"}
        return {"anyOf": [handler(schema), short]}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """The dimension of a subclass is that of its value."""
        value = cls.model_fields["value"].metadata
        cls.dimension = next(part.dimension for part in value if isinstance(part, Quantity))

    @property
    def text(self) -> str:
        """The value with its unit, for people."""
        return format_quantity(self.value, self.dimension)


class SourcedBytes(Sourced):
    """A size in bytes."""

    value: Bytes


class SourcedBytesPerSecond(Sourced):
    """A bandwidth in bytes/s."""

    value: BytesPerSecond


class SourcedSeconds(Sourced):
    """A time in s."""

    value: Seconds


class SourcedFlopPerSecond(Sourced):
    """A compute rate in FLOP/s."""

    value: FlopPerSecond


class SourcedHertz(Sourced):
    """A clock in Hz."""

    value: Hertz


class SourcedWatts(Sourced):
    """A power in W."""

    value: Watts


class SourcedUsd(Sourced):
    """An amount in US dollars."""

    value: Usd


class SourcedUsdPerWatt(Sourced):
    """A price of electrical capacity in US dollars per W."""

    value: UsdPerWatt


class SourcedUsdPerWattYear(Sourced):
    """A running cost in US dollars per W of capacity and year."""

    value: UsdPerWattYear


class SourcedGpuHours(Sourced):
    """A number of GPU-hours."""

    value: GpuHours


class SourcedUsdPerHour(Sourced):
    """A price in US dollars per (GPU) hour."""

    value: UsdPerHour


class SourcedUsdPerKwh(Sourced):
    """A price of electricity in US dollars per kWh."""

    value: UsdPerKwh


class SourcedKgPerKwh(Sourced):
    """A carbon intensity in kg CO2e per kWh."""

    value: KgPerKwh


class SourcedMetres(Sourced):
    """A distance in m."""

    value: Metres


class SourcedPerNodeDay(Sourced):
    """A failure rate in events per node and day."""

    value: PerNodeDay


class SourcedFraction(Sourced):
    """A number without a dimension, such as an efficiency or a PUE."""

    value: Fraction


class SourcedCount(Sourced):
    """A whole number of things."""

    value: Annotated[Count, Field(multiple_of=1)]

    @property
    def n(self) -> int:
        """The count as an int."""
        return int(self.value)


class ProvenanceRow(NamedTuple):
    """One number of a description, with its `path`, SI `value`, dimension and provenance."""

    path: str
    value: float
    unit: str
    kind: str
    source: str
    date: str


def provenance_rows(model: BaseModel, prefix: str = "") -> list[ProvenanceRow]:
    """Every sourced number inside a description, in field order; paths start with `prefix`."""
    return [
        ProvenanceRow(path, number.value, number.dimension, number.kind, number.source, number.date)
        for path, number in sourced_numbers(model, prefix)
    ]


def sourced_numbers(value: object, path: str = "") -> Iterator[tuple[str, Sourced]]:
    """(path, number) for every sourced number inside models, mappings and sequences."""
    parts: Iterable[tuple[object, object]]
    if isinstance(value, Sourced):
        yield path, value
        return
    if isinstance(value, BaseModel):
        parts = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        return
    for name, item in parts:
        if type(item) not in PLAIN_TYPES:
            yield from sourced_numbers(item, f"{path}.{name}" if path else str(name))


PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
"""Types of values that hold no sourced number."""


def with_value(value: Any, path: str, number: float) -> Any:
    """A copy of a description with `number` at `path` (a path as `sourced_numbers` yields it)."""
    if isinstance(value, Sourced):
        return value.model_copy(update={"value": number})
    name, _, rest = path.partition(".")
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: with_value(getattr(value, name), rest, number)})
    if isinstance(value, Mapping):
        return {**value, name: with_value(value[name], rest, number)}
    items = list(value)
    items[int(name)] = with_value(items[int(name)], rest, number)
    return type(value)(items)
