"""Carries rates of short bursts to the power-limited clock of a training step (eq. C30 of docs/model.md).

A GPU that idled runs its first milliseconds of GEMMs at the highest clock; then its power limit lowers it.
Tables of planners are timed in such bursts. Their profiles hold a curve of sustained rate over burst rate
against the duration of the timed kernel: the longer it ran, the more of its burst was at the lower clock.
"""

from __future__ import annotations

from moesim.hwmodels.calibration import CalibrationProfile, GemmTable, MeasuredCurve

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
        return burst_flop_per_s * (_at(ratio, flop / burst_flop_per_s) if ratio else 1.0)

    def attention_rate(self, curve: MeasuredCurve, dtype: str, burst_flop_per_s: float) -> float:
        """Sustained rate (FLOP/s) of a core attention; its curves do not say how long each kernel ran."""
        ratio = self.ratio_of(curve, "attention", dtype)
        return burst_flop_per_s * (ratio.curve.ys[0] if ratio else 1.0)


def _at(ratio: MeasuredCurve, seconds: float) -> float:
    """The ratio for a kernel of this duration; the end values are held."""
    return ratio.curve.at(seconds).value
