"""The numerical core of the fits: robust least squares on log errors, and a saturating rate in logs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from moesim.hwmodels.arrays import FloatArray

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


def saturate(n: float, slope: float, limit: float, sharpness: float) -> float:
    """((slope n)^-p + limit^-p)^(-1/p) with p = sharpness."""
    low, high = sorted((slope * n, limit))
    return float(low * (1.0 + (low / high) ** sharpness) ** (-1.0 / sharpness))


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
