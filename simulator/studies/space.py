"""Designs of a sweep: the points of grid, list, random and Sobol designs over scenario keys (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal, cast

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.lists import parse_interval, parse_values

Design = Literal["grid", "list", "random", "sobol"]
DESIGNS: tuple[Design, ...] = ("grid", "list", "random", "sobol")

Values = str | int | float | bool | Mapping[str, Any] | Sequence[Any]
"""Values of a key: an expression ("8..256:x2"), one value, or a list of them."""

Space = Mapping[str, Values] | Sequence[Mapping[str, Any]]
"""Values by dotted scenario key, or, for the list design, one mapping for each point."""

MOST_POINTS = 100_000
"""Most points of one sweep."""

Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of one key's value: listed values, or a range of whole or real numbers."""

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    def at(self, u: float) -> Any:
        """The value at the share `u` (0 to 1) of the choice."""
        if self.values:
            return self.values[min(int(u * len(self.values)), len(self.values) - 1)]
        if self.whole:
            return min(int(self.low + u * (self.high - self.low + 1)), int(self.high))
        return self.low + u * (self.high - self.low)


def points(space: Space, design: str = "grid", count: int | None = None, seed: int = 0) -> list[Point]:
    """The points of a design, in its order; equal points appear once.

    A grid has every combination, with the last key varying fastest. A list takes the n-th value of every
    key; a key with one value keeps it. random and sobol draw `count` points, and "a..b" then means any whole
    number between the ends, or any real number if an end has a decimal point. Raises InputError for an empty
    or malformed space.
    """
    if design not in DESIGNS:
        raise InputError(
            f"design {design!r} is not one of {', '.join(DESIGNS)}{nearest(design, list(DESIGNS))}"
        )
    if not space:
        raise InputError("the space of the sweep is empty: name at least one scenario key and its values")
    drawn = design in ("random", "sobol")
    if drawn and (count is None or not 1 <= count <= MOST_POINTS):
        raise InputError(
            f"design {design} needs a number of points between 1 and {MOST_POINTS:,}, not {count}"
        )
    if not drawn and count is not None:
        raise InputError(f"design {design} has as many points as its values; leave the number of points out")
    if not isinstance(space, Mapping):
        if design != "list":
            raise InputError(f"design {design} takes values by key; a list of points goes with design list")
        found = [dict(point) for point in space]
        if not all(found):
            raise InputError("a point of the sweep names no key; leave it out")
        return _once(found)
    choices = {key: _choice(key, values, drawn) for key, values in space.items()}
    if design == "grid":
        return _grid(choices)
    if design == "list":
        return _zip(choices)
    assert count is not None
    units = _random(count, len(choices), seed) if design == "random" else _sobol(count, len(choices), seed)
    return _once(
        [{k: c.at(float(u)) for (k, c), u in zip(choices.items(), row, strict=True)} for row in units]
    )


def _choice(key: str, values: Values, drawn: bool) -> _Choice:
    if isinstance(values, str):
        ends = parse_interval(values, key) if drawn else None
        if ends is not None:
            return _Choice(
                low=ends[0],
                high=ends[1],
                whole="." not in values.replace("..", "") and "e" not in values.lower(),
            )
        return _Choice(parse_values(values, key))
    if isinstance(values, Sequence):
        if not values:
            raise InputError(f"{key} has an empty list of values: no point is left; give a value")
        return _Choice(tuple(values))
    return _Choice((values,))


def _grid(choices: Mapping[str, _Choice]) -> list[Point]:
    size = prod(len(c.values) for c in choices.values())
    if size > MOST_POINTS:
        raise InputError(f"the grid has {size:,} points, more than {MOST_POINTS:,}; use design sobol")
    return _once(
        [dict(zip(choices, row, strict=True)) for row in product(*(c.values for c in choices.values()))]
    )


def _zip(choices: Mapping[str, _Choice]) -> list[Point]:
    lengths = {len(c.values) for c in choices.values()} - {1}
    if len(lengths) > 1:
        told = ", ".join(f"{key} {len(c.values)}" for key, c in choices.items())
        raise InputError(f"design list needs as many values for every key (or one): {told}")
    n = max(lengths, default=1)
    return _once([{k: c.values[i if len(c.values) > 1 else 0] for k, c in choices.items()} for i in range(n)])


def _once(found: list[Point]) -> list[Point]:
    kept: dict[str, Point] = {}
    for point in found:
        kept.setdefault(repr(sorted(point.items(), key=lambda item: item[0])), point)
    return list(kept.values())


def _random(count: int, dimensions: int, seed: int) -> FloatArray:
    return np.random.default_rng(seed).random((count, dimensions))


def _sobol(count: int, dimensions: int, seed: int) -> FloatArray:
    """The Sobol sequence, shifted by one seeded vector modulo 1, so that every SciPy gives equal numbers."""
    try:
        from scipy.stats import qmc
    except ImportError:
        raise InputError(
            "design sobol needs SciPy, which is not installed: pip install 'moesim[notebook]', or use random"
        ) from None
    power = max(count - 1, 0).bit_length()
    units = cast("FloatArray", qmc.Sobol(dimensions, scramble=False).random_base2(power))[:count]
    return (units + np.random.default_rng(seed).random(dimensions)) % 1.0
