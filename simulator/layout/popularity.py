"""Computes the popularity of the experts of a layer, by Zipf's law or from recorded counts."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError

ZIPF_STREAM = 3
"""Part of the seed of the shuffle, so that it shares no random numbers with the loads."""

MAX_VIO_STREAM = 5
"""Part of the seed of the ranking of experts by `max_vio_shares`."""

DECIMALS = 12
"""Decimals of shares that come from exponentials, whose last digits differ between processors."""

LARGEST_COUNT = 1e15
"""Largest legal count; whole numbers up to it, and their sums, are exact as floats."""

SUM_TOLERANCE = 1e-6
"""Relative difference between two layers' totals that may come from decimals rounded in the file."""


def zipf_shares(
    exponent: float, layers: int, experts: int, top_k: int, seed: int, *, shuffle_per_layer: bool = True
) -> FloatArray:
    """Shares of the rows [layers, experts], proportional to 1 / r^exponent for the r-th expert (eq. R4).

    r ranks the experts by popularity. With `shuffle_per_layer` every layer has its own seeded ranking;
    otherwise expert 0 is the most popular one in all layers. No share exceeds 1 / top_k (see
    `capped_shares`). Raises InputError for an exponent outside 0 to 10.
    """
    if not 0 <= exponent <= 10:
        raise InputError(f"routing.load.exponent={exponent} is outside 0 (all equal) to 10")
    weights = np.array([float(rank) ** -exponent for rank in range(1, experts + 1)])
    shares = np.tile(weights / weights.sum(), (layers, 1))
    if shuffle_per_layer:
        # Random numbers are sorted because the results of NumPy's own shuffles changed between versions.
        draws = np.random.default_rng([seed, ZIPF_STREAM]).random((layers, experts))
        shares = np.take_along_axis(shares, np.argsort(draws, axis=1, kind="stable"), axis=1)
    return capped_shares(shares, top_k)


def max_vio_shares(max_vio: float, layers: int, experts: int, top_k: int, seed: int) -> FloatArray:
    """Shares of the rows [layers, experts] whose largest is 1 + `max_vio` times the mean (eq. R10).

    Shares are lognormal: the r-th expert has the r-th expected normal score as its logarithm, times the one
    spread that gives the largest share. Every layer has its own seeded ranking. Raises InputError for a
    MaxVio that no top-k gate can have.
    """
    most = experts / top_k - 1.0
    if not 0.0 <= max_vio <= most:
        raise InputError(
            f"routing.load.max_vio={max_vio:g} is outside 0 to {most:g}, since an expert gets at most "
            f"1/top_k=1/{top_k} of the rows of {experts}; nearest: {min(max(max_vio, 0.0), most):g}"
        )
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((rank + 0.625) / (experts + 0.25)) for rank in range(experts)])
    low, high = 0.0, 64.0
    for _ in range(80):
        middle = (low + high) / 2.0
        weights = np.exp(middle * (scores - scores[-1]))
        low, high = (middle, high) if experts / weights.sum() < 1.0 + max_vio else (low, middle)
    weights = np.exp(low * (scores - scores[-1]))
    ranked = np.round(weights / weights.sum(), DECIMALS)
    draws = np.random.default_rng([seed, MAX_VIO_STREAM]).random((layers, experts))
    order = np.argsort(draws, axis=1, kind="stable")
    return np.asarray(ranked[order] / ranked.sum())


def capped_shares(shares: FloatArray, top_k: int) -> FloatArray:
    """Cut shares [..., experts] off at 1 / top_k and give the excess to the other experts in proportion.

    A token picks an expert at most once, so no expert gets more rows than there are tokens (eq. R4).
    """
    limit = 1.0 / top_k
    at_limit = shares > limit * (1.0 + 1e-12)
    if not at_limit.any():
        return shares
    out = shares
    for _ in range(top_k + 1):  # every pass caps at least one more expert, and top_k of them take all rows
        free = np.maximum(np.where(at_limit, 0.0, shares), np.finfo(np.float64).tiny * ~at_limit)
        room = np.maximum(1.0 - at_limit.sum(axis=-1, keepdims=True) * limit, 0.0)
        out = np.where(at_limit, limit, free * (room / np.maximum(free.sum(axis=-1, keepdims=True), 1e-300)))
        over = out > limit * (1.0 + 1e-12)
        if not over.any():
            break
        at_limit = at_limit | over
    return np.asarray(out)


def shares_of_counts(counts: FloatArray, *, layers: int, experts: int, top_k: int, place: str) -> FloatArray:
    """Convert recorded counts to shares [steps, layers or 1, experts].

    `counts` is one row of experts, a row per layer, or such a table for each step. Every layer of a step
    routes the same tokens to `top_k` experts each, so all rows of a step must have the same total (a multiple
    of top_k where the counts are whole numbers), and no expert can have more rows than there are tokens.
    Raises InputError, naming `place`, layer and expert, for counts that contradict that, are negative or not
    finite, or whose shape is not that of the model.
    """
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim < 3:
        table = table.reshape(1, -1, table.shape[-1]) if table.ndim else table.reshape(1, 1, 1)
    if table.ndim != 3 or not table.size:
        raise InputError(
            f"{place}: shape {counts.shape} is not [layers, experts] or [steps, layers, experts]"
        )
    if table.shape[2] != experts:
        raise InputError(
            f"{place}: {table.shape[2]} experts a row, but the model has {experts}; give {experts} counts "
            "a layer"
        )
    if table.shape[1] not in (1, layers):
        raise InputError(
            f"{place}: {table.shape[1]} layers, but the scenario has {layers} with routed experts (the MTP "
            f"module counts as the last); give {layers} rows, or 1 for all layers"
        )
    check_counts(table, top_k, place)
    return np.asarray(table / table.sum(axis=2, keepdims=True))


def check_counts(table: FloatArray, top_k: int, place: str) -> None:
    """Raise InputError where counts [steps, layers, experts] cannot come from a top-k gate."""
    bad = ~np.isfinite(table) | (table < 0) | (table > LARGEST_COUNT)
    if bad.any():
        step, layer, expert = (int(i) for i in np.argwhere(bad)[0])
        raise InputError(
            f"{place}: {_where(table, step, layer)}, expert {expert}: {table[step, layer, expert]:g} is no "
            f"count; counts are numbers from 0 to {LARGEST_COUNT:g}"
        )
    totals = table.sum(axis=2)
    for step, row in enumerate(totals):
        if (row == 0).any():
            layer = int((row == 0).argmax())
            raise InputError(
                f"{place}: {_where(table, step, layer)} has no rows at all; every layer routes tokens"
            )
        off = np.abs(row - row[0]) > SUM_TOLERANCE * row[0]
        if off.any():
            layer = int(off.argmax())
            raise InputError(
                f"{place}: {_where(table, step, layer)} sums to {row[layer]:.10g}, but layer 0 to "
                f"{row[0]:.10g}; every layer routes the same tokens, so all rows must have one total"
            )
        whole = bool((table[step] == np.rint(table[step])).all())
        if whole and row[0] % top_k:
            raise InputError(
                f"{place}: {_where(table, step, 0)} sums to {row[0]:.10g}, which is not a multiple of "
                f"top_k={top_k}; every token takes {top_k} experts, so the total is {top_k} x tokens"
            )
        most = row[:, None] / top_k * (1.0 + SUM_TOLERANCE)
        if (table[step] > most).any():
            layer, expert = (int(i) for i in np.argwhere(table[step] > most)[0])
            raise InputError(
                f"{place}: {_where(table, step, layer)}, expert {expert}: {table[step, layer, expert]:.10g} "
                f"rows, but only {row[layer] / top_k:.10g} tokens (total / top_k={top_k}); a token picks an "
                "expert at most once"
            )


def _where(table: FloatArray, step: int, layer: int) -> str:
    return f"layer {layer}" if len(table) == 1 else f"step {step}, layer {layer}"
