"""Results of the fits: plain data that predict values and state their quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.kernels.fit_solver import saturate

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Quality:
    """Relative errors of a fit (0.04 is 4 %).

    `median` and `worst` are over the fitted rows, `left_out_median` and `left_out_worst` over predictions of
    each x from a fit without it (NaN where the points are too few), and `spread` is measured within equal x.
    """

    rows: int
    median: float
    worst: float
    left_out_median: float
    left_out_worst: float
    spread: float = 0.0

    @property
    def relative(self) -> float:
        """The error for a profile: the largest of left-out median, row median and spread, at most 0.95."""
        shown = [v for v in (self.median, self.left_out_median, self.spread) if math.isfinite(v)]
        return min(0.95, max(shown, default=0.0))


NO_QUALITY = Quality(0, math.nan, math.nan, math.nan, math.nan)
"""Quality of a fit that is only an intermediate step."""


@dataclass(frozen=True, slots=True)
class LatencyBandwidth:
    """t(bytes) = latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float
    quality: Quality

    def seconds(self, size_bytes: float) -> float:
        """Time of a transfer of `size_bytes`."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Piece:
    """t = latency_s + bytes / bytes_per_s from `from_bytes` up to the next piece."""

    from_bytes: float
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Piecewise:
    """Latency and bandwidth by range of sizes (protocol changes); the first also serves smaller sizes."""

    pieces: tuple[Piece, ...]
    quality: Quality

    def seconds(self, size_bytes: float) -> float:
        """Time of a transfer of `size_bytes`."""
        piece = self.pieces[0]
        for candidate in self.pieces[1:]:
            if size_bytes >= candidate.from_bytes:
                piece = candidate
        return piece.latency_s + size_bytes / piece.bytes_per_s


@dataclass(frozen=True, slots=True)
class Saturating:
    """y(n) = ((slope n)^-p + limit^-p)^(-1/p), linear in n up to a limit; `sharpness` p shapes the knee."""

    slope: float
    limit: float
    sharpness: float
    quality: Quality

    def at(self, n: float) -> float:
        """The rate with n SMs."""
        return saturate(n, self.slope, self.limit, self.sharpness)

    def sms_for(self, share: float) -> float:
        """SMs that reach `share` (0 to 1) of the limit."""
        p = self.sharpness
        return float(self.limit / self.slope * (share**-p - 1.0) ** (-1.0 / p))


@dataclass(frozen=True, slots=True)
class TransferFit:
    """t(bytes, n) = latency_s + bytes / R(n), with R saturating in the SMs n."""

    latency_s: float
    rate: Saturating
    quality: Quality

    def seconds(self, size_bytes: float, sms: float) -> float:
        """Time of a dispatch or combine of `size_bytes` received with `sms` communication SMs."""
        return self.latency_s + size_bytes / self.rate.at(sms)


@dataclass(frozen=True, slots=True)
class SlowDownFit:
    """Slow-down as points (n, time over time alone), monotone in n; `raw` are unpooled medians."""

    points: tuple[Pair, ...]
    raw: tuple[Pair, ...]
    quality: Quality

    def at(self, n: float) -> float:
        """Slow-down with n communication SMs; linear between points and constant beyond them."""
        return interpolate(self.points, n)


def interpolate(points: Sequence[Pair], x: float) -> float:
    """Piecewise linear interpolation of points with increasing x, constant beyond both ends."""
    return float(np.interp(x, [p[0] for p in points], [p[1] for p in points]))
