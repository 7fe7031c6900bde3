"""Determines the constants of `h200-sparse-attention` from the calibration half of the measured modules.

Every constant is a time per unit of a roofline (1 / share, at least 1) or a fixed time (at least 0). They are
found together by weighted least squares on relative errors with these bounds; the weights are renewed until
the sum of absolute relative errors no longer falls, so that a few odd rows do not move the constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from lab.scoring.attention_modules import call_operators, call_overheads, operator_key, roofline_seconds
from lab.scoring.sparse_attention import SITES, MeasuredModule

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.arrays import BoolArray, FloatArray
from moesim.simulator.cost.rate_tables import operator_bytes

REWEIGHTINGS, SWEEPS = 30, 400
HOST_SPREAD = 1.2
"""Eager rows within this factor of the fastest count as bound by the host, and the fit leaves them out."""
SLOWEST = 20.0
"""Largest slow-down over the roofline; a constant there is not determined by the rows."""
SMALLEST_ERROR = 0.02
"""Relative error below which a row gains no further weight."""
BEST_SHARE, BEST_ATTENTION, BEST_SPARSE, BEST_FP8 = 0.9, 0.75, 640.0 / 989.5, 1453.4 / 1979.0
"""Largest credible shares of the roofline: of any kernel (copies reach 0.81, FlashMLA's decode 0.90), dense
attention on Hopper (FlashAttention-3, arXiv 2407.08608, 740 TFLOP/s), of sparse prefill
(deepseek-ai/FlashMLA README.md, 640 TFLOP/s on H800) and of FP8 products (best measured GEMM of H200)."""
OVERHEAD = "module_overhead/"
PROJECTIONS = "module_projections/"
BEST_PROJECTIONS, WORST_PROJECTIONS = 1.0, 0.7
"""Range of the share of the best measured GEMM that projections with block scales reach
(`generic-priors.gemm_shape_fp8`)."""


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """One constant: slow-down over the roofline (1 / share) or seconds, the rows behind it, their spread."""

    use: str
    value: float
    rows: int
    residual: float
    """Median absolute relative error of the calibration rows in which the constant appears."""


def fit_constants(rows: Iterable[MeasuredModule], accelerator: Accelerator) -> tuple[FittedConstant, ...]:
    """Constants of the equation of modules from calibration rows (rows of the other half are refused by an assertion)."""
    modules = [row for row in rows if not row.hyper]
    assert all(row.calibrates for row in modules), "a row that is left out must not reach the fit"
    terms = [_terms(row, accelerator) for row in modules]
    names = sorted({name for term, _ in terms for name in term})
    matrix = np.array([[term.get(name, 0.0) for name in names] for term, _ in terms])
    times = np.array([row.seconds for row in modules])
    hosts = [host for _, host in terms]
    bounds = np.array([_bounds(name) for name in names])
    host_s, on_device = _split_by_host(times, hosts)
    values = _bounded_fit(matrix[on_device], times[on_device], bounds)
    device_s = matrix @ values
    modelled = np.maximum(device_s, [host_s.get(h or "", 0.0) for h in hosts])
    errors = np.abs(modelled / times - 1.0)
    out = [
        FittedConstant(name, float(value), int(np.sum(uses)), float(np.median(errors[uses])))
        for name, value, uses in zip(names, values, matrix.T > 0, strict=True)
    ]
    for name, seconds in host_s.items():
        own = [e for e, h, d in zip(errors, hosts, on_device, strict=True) if h == name and not d]
        out.append(FittedConstant(OVERHEAD + name, seconds, len(own), float(np.median(own)) if own else 0.0))
    return tuple(out)


def _bounds(use: str) -> tuple[float, float]:
    """Smallest and largest value of a constant: that of the best credible kernel, and of a slow one."""
    if use.startswith(OVERHEAD):
        return 0.0, np.inf
    if use.startswith(PROJECTIONS):
        return 1.0 / BEST_PROJECTIONS, 1.0 / WORST_PROJECTIONS
    if use.startswith("attention_forward/"):
        return 1.0 / BEST_ATTENTION, SLOWEST
    if use.startswith("indexer/"):
        return 1.0 / BEST_FP8, SLOWEST
    sparse_prefill = use.startswith("sparse_attention_forward/") and use.endswith("prefill")
    return 1.0 / (BEST_SPARSE if sparse_prefill else BEST_SHARE), SLOWEST


def _terms(row: MeasuredModule, accelerator: Accelerator) -> tuple[dict[str, float], str | None]:
    """Coefficients of the unknown constants, and the name of the host's time."""
    hidden, attention = row.attention
    stack, overheads, host = call_overheads(attention, row.call)
    term = {OVERHEAD + name: 1.0 for name in overheads}
    for op in call_operators(attention, hidden, row.call):
        key = operator_key(op, stack)
        term[key] = term.get(key, 0.0) + roofline_seconds(op, accelerator)
    return term, host


def _split_by_host(times: FloatArray, hosts: Sequence[str | None]) -> tuple[dict[str, float], BoolArray]:
    """The host's time by name (the median of the rows near the fastest), and the rows beyond these."""
    host_s: dict[str, float] = {}
    limit_s: dict[str, float] = {}
    for name in sorted({h for h in hosts if h}):
        own = [float(t) for t, h in zip(times, hosts, strict=True) if h == name]
        limit_s[name] = HOST_SPREAD * min(own)
        host_s[name] = median(t for t in own if t <= limit_s[name])
    bound = [t > limit_s.get(h or "", 0.0) for t, h in zip(times, hosts, strict=True)]
    return host_s, np.array(bound, dtype=bool)


def _bounded_fit(matrix: FloatArray, times: FloatArray, bounds: FloatArray) -> FloatArray:
    """Values inside `bounds` [constants, 2] that make the sum of absolute relative errors small."""
    weights = 1.0 / times
    values = bounds[:, 0].copy()
    for _ in range(REWEIGHTINGS):
        scaled = matrix * weights[:, None]
        values = _coordinate_descent(scaled.T @ scaled, scaled.T @ (times * weights), values, bounds)
        errors = np.abs(matrix @ values / times - 1.0)
        weights = 1.0 / (times * np.sqrt(np.maximum(errors, SMALLEST_ERROR)))
    return values


def _coordinate_descent(
    gram: FloatArray, right: FloatArray, start: FloatArray, bounds: FloatArray
) -> FloatArray:
    """Minimum of a quadratic form inside bounds, one coordinate at a time."""
    values = start.copy()
    for _ in range(SWEEPS):
        for i in range(len(values)):
            if gram[i, i] > 0.0:
                rest = right[i] - gram[i] @ values + gram[i, i] * values[i]
                values[i] = min(max(rest / gram[i, i], bounds[i, 0]), bounds[i, 1])
    return values


def hyper_points(rows: Iterable[MeasuredModule], module: str) -> list[tuple[float, float]]:
    """(bytes of one site, bytes/s) of the calibration rows of hyper-connections, in order of bytes.

    A row that is faster than a smaller one is left out, so that the time never falls with the size.
    """
    own = [row for row in rows if row.module == module]
    assert all(row.calibrates for row in own), "a row that is left out must not reach the fit"
    sized = sorted((operator_bytes(row.site_operator), row.seconds / SITES) for row in own)
    out: list[tuple[float, float]] = []
    last_bytes, last_s = 0.0, 0.0
    for size, seconds in sized:
        if size > last_bytes and seconds >= last_s:
            out.append((size, size / seconds))
            last_bytes, last_s = size, seconds
    return out
