"""Measured curves with interpolation; a reading outside the measured range is flagged."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from moesim.hwmodels.frozen import Frozen


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
