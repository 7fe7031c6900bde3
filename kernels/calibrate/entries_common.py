"""Shared by the makers of profile entries: rows with their machine, curves over SMs, spreads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import MeasuredCurve
from moesim.kernels.calibrate.protocol import TimedRow
from moesim.kernels.export import Origin, curve, residual
from moesim.kernels.fit import Quality, fit_saturating, medians

FLOOR = 0.02
"""Smallest relative error that an entry states, because two runs on one machine differ by this much."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one calibration with the accelerator they were measured on."""

    rows: Sequence[TimedRow]
    accelerator: Accelerator
    origin: Origin
    name: str

    def of(self, measurement: str, **parameters: Any) -> list[TimedRow]:
        """Rows of a measurement whose parameters have these values."""
        return [
            row
            for row in self.rows
            if row.ok
            and row.measurement == measurement
            and all(row.parameters.get(key) == value for key, value in parameters.items())
        ]


def sm_curve(rows: Rows, found: Sequence[TimedRow], id_: str, parameter: str, what: str) -> MeasuredCurve:
    """Rate over SMs; its note holds the parameters of the saturating fit where there are enough points."""
    pairs = [(float(r.parameters[parameter]), r.values["bytes"] / r.seconds) for r in found]
    points, _ = medians(pairs)
    note, error = None, spread(found)
    if len(points) >= 4:
        fit = fit_saturating(pairs, id_)
        error = max(error, fit.quality.relative)
        note = (
            f"fit: {fit.slope / 1e9:.4g} GB/s an SM up to {fit.limit / 1e9:.5g} GB/s "
            f"(sharpness {fit.sharpness:.2g}), {stated_quality(fit.quality)}; "
            f"97 % of the limit with {fit.sms_for(0.97):.1f} SMs"
        )
    return curve(
        id_,
        [(n, rate / 1e9) for n, rate in points],
        x=("SMs (CTAs)", "SMs"),
        y=("rate", "GB/s"),
        origin=rows.origin,
        what=what,
        error=residual(max(FLOOR, error), "left out of the saturating fit, or spread of repeats"),
        note=note,
    )


def stated_quality(quality: Quality) -> str:
    """The leave-one-out errors in words."""
    left = f"left-out median {quality.left_out_median:.1%}, worst {quality.left_out_worst:.1%}"
    return left if quality.left_out_median == quality.left_out_median else "too few points to leave one out"


def spread(found: Sequence[TimedRow]) -> float:
    """Median over rows of half the inter-quartile range, relative to the median time."""
    return statistics.median((r.high_s - r.low_s) / 2 / r.seconds for r in found)
