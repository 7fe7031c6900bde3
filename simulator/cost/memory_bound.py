"""Prices memory-bound kernels from measured effective bandwidths over the bytes that they move."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from moesim.hwmodels.calibration import MeasuredCurve

HELD_WITHOUT_NOTE = 2.0
"""A bandwidth held constant up to this factor beyond the nearest point counts as inside the curve."""


class TransferReading(NamedTuple):
    """Seconds under the curve's conditions; `extrapolated` is a note on an extrapolation, or empty."""

    seconds: float
    extrapolated: str


class TransferCurve:
    """A curve of effective bandwidth over bytes, which is read as time over bytes."""

    def __init__(self, measured: MeasuredCurve) -> None:
        """Turn (bytes, bytes/s) points into (bytes, s) points."""
        self.measured = measured
        self._bytes = measured.curve.xs
        self._seconds = tuple(x / y for x, y in measured.curve.points)

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
