"""Popularity of a layer's experts: Zipf's law, recorded counts from untrusted files, a balancing bias."""

from __future__ import annotations

from math import exp, pi, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_readable
from moesim.hwmodels.yaml_io import load_mapping
from moesim.simulator.model.feed_forward.moe import MoE

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


# -- histogram ---------------------------------------------------------------------------------------
# Reads recorded expert counts from untrusted CSV, NumPy or JSON files.

MAX_BYTES = 16_000_000
"""Largest file; 61 layers of 256 experts over a hundred steps fit in any format. Parsed, the numbers take up
to 16 times as much memory."""
MAX_NUMBERS = 2_100_000
"""Most numbers in a JSON file, as many as `MAX_BYTES` leaves room for."""
MAX_LINES = 20_000
MAX_EXPERTS = 10_000
"""Most lines of a CSV file (rows of a JSON list), and most counts in a line or row."""


def read_counts(path: Path) -> FloatArray:
    """Read the counts of a file as floats [layers, experts] or [steps, layers, experts].

    A `.csv` file has one line per layer, with numbers separated by commas; `#` starts a comment. A `.npy`
    file holds an array of integers or floats with 1 to 3 dimensions, a `.json` file the mapping
    `{"counts": [[...], ...]}`. Raises InputError, naming the file and where possible the line, for a file
    that is missing, too large, empty, ragged, or not of the type that its name says.
    """
    name = str(path)
    readers = {".csv": _read_csv, ".npy": _read_npy, ".json": _read_json}
    if path.suffix.lower() not in readers:
        raise InputError(f"{name}: unknown file type {path.suffix!r}; use {', '.join(readers)}")
    check_readable(path)
    try:
        if not path.is_file():
            raise InputError(f"{name}: No such file" if not path.exists() else f"{name}: is not a file")
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be read: {error}") from None
    if size > MAX_BYTES:
        raise InputError(
            f"{name}: {size / 1e6:.0f} MB is above the limit of {MAX_BYTES // 10**6} MB; sum the counts over "
            "steps or tokens first"
        )
    try:
        return readers[path.suffix.lower()](path)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def _read_csv(path: Path) -> FloatArray:
    rows: list[list[float]] = []
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from None
    if len(lines) > MAX_LINES:
        raise InputError(f"{path}: {len(lines):,} lines, but a file holds at most {MAX_LINES:,} layers")
    for number, line in enumerate(lines, start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        cells = text.split(",")
        if len(cells) > MAX_EXPERTS:
            raise InputError(
                f"{path}: line {number} has {len(cells):,} counts, above the limit {MAX_EXPERTS:,}"
            )
        rows.append([])
        for cell in cells:
            try:
                rows[-1].append(float(cell))
            except ValueError:
                raise InputError(
                    f"{path}: line {number}: {cell.strip()[:40]!r} is not a number; a line holds the counts "
                    "of one layer, separated by commas, without headings"
                ) from None
        if len(rows[-1]) != len(rows[0]):
            raise InputError(
                f"{path}: line {number} has {len(rows[-1])} counts, the first layer has {len(rows[0])}; "
                "every layer needs one count an expert"
            )
    if not rows:
        raise InputError(f"{path}: the file is empty; a line of counts for each layer is expected")
    return np.array(rows)


def _read_npy(path: Path) -> FloatArray:
    try:
        # Memory-mapped, so that a header that claims more than the file holds fails before any allocation.
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header as Python text, so tokenize, struct and others raise
        raise InputError(
            f"{path}: not a NumPy array file ({' '.join(str(error).split())[:120]}); write it with numpy.save"
        ) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(f"{path}: an archive of arrays, not one array; write the counts with numpy.save")
    if array.dtype.kind not in "iuf":
        raise InputError(f"{path}: an array of {array.dtype}, but counts are integers or floats")
    if not 1 <= array.ndim <= 3 or not array.size:
        raise InputError(
            f"{path}: shape {array.shape} is not [experts], [layers, experts] or [steps, layers, experts]"
        )
    return np.array(array, dtype=np.float64)


def _read_json(path: Path) -> FloatArray:
    counts = load_mapping(path, MAX_NUMBERS).get("counts")
    if not isinstance(counts, list) or not counts:
        raise InputError(f'{path}: the key counts is missing or empty; write {{"counts": [[...], ...]}}')
    return np.array(_nested(counts, str(path), "counts", 0), dtype=np.float64)


def _nested(values: list[Any], name: str, where: str, depth: int) -> list[Any]:
    """Return nested lists of floats after checking that they are regular and at most three levels deep."""
    if depth > 2:
        raise InputError(f"{name}: {where} is nested deeper than [steps][layers][experts]")
    most = MAX_LINES if any(isinstance(value, list) for value in values[:1]) else MAX_EXPERTS
    if len(values) > most:
        raise InputError(f"{name}: {where} holds {len(values):,} entries, above the limit {most:,}")
    lists = [isinstance(value, list) for value in values]
    if not any(lists):
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{name}: {where}.{index}={repr(value)[:40]} is not a number")
        return [float(value) for value in values]
    if not all(lists):
        raise InputError(f"{name}: {where} mixes numbers and lists")
    inner = [_nested(value, name, f"{where}.{index}", depth + 1) for index, value in enumerate(values)]
    shapes = {np.shape(value) for value in inner}
    if len(shapes) > 1 or (0,) in shapes:
        raise InputError(
            f"{name}: {where} holds rows of {', '.join(map(str, sorted(shapes)))} counts; all must be equal"
        )
    return inner


# -- bias --------------------------------------------------------------------------------------------
# Simulates auxiliary-loss-free balancing: a bias on each expert's score that counteracts its load.

BIAS_STREAM = 4
"""Part of the seed for the draws of the affinities."""

MOST_STEPS = 20_000
"""Largest number of simulated steps; 59 layers of 256 experts then take about 10 s."""


TOKEN_SCALE = sqrt(3.0) / pi
"""Scale of the logistic distribution of a token's affinity to an expert, whose variance is 1."""


class BiasRun(Struct, frozen=True):
    """Expert load during the training steps from 0 to steps - 1.

    `popularity` [1, layers, experts] holds the experts' shares of the rows in the last step (each row sums to
    1), `max_vio` [steps, layers] the load of the busiest expert over the mean, less 1, and `bias`
    [layers, experts] the bias after the last step.
    """

    popularity: FloatArray
    max_vio: FloatArray
    bias: FloatArray


def bias_dynamics(
    *,
    layers: int,
    experts: int,
    top_k: int,
    affinity_spread: float,
    drift_steps: float,
    gamma: float,
    steps: int,
    seed: int = 0,
) -> BiasRun:
    """Simulate expert load under a bias that rises by `gamma` for an underloaded expert and falls otherwise.

    The rule is that of the DeepSeek-V3 report, section 2.1.2, applied to the load of the whole batch of a
    step. In the model of the scores (eqs. R5, R6) the affinity of a token to expert e is a logistic variable
    with mean mu_e and variance 1, and its score is the sigmoid of it. mu_e follows a stationary first-order
    autoregressive process with standard deviation `affinity_spread` and a memory of `drift_steps` steps. All
    tokens share one threshold, which top_k experts pass on average; groups of experts are not limited.
    Raises InputError for numbers out of range.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(
            f"routing.load.step={steps} is outside 1 to {MOST_STEPS}; the load forgets its start within a "
            "few drift_steps, so fewer steps do"
        )
    if not (0 <= affinity_spread <= 5 and 1 <= drift_steps < 1e12 and 0 <= gamma <= 1):
        raise InputError(
            f"routing.load: affinity_spread={affinity_spread} must be 0 to 5, drift_steps={drift_steps} at "
            f"least 1, gamma={gamma} 0 to 1"
        )
    rng = np.random.default_rng([seed, BIAS_STREAM])
    retained = exp(-1.0 / drift_steps)
    affinity = affinity_spread * rng.standard_normal((layers, experts))
    bias = np.zeros((layers, experts))
    threshold = np.full((layers, 1), 0.5)
    max_vio = np.empty((steps, layers))
    for step in range(steps):
        if step:
            fresh = rng.standard_normal((layers, experts))
            affinity = retained * affinity + affinity_spread * sqrt(1.0 - retained * retained) * fresh
        chosen, threshold = choice_probabilities(affinity, bias, top_k, threshold)
        shares = np.round(chosen / chosen.sum(axis=1, keepdims=True), DECIMALS)
        max_vio[step] = shares.max(axis=1) * experts - 1.0
        bias = bias + gamma * np.sign(round(1.0 / experts, DECIMALS) - shares)
    return BiasRun(shares[None], max_vio, bias)


def choice_probabilities(
    affinity: FloatArray, bias: FloatArray, top_k: int, start: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Solve eq. R5 for the threshold by Newton's method, from the thresholds `start` of the previous step.

    Returns the probability that a token picks each expert [layers, experts], and the threshold of the biased
    score [layers, 1]. The iteration stays inside a bracket.
    """
    low, high = bias.min(axis=1, keepdims=True), bias.max(axis=1, keepdims=True) + 1.0
    threshold = np.clip(start, low + 1e-9, high - 1e-9)
    tiny = 1e-12
    close = False
    unlike = np.exp(-affinity / TOKEN_SCALE)
    for _ in range(200):
        score = np.clip(threshold - bias, tiny, 1.0 - tiny)
        # exp((logit(score) - affinity) / scale), as a power of the odds.
        beaten = (score / (1.0 - score)) ** (1.0 / TOKEN_SCALE) * unlike
        chosen = 1.0 / (1.0 + beaten)
        excess = chosen.sum(axis=1, keepdims=True) - top_k
        if close:
            break
        # A last step doubles the correct digits, so that the result does not depend on where the search ends.
        close = bool(np.abs(excess).max() < 1e-9 * top_k)
        low, high = np.where(excess > 0, threshold, low), np.where(excess > 0, high, threshold)
        slope = (chosen * (1.0 - chosen) / (score * (1.0 - score))).sum(axis=1, keepdims=True) / TOKEN_SCALE
        following = threshold + excess / np.maximum(slope, tiny)
        inside = (following >= low) & (following <= high)
        threshold = np.where(inside, following, (low + high) / 2.0)
    return chosen, threshold


def check_gate(moe: MoE) -> None:
    """Raise InputError unless the model's gate has sigmoid scores, on which the bias rule is defined."""
    if moe.scoring != "sigmoid":
        raise InputError(
            f"routing.load.kind=bias: the gate has {moe.scoring} scores; the bias rule is defined on sigmoid "
            "scores (DeepSeek-V3); use uniform, zipf or histogram"
        )
