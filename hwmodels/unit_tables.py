"""The units of each dimension with their exact factors to SI (Decimal, so "3.35 TB/s" loses nothing)."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}


@dataclass(frozen=True, slots=True)
class DimensionTable:
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
        {"/node-day": Decimal(1), "/1000node-days": Decimal("0.001"), "/1000node-day": Decimal("0.001")},
    ),
    "fraction": DimensionTable(
        "a fraction", "0.85", "", ("",), {"": Decimal(1), "%": Decimal("0.01")}
    ),
    "count": DimensionTable("a count", "132", "", ("",), {"": Decimal(1)}),
}  # fmt: skip
"""Every dimension that a data file or a scenario may use."""
