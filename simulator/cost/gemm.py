"""Reads the rate of a GEMM from measured points: exact, interpolated in log shape, or held constant."""

from __future__ import annotations

import math
from bisect import bisect_left
from math import fsum
from typing import NamedTuple

from moesim.hwmodels.calibration import GemmRow, GemmTable
from moesim.simulator.cost.sustained import SustainedRates
from moesim.simulator.model.operator import GemmShape

HELD_WITHOUT_NOTE = 2.0
"""A rate held constant up to this factor in rows beyond the nearest point counts as inside the table."""


class GemmReading(NamedTuple):
    """Rate in FLOP/s under the table's conditions, its residual, and notes on how it was read."""

    flop_per_s: float
    residual: float
    interpolated: str
    extrapolated: str


_Key = tuple[float, float, bool]
"""The two weight dimensions, and whether the GEMM is grouped."""


class _Point(NamedTuple):
    key: _Key
    rows: float
    flop_per_s: float
    label: str


class GemmLookup:
    """Points of one table, by the two weight dimensions and the number of token rows per group.

    The token dimension is m of a forward or input-gradient GEMM and k of a weight gradient; the other two
    identify the layer. Those of a weight gradient are interchangeable, because they transpose its output.
    """

    def __init__(self, table: GemmTable, sustained: SustainedRates | None = None) -> None:
        """Index the points of a table; `sustained` corrects the rates of bursts."""
        self.table = table
        self._weight_gradient = table.cls == "wgrad_gemm"
        self._points = [
            _Point(*self._split(row[0], row[1], row[2], row[3]), _rate(table, row, sustained), _label(row))
            for row in table.points
        ]
        self._by_key: dict[_Key, list[_Point]] = {}
        for point in self._points:
            self._by_key.setdefault(point.key, []).append(point)
        for row_points in self._by_key.values():
            row_points.sort(key=lambda p: p.rows)
        self._logs = [_log(p.key, p.rows) for p in self._points]
        self._box = [(min(column), max(column)) for column in zip(*self._logs, strict=True)]

    def _split(self, m: float, n: float, k: float, groups: float) -> tuple[_Key, float]:
        if self._weight_gradient:
            return (max(m, n), min(m, n), groups > 1), k / groups
        return (n, k, groups > 1), m / groups

    def read(self, shape: GemmShape) -> GemmReading:
        """The rate of a shape.

        Eq. C4 applies where the layer was measured at other row counts: the rate is linear in log rows, and
        held constant beyond the first or last row count (flagged beyond a factor of two).
        Eq. C5 applies where the layer was not measured: inverse-distance weights w_i = 1 / d_i^2 with d_i the
        distance in (log rows, log n, log k); the residual grows by the weighted spread of the rates used.
        """
        key, rows = self._split(shape.m, shape.n, shape.k, shape.groups)
        same_layer = self._by_key.get(key)
        if same_layer is not None:
            return self._along_rows(same_layer, rows)
        return self._between_shapes(key, rows)

    def _along_rows(self, points: list[_Point], rows: float) -> GemmReading:
        residual = self.table.residual.relative
        right = bisect_left([p.rows for p in points], rows)
        if 0 < right < len(points):
            low, high = points[right - 1], points[right]
            weight = math.log(rows / low.rows) / math.log(high.rows / low.rows)
            return GemmReading(low.flop_per_s + (high.flop_per_s - low.flop_per_s) * weight, residual, "", "")
        end = points[min(right, len(points) - 1)]
        apart = max(rows / end.rows, end.rows / rows)
        note = ""
        if apart > HELD_WITHOUT_NOTE:
            note = f"{self.table.id}: rate held at {rows:.0f} rows, nearest measured is {end.label}"
        return GemmReading(end.flop_per_s, residual, "", note)

    def _between_shapes(self, key: _Key, rows: float) -> GemmReading:
        at = _log(key, rows)
        squares = [fsum((a - b) ** 2 for a, b in zip(at, point, strict=True)) for point in self._logs]
        weights = [1.0 / max(square, 1e-12) for square in squares]
        total = fsum(weights)
        rate = fsum(w * p.flop_per_s for w, p in zip(weights, self._points, strict=True)) / total
        spread = fsum(
            w * (p.flop_per_s / rate - 1.0) ** 2 for w, p in zip(weights, self._points, strict=True)
        )
        residual = min(0.95, math.hypot(self.table.residual.relative, math.sqrt(spread / total)))
        nearest = self._points[squares.index(min(squares))]
        slack = math.log(HELD_WITHOUT_NOTE)
        outside = any(
            not low - slack <= x <= high + slack for x, (low, high) in zip(at, self._box, strict=True)
        )
        note = (
            f"{self.table.id}: shape {key[0]:.0f}x{key[1]:.0f} at {rows:.0f} rows is not measured, "
            f"nearest is {nearest.label}"
        )
        return GemmReading(rate, residual, "" if outside else note, note if outside else "")


def _rate(table: GemmTable, row: GemmRow, sustained: SustainedRates | None) -> float:
    rate = table.flop_per_s(row)
    return rate if sustained is None else sustained.gemm_rate(table, 2.0 * row[0] * row[1] * row[2], rate)


def _log(key: _Key, rows: float) -> tuple[float, float, float]:
    return math.log(rows), math.log(key[0]), math.log(key[1])


def _label(row: tuple[float | str, ...]) -> str:
    m, n, k, groups = (float(x) for x in row[:4])
    times = f" x {groups:.0f} groups" if groups > 1 else ""
    return f"m={m:.0f} n={n:.0f} k={k:.0f}{times}"
