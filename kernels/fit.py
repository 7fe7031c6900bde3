"""Fits curves to measurements: pure functions from rows of numbers to parameters with stated errors.

Every fit works on relative (log) errors, weighs outliers down (Cauchy weights on the median absolute
deviation), and states a leave-one-out error, for which each x in turn is predicted from the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError

MIN_SCALE = 1e-3
"""Relative noise below which no measurement is weighed down."""

_ITERATIONS = 60
_STEP = 1e-6
_SHARPEST, _BLUNTEST = 50.0, 0.5


def minimise(residual: Callable[[FloatArray], FloatArray], start: FloatArray) -> FloatArray:
    """Parameters that minimise the Cauchy-weighted squares of `residual` (Levenberg-Marquardt)."""
    x, damping = start, 1e-3
    r = residual(x)
    for _ in range(_ITERATIONS):
        scale = max(MIN_SCALE, 1.4826 * float(np.median(np.abs(r))))
        weight = 1.0 / (1.0 + (r / (2.4 * scale)) ** 2)
        jacobian = np.stack([(residual(x + _STEP * e) - r) / _STEP for e in np.eye(len(x))], axis=1)
        normal = jacobian.T @ (weight[:, None] * jacobian)
        gradient = jacobian.T @ (weight * r)
        step = np.linalg.solve(
            normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(x))), -gradient
        )
        step = np.clip(step, -2.0, 2.0)
        trial = residual(x + step)
        cost = float(np.sum(scale**2 * np.log1p((r / (2.4 * scale)) ** 2)))
        new_cost = float(np.sum(scale**2 * np.log1p((trial / (2.4 * scale)) ** 2)))
        if new_cost <= cost:
            x, r, damping = x + step, trial, max(1e-9, damping / 5.0)
            if float(np.max(np.abs(step))) < 1e-8:
                break
        else:
            damping *= 5.0
            if damping > 1e9:
                break
    return x


def log_saturate(log_n: FloatArray, p: FloatArray) -> FloatArray:
    """log y for p = log slope, log limit, log sharpness (sharpness between 0.5 and 50)."""
    sharp = _sharpness(p[2])
    a, b = p[0] + log_n, p[1]
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.asarray(low - np.log1p(np.exp(sharp * (low - high))) / sharp)


def saturation_parameters(p: FloatArray) -> tuple[float, float, float]:
    """(slope, limit, sharpness) of the logarithms that `log_saturate` takes."""
    return float(np.exp(p[0])), float(np.exp(p[1])), float(_sharpness(p[2]))


def _sharpness(log_sharpness: float) -> float:
    return float(np.exp(np.clip(log_sharpness, math.log(_BLUNTEST), math.log(_SHARPEST))))


Pair = tuple[float, float]


class Quality(Struct, frozen=True):
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


class LatencyBandwidth(Struct, frozen=True):
    """t(bytes) = latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float
    quality: Quality

    def seconds(self, size_bytes: float) -> float:
        """Time of a transfer of `size_bytes`."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Saturating(Struct, frozen=True):
    """y(n) = ((slope n)^-p + limit^-p)^(-1/p), linear in n up to a limit; `sharpness` p shapes the knee."""

    slope: float
    limit: float
    sharpness: float
    quality: Quality

    def at(self, n: float) -> float:
        """The rate with n SMs."""
        low, high = sorted((self.slope * n, self.limit))
        return float(low * (1.0 + (low / high) ** self.sharpness) ** (-1.0 / self.sharpness))

    def sms_for(self, share: float) -> float:
        """SMs that reach `share` (0 to 1) of the limit."""
        p = self.sharpness
        return float(self.limit / self.slope * (share**-p - 1.0) ** (-1.0 / p))


class TransferFit(Struct, frozen=True):
    """t(bytes, n) = latency_s + bytes / R(n), with R saturating in the SMs n."""

    latency_s: float
    rate: Saturating
    quality: Quality

    def seconds(self, size_bytes: float, sms: float) -> float:
        """Time of a dispatch or combine of `size_bytes` received with `sms` communication SMs."""
        return self.latency_s + size_bytes / self.rate.at(sms)


class SlowDownFit(Struct, frozen=True):
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


def medians(rows: Iterable[Pair]) -> tuple[tuple[Pair, ...], float]:
    """Median y of every distinct x, in order of x, and the median relative spread within one x.

    Raises InputError for values that are not finite and positive in y.
    """
    groups: dict[float, list[float]] = defaultdict(list)
    for x, y in rows:
        if not (math.isfinite(x) and math.isfinite(y) and y > 0.0):
            raise InputError(
                f"a measured row ({x}, {y}) is not usable: x must be finite and y finite and positive; "
                "remove the row or measure it again"
            )
        groups[float(x)].append(float(y))
    points = tuple((x, float(np.median(groups[x]))) for x in sorted(groups))
    return points, _spread(groups.values())


def fit_latency_bandwidth(rows: Iterable[Pair], what: str = "transfer") -> LatencyBandwidth:
    """Latency and bandwidth of (bytes, seconds) rows, at least three different sizes.

    Raises InputError for too few sizes, or where time does not grow with size.
    """
    rows = list(rows)
    points, spread = medians(rows)
    _enough(points, 3, what, "sizes")
    latency, rate = _line(points, what)
    found = LatencyBandwidth(latency, rate, NO_QUALITY)
    left_out = _left_out(points, 4, lambda rest: LatencyBandwidth(*_line(rest, what), NO_QUALITY).seconds)
    return LatencyBandwidth(latency, rate, _quality(rows, found.seconds, left_out, spread))


def fit_saturating(rows: Iterable[Pair], what: str = "rate against SMs") -> Saturating:
    """Slope, limit and knee of (SMs, rate) rows, at least four different numbers of SMs.

    Raises InputError for too few points or numbers of SMs below 1.
    """
    rows = list(rows)
    points, spread = medians(rows)
    _enough(points, 4, what, "numbers of SMs")
    if points[0][0] < 1:
        raise InputError(f"{what}: {points[0][0]:g} SMs is not a measurement; numbers of SMs start at 1")
    slope, limit, sharp = _saturating(points)
    found = Saturating(slope, limit, sharp, NO_QUALITY)
    left_out = _left_out(points, 5, lambda rest: Saturating(*_saturating(rest), NO_QUALITY).at)
    return Saturating(slope, limit, sharp, _quality(rows, found.at, left_out, spread))


def fit_transfer(rows: Iterable[tuple[float, float, float]], what: str = "dispatch") -> TransferFit:
    """Latency and saturating rate of (bytes, SMs, seconds) rows.

    The leave-one-out error omits every (bytes, SMs) point in turn. Raises InputError for fewer than six
    points, two sizes or three numbers of SMs.
    """
    rows = list(rows)
    cells: dict[tuple[float, float], list[float]] = defaultdict(list)
    for size, sms, seconds in rows:
        cells[float(size), float(sms)].append(float(seconds))
    points = sorted((size, sms, medians((0.0, s) for s in v)[0][0][1]) for (size, sms), v in cells.items())
    sizes, sms_seen = {p[0] for p in points}, {p[1] for p in points}
    if len(points) < 6 or len(sizes) < 2 or len(sms_seen) < 3 or min(sms_seen, default=0) < 1:
        raise InputError(
            f"{what}: {len(points)} points over {len(sizes)} sizes and {len(sms_seen)} numbers of SMs are "
            "too few; measure at least 6 points over 2 sizes and 3 numbers of SMs (1 or more)"
        )
    found = _transfer(points)
    errors = []
    if len(points) >= 8:
        for i, (size, sms, seconds) in enumerate(points):
            rest = points[:i] + points[i + 1 :]
            if {p[1] for p in rest} == sms_seen and len({p[0] for p in rest}) > 1:
                errors.append(abs(_transfer(rest, found).seconds(size, sms) / seconds - 1.0))
    inside = [abs(found.seconds(size, sms) / seconds - 1.0) for size, sms, seconds in rows]
    spread = _spread(cells.values())
    return TransferFit(found.latency_s, found.rate, _summary(len(rows), inside, errors, spread))


def fit_slow_down(rows: Iterable[Pair], *, falling: bool = False, what: str = "slow-down") -> SlowDownFit:
    """Medians of (SMs, time over time alone), pooled until monotone in the SMs (isotonic regression).

    Compute is never faster with fewer free SMs, so its slow-down rises; communication is never slowed more
    with more SMs of its own, so with `falling` it falls, without a point (0, 1). The leave-one-out error
    predicts every inner number of SMs from its neighbours. Raises InputError without a row at 1 SM or more.
    """
    rows = [(x, y) for x, y in rows if x > 0]
    points, spread = medians(rows)
    _enough(points, 1, what, "numbers of SMs")
    ys = [max(1.0, y) for _, y in points]
    pooled = [-v for v in isotonic([-y for y in ys])] if falling else isotonic(ys)
    curve = tuple((x, y) for (x, _), y in zip(points, pooled, strict=True))
    if not falling:
        curve = ((0.0, 1.0), *curve)
    errors = [
        abs(interpolate(curve[:i] + curve[i + 1 :], x) / y - 1.0)
        for i, (x, y) in enumerate(curve)
        if 0 < i < len(curve) - 1
    ]
    inside = [abs(interpolate(curve, x) / y - 1.0) for x, y in rows]
    return SlowDownFit(curve, points, _summary(len(rows), inside, errors, spread))


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` (least squares, pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, m), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    return [mean for mean, count in blocks for _ in range(count)]


# --- robust least squares on log errors ---


def _enough(points: Sequence[object], needed: int, what: str, of: str) -> None:
    if len(points) < needed:
        raise InputError(
            f"{what}: {len(points)} different {of} measured, but the fit needs at least {needed}; "
            "measure more points (without --quick) or leave this curve out"
        )


def _line(points: Sequence[Pair], what: str) -> Pair:
    """(latency, rate) of (bytes, seconds) points."""
    sizes, seconds = (np.array(column) for column in zip(*points, strict=True))
    grown = float(np.max(sizes) - np.min(sizes))
    slope = (seconds[-1] - seconds[0]) / grown if grown > 0 else 0.0
    if slope <= 0.0:
        raise InputError(
            f"{what}: {seconds[-1]:g} s for {sizes[-1]:g} B is not longer than {seconds[0]:g} s for "
            f"{sizes[0]:g} B, so no bandwidth follows; measure larger sizes"
        )
    start = np.log([max(1e-9, float(seconds[0] - slope * sizes[0]), 0.05 * float(seconds[0])), 1.0 / slope])
    logs = np.log(seconds)
    best = minimise(lambda p: np.log(np.exp(p[0]) + sizes / np.exp(p[1])) - logs, start)
    return float(np.exp(best[0])), float(np.exp(best[1]))


def _saturating(points: Sequence[Pair]) -> tuple[float, float, float]:
    ns, ys = (np.log(np.array(column)) for column in zip(*points, strict=True))
    best, best_cost = None, math.inf
    for sharp in (2.0, 8.0):
        start = np.array([float(np.max(ys - ns)), float(np.max(ys)), math.log(sharp)])
        found = minimise(lambda p: log_saturate(ns, p) - ys, start)
        cost = float(np.median(np.abs(log_saturate(ns, found) - ys)))
        if cost < best_cost:
            best, best_cost = found, cost
    assert best is not None
    return saturation_parameters(best)


def _transfer(
    points: Sequence[tuple[float, float, float]], start_from: TransferFit | None = None
) -> TransferFit:
    sizes, ns, seconds = (np.array(column) for column in zip(*points, strict=True))
    logs, log_n = np.log(seconds), np.log(ns)
    if start_from is None:
        rates = sizes / seconds
        start = np.log([float(np.min(seconds)) / 2, float(np.max(rates / ns)), float(np.max(rates)), 4.0])
    else:
        r = start_from.rate
        start = np.log([start_from.latency_s, r.slope, r.limit, r.sharpness])

    def residual(p: FloatArray) -> FloatArray:
        return np.asarray(np.log(np.exp(p[0]) + sizes / np.exp(log_saturate(log_n, p[1:]))) - logs)

    found = minimise(residual, start)
    return TransferFit(
        float(np.exp(found[0])), Saturating(*saturation_parameters(found[1:]), NO_QUALITY), NO_QUALITY
    )


# --- stated errors ---


def _left_out(
    points: Sequence[Pair], needed: int, refit: Callable[[Sequence[Pair]], Callable[[float], float]]
) -> list[float]:
    """Relative errors of every inner point predicted from the others; ends would be extrapolated."""
    if len(points) < needed:
        return []
    inner = range(1, len(points) - 1)
    return [abs(refit([*points[:i], *points[i + 1 :]])(points[i][0]) / points[i][1] - 1.0) for i in inner]


def _quality(
    rows: Sequence[Pair], predict: Callable[[float], float], left_out: list[float], spread: float
) -> Quality:
    return _summary(len(rows), [abs(predict(x) / y - 1.0) for x, y in rows], left_out, spread)


def _summary(rows: int, inside: list[float], left_out: list[float], spread: float) -> Quality:
    return Quality(
        rows,
        float(np.median(inside)),
        max(inside),
        float(np.median(left_out)) if left_out else math.nan,
        max(left_out) if left_out else math.nan,
        spread,
    )


def _spread(groups: Iterable[Sequence[float]]) -> float:
    half = [(max(v) - min(v)) / 2.0 / float(np.median(v)) for v in groups if len(v) > 1]
    return float(np.median(half)) if half else 0.0
