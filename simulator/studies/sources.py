"""What a prediction is unsure of: every calibration entry it used, and how the entry may be off (pure).

One relative error stands for a whole entry: everything priced from it is slow or fast together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.calibration import (
    CalibrationProfile,
    Entry,
    GemmTable,
    Law,
    MeasuredCurve,
    Prior,
)
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.provenance import Sourced, sourced_numbers, with_value
from moesim.simulator.predict.plan_checks import RANGED_KEYS

Shape = Literal["normal", "triangular"]

QUANTILE_90 = 1.2815515655446004
"""Standard normal: a tenth lies above it, so 10 % and 90 % are plus and minus this."""

MODEL_ERROR = 0.10
"""Standard deviation of what no entry carries (docs/model.md, section 16), assumed. The best published
predictors of multi-node training steps are about this far off: vTrain (MICRO 2024, table of errors) has a
mean absolute error of 8.4 % on one node and 14.7 % on several. Not taken from errors of moesim."""


LEFT_OUT = "model.left_out"
"""Name of the source for what no calibration entry carries."""

NUMBERS = ("launch_gap", "kernel_floor", "lost_beside_nccl")
"""Numbers of a profile that may state a range."""

CLOCK = "variation.clock_cv"
JITTER = "variation.jitter_cv"
SPREADS = RANGED_KEYS
"""Scenario keys of spreads, sources where they state a range."""

SESSION = "calibration.session"
SESSION_ERROR = 0.010
"""Standard deviation of what a session has in common over tensor-core-bound entries: variance component
between seven calibrations of H200 hosts (2026-11-20, one driver; h200-1gpu, -2gpu, -4gpu twice, -8gpu once),
over BF16, FP8 and grouped GEMMs and attention forward and backward at the shapes that all of them have
(benchmarks/sessions.py). For memory-bound entries the same analysis gives 0."""

ATTENTION = ("attention_forward", "attention_backward")

ROUNDING = 1e-9
"""A mean of equal errors that is larger by less is that error."""


@dataclass(frozen=True, slots=True)
class Source:
    """Something uncertain: the relative change of its times at the 10 % and 90 % points, 0 = as predicted.

    A measured entry is normal with its residual as standard deviation; a prior is triangular from its
    `high` fraction over the stated one to its `low`.
    """

    id: str
    shape: Shape
    low: float
    """Change of its times at the fast end: normal: one deviation; triangular: the end of the range."""
    high: float
    """The same at the slow end."""
    meaning: str

    def points(self) -> tuple[float, float]:
        """The changes at its 10 % and 90 % points."""
        if self.shape == "normal":
            return self.low * QUANTILE_90, self.high * QUANTILE_90
        at = self.quantile(np.array([0.1, 0.9]))
        return float(at[0]), float(at[1])

    def quantile(self, u: FloatArray) -> FloatArray:
        """The triangular change at probabilities `u` (mode 0)."""
        width = self.high - self.low
        if width <= 0.0:
            return np.zeros_like(u)
        split = -self.low / width
        below = self.low + np.sqrt(u * width * -self.low)
        above = self.high - np.sqrt((1.0 - u) * width * self.high)
        return np.where(u < split, below, above)

    def draw(self, normal: FloatArray, uniform: FloatArray) -> FloatArray:
        """Changes from standard normal and uniform draws of equal shape; never below -90 %."""
        if self.shape == "triangular":
            return self.quantile(uniform)
        return np.asarray(np.maximum(np.where(normal < 0, -self.low, self.high) * normal, -0.9))


def entry_sources(
    profile: CalibrationProfile,
    used: Sequence[str],
    architecture: str = "",
    read: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Source, ...]:
    """One source an entry that was used and states an uncertainty, in the order of the profile.

    `architecture`: of the accelerator it is used for; entries carried from another have the error that they
    state for that. `read`: the mean error of entries' readings (`step_evidence`), larger where shapes were
    not measured.
    """
    wanted = set(used)
    found = (
        _source(entry, architecture, read.get(entry.id, 0.0))
        for entry in profile.entries()
        if entry.id in wanted
    )
    return tuple(source for source in found if source.high > source.low)


def _source(entry: Entry, architecture: str, read: float) -> Source:
    if isinstance(entry, Prior):
        low, high = entry.fraction / entry.high - 1.0, entry.fraction / entry.low - 1.0
        return Source(entry.id, "triangular", low, high, f"assumed: {entry.residual.meaning}")
    stated = entry.residual.on(architecture) if architecture else entry.residual
    r, meaning = stated.relative, stated.meaning
    if read > r * (1.0 + ROUNDING):
        r, meaning = read, f"{meaning}; shapes between or beyond the measured ones"
    return Source(entry.id, "normal", -r, r, meaning)


def model_error(relative: float) -> Source:
    """The source for what no calibration entry carries; it scales the whole step."""
    return Source(LEFT_OUT, "normal", -relative, relative, "what the model leaves out, assumed")


def number_sources(profile: CalibrationProfile) -> tuple[Source, ...]:
    """The profile's numbers of their own (`NUMBERS`), where their source leaves a range."""
    return tuple(
        source
        for name in NUMBERS
        if (number := getattr(profile, name)) is not None and (source := ranged(name, number)) is not None
    )


CLUSTER = "cluster."
"""Beginning of the names of sources that are numbers of the cluster's description."""
TIMED = ("bytes_per_s", "flop_per_s", "hz", "s")
"""Dimensions of numbers that a step time may depend on."""


def cluster_sources(cluster: Cluster) -> tuple[Source, ...]:
    """The cluster's numbers whose source leaves a range, as the relative change of the number itself."""
    return tuple(
        source
        for path, number in sourced_numbers(cluster, CLUSTER.removesuffix("."))
        if number.dimension in TIMED and (source := ranged(path, number)) is not None
    )


def shifted_cluster(cluster: Cluster, id_: str, change: float) -> Cluster:
    """The cluster with one number of `cluster_sources` off by a relative change."""
    number = dict(sourced_numbers(cluster, CLUSTER.removesuffix(".")))[id_]
    moved: Cluster = with_value(cluster, id_.removeprefix(CLUSTER), number.value * (1.0 + change))
    return moved


def ranged(id_: str, number: Sourced) -> Source | None:
    """A number with a stated range, as its relative change: triangular, likeliest as it stands."""
    if number.range is None:
        return None
    low, high = (end / number.value - 1.0 for end in number.range)
    return Source(id_, "triangular", low, high, f"range of the source: {number.note or number.source}")


def session(profile: CalibrationProfile, used: Sequence[str]) -> tuple[Source, tuple[str, ...]]:
    """What all entries that the tensor cores bound have in common, and which of those used they are."""
    wanted = set(used)
    bound = (
        *(t.id for t in profile.gemm_tables),
        *(c.id for c in profile.curves if any(use.split("/")[0] in ATTENTION for use in c.used_for)),
    )
    meaning = "one board on one day: clocks under power limit, common to products and attention"
    return Source(SESSION, "normal", -SESSION_ERROR, SESSION_ERROR, meaning), tuple(
        id_ for id_ in bound if id_ in wanted
    )


def shifted(profile: CalibrationProfile, id_: str, change: float, n_sms: int) -> CalibrationProfile:
    """The profile with the times of one entry longer by the factor 1 + `change` (> -1).

    Rates and shares are divided by it, times and slow-downs multiplied (a slow-down stays at least 1).
    `n_sms`: of the accelerator, for laws that are a formula of it. Its `NUMBERS` are ids
    too. Raises InputError for an unknown id.
    """
    moved = _shifted(profile, id_, 1.0 + change, n_sms)
    moved._hypothetical = True
    return moved


def _shifted(profile: CalibrationProfile, id_: str, factor: float, n_sms: int) -> CalibrationProfile:
    if id_ in NUMBERS:
        number = getattr(profile, id_)
        return profile.model_copy(update={id_: number.model_copy(update={"value": number.value * factor})})
    entry = profile.entry(id_)
    if isinstance(entry, GemmTable):
        return _with(
            profile, "gemm_tables", entry, points=tuple(_gemm_row(entry, r, factor) for r in entry.points)
        )
    if isinstance(entry, MeasuredCurve):
        scale = factor if _is_time(entry) else 1.0 / factor
        points = tuple((p[0], p[1] * scale, *p[2:]) for p in entry.points)
        return _with(profile, "curves", entry, points=points)
    if isinstance(entry, Law):
        measured = entry.points
        if entry.form == "free_sms":
            measured = tuple((float(n), n_sms / (n_sms - n)) for n in range(n_sms))
        points = tuple((n, max(1.0, s * factor) if n else s) for n, s in measured)
        return _with(profile, "laws", entry, form="table", points=points)
    assert isinstance(entry, Prior)
    fraction = min(1.0, entry.fraction / factor)
    return _with(profile, "priors", entry, fraction=fraction)


def _gemm_row(table: GemmTable, row: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    scale = factor if table.unit == "us" else 1.0 / factor
    return (*row[:4], row[4] * scale, *row[5:])


def _is_time(curve: MeasuredCurve) -> bool:
    return curve.y_unit in ("us", "ms", "s", "ns") or curve.y_name.startswith(
        ("time", "latency", "slow-down")
    )


def _with(profile: CalibrationProfile, field: str, entry: Entry, **changes: Any) -> CalibrationProfile:
    """`profile` with one entry changed."""
    new = entry.model_copy(update=changes)
    new.__dict__.pop("curve", None)  # kept from the old points
    kept = tuple(new if e is entry else e for e in getattr(profile, field))
    return profile.model_copy(update={field: kept})
