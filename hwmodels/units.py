"""Quantities with units: their dimensions and exact factors, and parsing into plain SI floats."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from typing import Annotated, Any

from annotated_types import GroupedMetadata
from msgspec import Struct
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

from moesim.hwmodels.errors import InputError

# -- the units of each dimension -------------------------------------------------------------------

_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}


class DimensionTable(Struct, frozen=True):
    """Units of one dimension, and how messages name it.

    `what` names the dimension with its article; `base` is the unit of the SI value; `shown` lists the units
    used in output, largest first; `units` maps every accepted spelling to its factor.
    """

    what: str
    example: str
    base: str
    shown: tuple[str, ...]
    units: dict[str, Decimal]


def _bytes(suffixes: tuple[str, ...] = ("",)) -> dict[str, Decimal]:
    units: dict[str, Decimal] = {}
    for suffix in suffixes:
        for prefix, power in _DECIMAL.items():
            units[f"{prefix}B{suffix}"] = Decimal(10) ** power
            units[f"{prefix}b{suffix}"] = units[f"{prefix}bit{suffix}"] = Decimal(10) ** power / 8
        for prefix, power in _BINARY.items():
            units[f"{prefix}B{suffix}"] = Decimal(2**power)
    return units


def _decimal(*names: str, smallest: int = 0) -> dict[str, Decimal]:
    """Every decimal prefix before each name; `smallest` = -9 adds n, u and m."""
    prefixes = dict(_DECIMAL)
    if smallest < 0:
        prefixes |= {"m": -3, "u": -6, "n": -9}
    return {prefix + name: Decimal(10) ** power for name in names for prefix, power in prefixes.items()}


def _per(names: dict[str, str], denominators: tuple[str, ...]) -> dict[str, Decimal]:
    return {f"{name}/{d}": Decimal(factor) for name, factor in names.items() for d in denominators}


_HOURS = ("h", "hour", "GPU-h", "GPUh", "GPU-hour", "GPU/h", "gpu-h")
_SECONDS = {
    "ns": "1e-9", "us": "1e-6", "ms": "1e-3", "s": "1", "sec": "1", "min": "60",
    "h": "3600", "hour": "3600", "hours": "3600", "d": "86400", "day": "86400", "days": "86400",
    "year": "31557600", "years": "31557600",
}  # fmt: skip
_FLOP = ("FLOP", "FLOPs", "flop", "flops")
_FLOP_RATE = ("FLOP/s", "FLOPS", "FLOPs/s", "flop/s", "flops", "OP/s", "OPS")

DIMENSIONS: dict[str, DimensionTable] = {
    "bytes": DimensionTable(
        "a number of bytes", "80 GiB", "B", ("PB", "TB", "GB", "MB", "kB", "B"),
        _bytes() | {"byte": Decimal(1), "bytes": Decimal(1)},
    ),
    "bytes_per_s": DimensionTable(
        "a bandwidth", "50 GB/s", "B/s", ("PB/s", "TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
        _bytes(("/s", "ps")),
    ),
    "s": DimensionTable(
        "a time", "3.7 us", "s", ("s", "ms", "us", "ns"), {k: Decimal(v) for k, v in _SECONDS.items()}
    ),
    "flop": DimensionTable(
        "a number of floating-point operations", "250 GFLOP", "FLOP",
        ("EFLOP", "PFLOP", "TFLOP", "GFLOP", "MFLOP", "kFLOP", "FLOP"), _decimal(*_FLOP),
    ),
    "flop_per_s": DimensionTable(
        "a compute rate", "989 TFLOP/s", "FLOP/s",
        ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s", "FLOP/s"), _decimal(*_FLOP_RATE),
    ),
    "hz": DimensionTable(
        "a frequency", "1.83 GHz", "Hz", ("GHz", "MHz", "kHz", "Hz"), _decimal("Hz")
    ),
    "w": DimensionTable("a power", "700 W", "W", ("MW", "kW", "W"), _decimal("W", smallest=-9)),
    "j": DimensionTable(
        "an energy", "3.6 MJ", "J", ("GJ", "MJ", "kJ", "J"),
        _decimal("J", smallest=-9) | {f"{p}Wh": 3600 * Decimal(10) ** _DECIMAL[p] for p in _DECIMAL},
    ),
    "usd": DimensionTable(
        "an amount of money", "$5.5M", "$",
        ("$",), {"$": Decimal(1), "USD": Decimal(1), "$k": Decimal(1000), "$M": Decimal(10) ** 6,
                 "kUSD": Decimal(1000), "MUSD": Decimal(10) ** 6},
    ),
    "usd_per_hour": DimensionTable(
        "a price per hour", "$2/h", "$/h", ("$/h",), _per({"$": "1", "USD": "1"}, _HOURS)
    ),
    "usd_per_w": DimensionTable(
        "a price of capacity", "$11.3M/MW", "$/W", ("$/W",),
        {"$/W": Decimal(1), "$k/kW": Decimal(1), "$M/MW": Decimal(1), "$/kW": Decimal("0.001"),
         "$k/MW": Decimal("0.001")},
    ),
    "usd_per_w_year": DimensionTable(
        "a yearly price of capacity", "$940k/MW/year", "$/W/year", ("$/W/year",),
        {"$/W/year": Decimal(1), "$M/MW/year": Decimal(1), "$/kW/year": Decimal("0.001"),
         "$k/MW/year": Decimal("0.001")},
    ),
    "gpu_hours": DimensionTable(
        "a number of GPU-hours", "119 kGPU-h", "GPU-h", ("MGPU-h", "kGPU-h", "GPU-h"),
        {"GPU-h": Decimal(1), "GPU-hours": Decimal(1), "kGPU-h": Decimal(1000), "MGPU-h": Decimal(10) ** 6},
    ),
    "usd_per_kwh": DimensionTable(
        "a price of energy", "$0.08/kWh", "$/kWh", ("$/kWh",),
        _per({"$": "1", "USD": "1"}, ("kWh",)) | _per({"$": "0.001", "USD": "0.001"}, ("MWh",)),
    ),
    "kg_per_kwh": DimensionTable(
        "a carbon intensity", "582 gCO2e/kWh", "kgCO2e/kWh", ("kgCO2e/kWh", "gCO2e/kWh"),
        _per({"kgCO2e": "1", "gCO2e": "0.001", "kg": "1", "g": "0.001"}, ("kWh",)),
    ),
    "per_node_day": DimensionTable(
        "a rate of failures", "3.79 /1000 node-days", "/node-day", ("/1000node-days",),
        {"/node-day": Decimal(1), "/node-hour": Decimal(24), "/1000node-days": Decimal("0.001"),
         "/1000node-day": Decimal("0.001")},
    ),
    "m": DimensionTable("a distance", "30 km", "m", ("km", "m"), {"m": Decimal(1), "km": Decimal(1000)}),
    "fraction": DimensionTable(
        "a fraction", "0.85", "", ("",), {"": Decimal(1), "%": Decimal("0.01")}
    ),
    "count": DimensionTable("a count", "132", "", ("",), {"": Decimal(1)}),
}  # fmt: skip
"""Every dimension that a data file or a scenario may use."""


# -- parsing and printing --------------------------------------------------------------------------

__all__ = [
    "DIMENSIONS", "Bytes", "BytesPerSecond", "Count", "Flop", "FlopPerSecond", "Fraction", "GpuHours",
    "Hertz", "Joules", "KgPerKwh", "Metres", "PerNodeDay", "Seconds", "Usd", "UsdPerHour", "UsdPerKwh",
    "UsdPerWatt", "UsdPerWattYear", "Watts", "format_quantity", "parse_quantity", "quantity_text",
]  # fmt: skip

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86400.0

_QUANTITY = re.compile(
    r"\s*(?P<dollar>\$)?\s*(?P<number>[+-]?(\d[\d_]{0,59}(\.\d{0,60})?|\.\d{1,60})([eE][+-]?\d{1,9})?)"
    r"(?P<unit>(?![\d.]).*)",
    re.ASCII,
)
"""A number (at most 60 digits on each side of the point, and an exponent) with its unit."""


_EXPONENT_DIGITS = 3


def _in_dollars(dimension: str) -> str:
    """What to do about another currency, where a price is asked for."""
    if not dimension.startswith("usd"):
        return ""
    return "; prices are in US dollars: convert other currencies, and say at which rate in the source"


def _table(dimension: str) -> DimensionTable:
    assert dimension in DIMENSIONS, f"no such dimension: {dimension}"
    return DIMENSIONS[dimension]


def parse_quantity(text: str, dimension: str) -> float:
    """The SI value of a string such as "50 GB/s", "80 GiB", "400 Gb/s", "3.7 us" or "$2/h".

    `dimension` is a key of `DIMENSIONS`. The result is finite and not negative; dimensionless ones
    (`fraction`, `count`) need no unit. Raises InputError for a bare number, an unknown or wrong unit,
    and for anything that is not a number.
    """
    table = _table(dimension)
    match = _QUANTITY.fullmatch(text) if len(text) <= 100 else None
    if match is None:
        raise InputError(
            f"{_shown(text)} is not a quantity; write {table.what} as, for example, {table.example!r}"
            f"{_in_dollars(dimension)}"
        )
    unit = re.sub(r"\s+", "", match["unit"]).replace("µ", "u").replace("μ", "u")  # both micro signs
    if match["dollar"]:
        unit = "$" + unit
    if not unit and "" not in table.units:
        raise InputError(
            f"{_shown(text)} is a bare number, but {table.what} needs a unit; "
            f"write, for example, {table.example!r}"
        )
    factor = table.units.get(unit)
    if factor is None:
        others = [other.what for other in DIMENSIONS.values() if unit in other.units]
        if others:
            cause = f"{_shown(text)} is {others[0]}, but {table.what} is expected here"
        else:
            written = unit.lstrip("$") or unit
            cause = f"{_shown(text)} has the unknown unit {written!r}, where {table.what} is expected"
        near = [known for known in table.units if known.lower() == unit.lower()]
        near = near or difflib.get_close_matches(unit, list(table.units), n=2, cutoff=0.5)
        hint = f" (did you mean {' or '.join(repr(n) for n in near)}?)" if near else ""
        raise InputError(f"{cause}{hint}; write, for example, {table.example!r}{_in_dollars(dimension)}")
    number = match["number"].replace("_", "")
    digits = len(number.lower().partition("e")[2].lstrip("+-0"))
    value = math.inf if digits > _EXPONENT_DIGITS else float(Decimal(number) * factor)
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{_shown(text)} is out of range: {table.what} must be finite and not negative")
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


@lru_cache(maxsize=4096)
def _scaled(value: float, dimension: str) -> tuple[Decimal, str]:
    """The value in the largest output unit that keeps it at or above 1, and that unit."""
    table = _table(dimension)
    exact = Decimal(repr(value))
    if dimension == "bytes":
        for unit in ("TiB", "GiB", "MiB"):
            if value >= float(table.units[unit]) and exact % table.units[unit] == 0:
                return exact / table.units[unit], unit
    for unit in table.shown:
        if exact >= table.units[unit]:
            return exact / table.units[unit], unit
    return exact / table.units[table.shown[-1]], table.shown[-1]


def _join(number: str, unit: str) -> str:
    if unit.startswith("$"):
        return f"${number}{unit[1:]}"
    return f"{number} {unit}".rstrip() if unit != "%" else f"{number} %"


def in_unit(value: float, unit: str, dimension: str) -> float:
    """An SI value in `unit`; raises InputError for a unit of another dimension."""
    return value / parse_quantity(f"1 {unit}", dimension)


def format_quantity(value: float, dimension: str) -> str:
    """A quantity for people with four significant digits, such as "50 GB/s" for 5e10 bytes_per_s."""
    if not math.isfinite(value):
        return str(value)
    if value < 0:
        return "-" + format_quantity(-value, dimension)
    number, unit = _scaled(float(value), dimension)
    digits = f"{float(number):.4g}"
    return _join(format(Decimal(digits), "f") if "e" in digits else digits, unit)


def quantity_text(value: float, dimension: str) -> str:
    """A quantity for files, without loss, so that `parse_quantity(quantity_text(v, d), d) == v`."""
    table = _table(dimension)
    number, unit = _scaled(float(value), dimension)
    text = _join(format(number.normalize(), "f"), unit)
    if len(text) <= 40 and parse_quantity(text, dimension) == value:
        return text
    return _join(repr(float(value)), table.base)


@dataclass(frozen=True, slots=True)
class Quantity(GroupedMetadata):
    """Marks a float of a dimension: a text with a unit in files, an SI value in Python code."""

    dimension: str

    def __iter__(self) -> Iterator[object]:
        """What pydantic checks, reads, writes and describes such a field with."""
        table = _table(self.dimension)
        yield BeforeValidator(self.read)
        if "" in table.units:
            yield PlainSerializer(lambda value: value, return_type=float, when_used="json")
            number = [{"type": "number"}, {"type": "string"}]
            yield WithJsonSchema({"anyOf": number, "description": table.what})
        else:
            text = partial(quantity_text, dimension=self.dimension)
            yield PlainSerializer(text, return_type=str, when_used="json")
            example = {"description": table.what, "examples": [table.example]}
            yield WithJsonSchema({"type": "string", **example})

    def read(self, value: Any, info: ValidationInfo) -> Any:
        """Parses strings; accepts a plain SI float from Python code only, never from a file."""
        table = _table(self.dimension)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"expected {table.what} such as {table.example!r}")
        from_file = info.mode == "json" or bool((info.context or {}).get("place"))
        if isinstance(value, str) or (from_file and "" not in table.units):
            try:
                return parse_quantity(str(value), self.dimension)
            except InputError as error:
                raise ValueError(str(error)) from None
        try:
            return float(value)
        except OverflowError:
            return math.inf


_FINITE = Field(ge=0, allow_inf_nan=False)

Bytes = Annotated[float, _FINITE, Quantity("bytes")]
BytesPerSecond = Annotated[float, _FINITE, Quantity("bytes_per_s")]
Seconds = Annotated[float, _FINITE, Quantity("s")]
Flop = Annotated[float, _FINITE, Quantity("flop")]
FlopPerSecond = Annotated[float, _FINITE, Quantity("flop_per_s")]
Hertz = Annotated[float, _FINITE, Quantity("hz")]
Watts = Annotated[float, _FINITE, Quantity("w")]
Joules = Annotated[float, _FINITE, Quantity("j")]
Usd = Annotated[float, _FINITE, Quantity("usd")]
UsdPerHour = Annotated[float, _FINITE, Quantity("usd_per_hour")]
UsdPerKwh = Annotated[float, _FINITE, Quantity("usd_per_kwh")]
UsdPerWatt = Annotated[float, _FINITE, Quantity("usd_per_w")]
UsdPerWattYear = Annotated[float, _FINITE, Quantity("usd_per_w_year")]
GpuHours = Annotated[float, _FINITE, Quantity("gpu_hours")]
KgPerKwh = Annotated[float, _FINITE, Quantity("kg_per_kwh")]
Metres = Annotated[float, _FINITE, Quantity("m")]
PerNodeDay = Annotated[float, _FINITE, Quantity("per_node_day")]
Fraction = Annotated[float, _FINITE, Quantity("fraction")]
Count = Annotated[float, _FINITE, Quantity("count")]


# -- units of measured curves ----------------------------------------------------------------------

COUNT_UNITS = frozenset({"1", "SMs", "GPUs", "nodes", "tokens", "rows", "CTAs", "ranks"})


@lru_cache(maxsize=256)
def si_factor(unit: str) -> float:
    """The factor from a unit name of a curve ("TFLOP/s", "MB", "us", "SMs") to SI.

    Raises InputError for an unknown unit.
    """
    if unit in COUNT_UNITS:
        return 1.0
    for name, table in DIMENSIONS.items():
        if unit and unit in table.units:
            return parse_quantity(f"1 {unit}", name)
    known = sorted(COUNT_UNITS | {u for t in DIMENSIONS.values() for u in t.units if u})
    raise InputError(f"unknown unit {unit!r} in a calibration profile; known: {', '.join(known)}")


def dimension_of(unit: str) -> str:
    """The dimension that a unit belongs to; "ratio" for ratios and counts."""
    return next((name for name, table in DIMENSIONS.items() if unit and unit in table.units), "ratio")


def time_text(seconds: float) -> str:
    """A time in its largest fitting unit, for people."""
    for unit, size in (("days", SECONDS_PER_DAY), ("h", SECONDS_PER_HOUR), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return format_quantity(seconds, "s")
