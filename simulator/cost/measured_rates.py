"""Reads measured rates of GEMMs, core attention and memory-bound kernels, at training clocks (pure)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property
from math import fsum
from typing import NamedTuple

from moesim.hwmodels.calibration import CalibrationProfile, GemmTable, MeasuredCurve
from moesim.simulator.model.operator import LOW_ATTENTION, GemmShape, Operator

# -- sustained ---------------------------------------------------------------------------------------
# Carries rates of short bursts to the power-limited clock of a training step (eq. C30 of docs/model.md).
#
# A GPU that idled runs its first milliseconds of GEMMs at the highest clock; then its power limit lowers
# it. Tables of planners are timed in such bursts. Their profiles hold a curve of sustained rate over
# burst rate against the duration of the timed kernel: the longer it ran, the more of its burst was at
# the lower clock.

USE = "sustained"
"""First part of the uses of such a curve: `sustained/<class of operators>/<format>`."""


class SustainedRates:
    """The ratios of sustained to burst rates of one profile, by class of operators and format."""

    def __init__(self, profile: CalibrationProfile) -> None:
        """Index the curves; the first of a use counts."""
        self._curves: dict[str, MeasuredCurve] = {}
        for curve in profile.curves:
            for use in curve.used_for:
                if use.startswith(f"{USE}/"):
                    self._curves.setdefault(use, curve)

    def ratio_of(self, entry: GemmTable | MeasuredCurve, cls: str, dtype: str) -> MeasuredCurve | None:
        """The curve that corrects an entry; None for an entry of sustained rates or without a curve."""
        if entry.conditions.duty != "burst":
            return None
        return self._curves.get(f"{USE}/{cls}/{dtype}")

    def missing(self, entry: GemmTable | MeasuredCurve, cls: str, dtype: str) -> str:
        """Note on an entry whose burst rates are used unchanged; empty where they are corrected."""
        if entry.conditions.duty != "burst" or self.ratio_of(entry, cls, dtype) is not None:
            return ""
        return (
            f"{entry.id} holds rates of short bursts, used unchanged: the profile has no ratio of sustained "
            f"to burst rates of {cls} in {dtype}"
        )

    def gemm_rate(self, table: GemmTable, flop: float, burst_flop_per_s: float) -> float:
        """Sustained rate (FLOP/s) of a row of a table, from its rate and its FLOPs."""
        ratio = self.ratio_of(table, "gemm", table.dtype)
        return burst_flop_per_s * (ratio.curve.at(flop / burst_flop_per_s).value if ratio else 1.0)

    def attention_rate(self, curve: MeasuredCurve, dtype: str, burst_flop_per_s: float) -> float:
        """Sustained rate (FLOP/s) of a core attention; its curves do not say how long each kernel ran."""
        ratio = self.ratio_of(curve, "attention", dtype)
        return burst_flop_per_s * (ratio.curve.ys[0] if ratio else 1.0)


# -- gemm --------------------------------------------------------------------------------------------
# Reads the rate of a GEMM from measured points: exact, interpolated in log shape, or held constant.

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
        """Keep the table, which is indexed when it is read; `sustained` corrects the rates of bursts."""
        self.table, self._sustained = table, sustained
        self._weight_gradient = table.cls == "wgrad_gemm"

    @cached_property
    def _points(self) -> list[_Point]:
        points = []
        for row in self.table.points:
            m, n, k, groups = row[:4]
            rate = self.table.flop_per_s(row)
            if self._sustained is not None:
                rate = self._sustained.gemm_rate(self.table, 2.0 * m * n * k, rate)
            times = f" x {groups:.0f} groups" if groups > 1 else ""
            label = f"m={m:.0f} n={n:.0f} k={k:.0f}{times}"
            points.append(_Point(*self._split(m, n, k, groups), rate, label))
        return points

    @cached_property
    def _by_key(self) -> dict[_Key, list[_Point]]:
        by_key: dict[_Key, list[_Point]] = {}
        for point in sorted(self._points, key=lambda p: p.rows):
            by_key.setdefault(point.key, []).append(point)
        return by_key

    @cached_property
    def _logs(self) -> list[tuple[float, float, float]]:
        return [_log(p.key, p.rows) for p in self._points]

    @cached_property
    def _box(self) -> list[tuple[float, float]]:
        return [(min(column), max(column)) for column in zip(*self._logs, strict=True)]

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


def _log(key: _Key, rows: float) -> tuple[float, float, float]:
    return math.log(rows), math.log(key[0]), math.log(key[1])


# -- memory bound ------------------------------------------------------------------------------------
# Prices memory-bound kernels from measured effective bandwidths over the bytes that they move.


class TransferReading(NamedTuple):
    """Seconds under the curve's conditions; `extrapolated` is a note on an extrapolation, or empty."""

    seconds: float
    extrapolated: str


class TransferCurve:
    """A curve of effective bandwidth over bytes, which is read as time over bytes."""

    def __init__(self, measured: MeasuredCurve) -> None:
        """Turn (bytes, bytes/s) points into (bytes, s) points."""
        self.measured = measured
        self._bytes = tuple(x for x, _ in measured.in_si)
        self._seconds = tuple(x / y for x, y in measured.in_si)

    def read(self, size_bytes: float) -> TransferReading:
        """Eq. C6: the time is piecewise linear in bytes between the measured times; beyond them the bandwidth
        of the end point is held constant (flagged beyond a factor of two)."""
        sizes, seconds = self._bytes, self._seconds
        right = bisect_left(sizes, size_bytes)
        if 0 < right < len(sizes):
            x0, x1 = sizes[right - 1], sizes[right]
            t0, t1 = seconds[right - 1], seconds[right]
            return TransferReading(t0 + (t1 - t0) * (size_bytes - x0) / (x1 - x0), "")
        end = min(right, len(sizes) - 1)
        ratio = size_bytes / sizes[end]
        note = ""
        if ratio > HELD_WITHOUT_NOTE or ratio * HELD_WITHOUT_NOTE < 1.0:
            note = (
                f"{self.measured.id}: {size_bytes / 1e6:.3g} MB is outside the measured "
                f"{sizes[0] / 1e6:.3g} to {sizes[-1] / 1e6:.3g} MB; the end bandwidth is held"
            )
        return TransferReading(seconds[end] * ratio, note)


# -- attention rates ---------------------------------------------------------------------------------
# Chooses the measured curve of a core attention by its kernels, heads and number format (pure).
#
# A curve is known by its use: `attention_forward` or `attention_backward`, then the variant of
# `simulator/model/attention/softmax.py`. Curves measured at one width of heads alone end in it: `128`, or
# `192` for the heads of 192 and 128 elements of multi-head latent attention.

COMMON_HEAD = 128
"""Elements of a head; curves for `<class>/128` were measured at this width alone, and heads of up to 192
elements, such as those of MLA, take their rates with a note where none was measured for them."""
LATENT_HEAD = 192

Curves = Mapping[tuple[str, bool | None], MeasuredCurve]


class AttentionCurve(NamedTuple):
    """A curve of FLOP/s over sequence or window, and a note if it was measured for other kernels."""

    curve: MeasuredCurve
    note: str = ""


def low_format(op: Operator) -> str:
    """The 8-bit format of a core attention's operands: `fp8`, `mxfp8`, or empty."""
    first = op.variant.split("_")[0]
    return first if first in LOW_ATTENTION else ""


def in_bf16(variant: str) -> str:
    """The variant of the same kernel in BF16."""
    return variant.partition("_")[2]


def attention_curve(curves: Curves, op: Operator, has_prior: bool) -> AttentionCurve | None:
    """Curve of a core attention in BF16; None: take a prior.

    Rates of the same kernel serve narrow and wide heads where these were not measured, and those of full
    causal attention serve windows and flex_attention where there is no prior (`has_prior`) for them either.
    """
    own = exact_curve(curves, op)
    if own is not None:
        return own
    full = curves.get((op.cls, None)) or curves.get((f"{op.cls}/{COMMON_HEAD}", None))
    base = "_".join(part for part in op.variant.split("_") if not part.isdigit())
    near = curves.get((f"{op.cls}/{base}", None)) if base else full
    note = f"{op.cls} with variant {op.variant} at the rates of "
    if near is not None:
        return AttentionCurve(near, f"{note}{near.id}, which has other heads")
    if has_prior or full is None:
        return None
    return AttentionCurve(full, f"{note}{full.id}, which is full causal attention of another kernel")


def exact_curve(curves: Curves, op: Operator) -> AttentionCurve | None:
    """Curve of these very kernels in their format, at the heads measured next to theirs."""
    assert op.gemm is not None
    wide = op.gemm.k > COMMON_HEAD
    named = f"{op.cls}/{op.variant}" if op.variant else op.cls
    sized = any(part.isdigit() for part in op.variant.split("_"))
    if wide and not sized:
        latent = curves.get((_joined(op, LATENT_HEAD), None))
        if latent is not None:
            return AttentionCurve(latent)
    own = curves.get((named, None))
    if own is not None:
        return AttentionCurve(own)
    common = None if op.variant else curves.get((_joined(op, COMMON_HEAD), None))
    if common is None:
        return None
    note = f"{op.cls} with heads of {op.gemm.k:g} elements at the rates of {common.id}" if wide else ""
    return AttentionCurve(common, note)


def _joined(op: Operator, width: int) -> str:
    return f"{op.cls}/{op.variant}_{width}" if op.variant else f"{op.cls}/{width}"
