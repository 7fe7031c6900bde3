"""Sources of a prediction's uncertainty, the step's first-order response to them, and draws of it (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.calibration import CalibrationProfile, Entry, GemmTable, Law, MeasuredCurve, Prior
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.host import Host
from moesim.hwmodels.provenance import Sourced, sourced_numbers, with_value
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.evidence import Evidence, combined
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.critical import Segment
from moesim.simulator.engine.program import NS, Program
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.predict.plan_checks import RANGED_KEYS

# -- sources -----------------------------------------------------------------------------------------
# Sources of a prediction's uncertainty: the calibration entries and numbers with their errors (pure).
#
# Each entry has one relative error, so that everything priced from it is slow or fast together.

Shape = Literal["normal", "triangular"]

QUANTILE_90 = 1.2815515655446004
"""90 % quantile of the standard normal distribution; the 10 % quantile is its negative."""

MODEL_ERROR = 0.10
"""Standard deviation of the relative error that no calibration entry carries (docs/model.md, section 16).

It is assumed, and not taken from errors of moesim. The best published predictors of multi-node training
steps have about this error: that of vTrain (MICRO 2024, table of errors) is 8.4 % (mean absolute) on one node
and 14.7 % on several."""


LEFT_OUT = "model.left_out"
"""Id of the source for the error that no calibration entry carries."""

NUMBERS = ("launch_gap", "kernel_floor", "lost_beside_nccl")
"""Numbers of a profile that may state a range."""

CLOCK = "variation.clock_cv"
JITTER = "variation.jitter_cv"
MAX_VIO = "routing.load.max_vio"
SPREADS = RANGED_KEYS
"""Scenario keys of spreads, which are sources if they state a range."""

SESSION = "calibration.session"
SESSION_ERROR = 0.010
"""Standard deviation of the relative error that a measurement session shares over tensor-core-bound entries.

It is the variance component between seven calibrations of H200 hosts (2026-11-20, one driver; h200-1gpu,
-2gpu, -4gpu twice, -8gpu once), over BF16, FP8 and grouped GEMMs and attention forward and backward at the
shapes that all have (lab/profiles/sessions.py). For memory-bound entries the same analysis gives 0."""

ATTENTION = ("attention_forward", "attention_backward", "sparse_attention_forward")

ROUNDING = 1e-9
"""Relative difference up to which a mean of errors counts as equal to the stated error."""


class Source(Struct, frozen=True):
    """An uncertain input, given by the distribution of the relative change of its times (0 = as predicted).
    A measured entry is normal, with its residual as the standard deviation. A prior is triangular, between
    the changes at its `high` fraction (fast) and at its `low` fraction (slow).
    """

    id: str
    shape: Shape
    low: float
    """Change of its times at the fast end: one deviation if normal, the end of the range if triangular."""
    high: float
    """Change of its times at the slow end, likewise."""
    meaning: str

    def points(self) -> tuple[float, float]:
        """The changes at the 10 % and 90 % points of the distribution."""
        if self.shape == "normal":
            return self.low * QUANTILE_90, self.high * QUANTILE_90
        at = self.quantile(np.array([0.1, 0.9]))
        return float(at[0]), float(at[1])

    def quantile(self, u: FloatArray) -> FloatArray:
        """Quantiles of the triangular change at probabilities `u`; its mode is 0."""
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
    """One source for each used entry that states an uncertainty, in the order of the profile.

    `architecture`: that of the predicted accelerator; an entry measured on another has the error that it
    states for this one. `read`: mean error of each entry's readings (`step_evidence`), which is larger for
    shapes that were not measured.
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
    """The source for the error that no calibration entry carries; it scales the whole step."""
    return Source(LEFT_OUT, "normal", -relative, relative, "what the model leaves out, assumed")


RETRIES = Source(
    "memory.retries", "triangular", 0.0, 1.0, "an allocator at its limit frees and takes memory again; what "
    "it reserves, as a share of the range above the bytes in use"
)  # fmt: skip


def number_sources(profile: CalibrationProfile) -> tuple[Source, ...]:
    """One source for each of the profile's `NUMBERS` that states a range."""
    return tuple(
        source
        for name in NUMBERS
        if (number := getattr(profile, name)) is not None and (source := ranged(name, number)) is not None
    )


HOST = "software.host_slowness"
"""Id of the source for the times of the host, which is a scenario key."""


def host_source(host: Host) -> Source | None:
    """The source that all times of a host share: the range of its factor, or of its measured blocks."""
    number = host.factor or host.spread
    return None if number is None else ranged(HOST, number)


POLLING = "software.polling"
"""Id of the source for how often the launching thread shares a core with a thread that polls."""


def polling_source(share: float, further: float) -> Source | None:
    """Host times from a core that nobody shares to one that is always shared, most likely as predicted.

    `share`: assumed share of the time with a shared core; `further`: what a call then takes longer.
    """
    if not share:
        return None
    mode = 1.0 + share * further
    meaning = "assumed: how often the launching thread shares a core with polling ones, never to always"
    return Source(POLLING, "triangular", 1.0 / mode - 1.0, (1.0 + further) / mode - 1.0, meaning)


CLUSTER = "cluster."
"""Prefix of the ids of sources that are numbers of the cluster's description."""
TIMED = ("bytes_per_s", "flop_per_s", "hz", "s")
"""Dimensions of the numbers on which a step time may depend."""


def cluster_sources(cluster: Cluster) -> tuple[Source, ...]:
    """One source for each number of the cluster with a range, as the relative change of the number itself."""
    return tuple(
        source
        for path, number in sourced_numbers(cluster, CLUSTER.removesuffix("."))
        if number.dimension in TIMED and (source := ranged(path, number)) is not None
    )


def shifted_cluster(cluster: Cluster, id_: str, change: float) -> Cluster:
    """The cluster with one number of `cluster_sources` shifted by a relative change."""
    number = dict(sourced_numbers(cluster, CLUSTER.removesuffix(".")))[id_]
    moved: Cluster = with_value(cluster, id_.removeprefix(CLUSTER), number.value * (1.0 + change))
    return moved


def ranged(id_: str, number: Sourced) -> Source | None:
    """Triangular source of a number with a stated range, whose mode is the number; None without a range."""
    if number.range is None:
        return None
    low, high = (end / number.value - 1.0 for end in number.range)
    return Source(id_, "triangular", low, high, f"range of the source: {number.note or number.source}")


def session(profile: CalibrationProfile, used: Sequence[str]) -> tuple[Source, tuple[str, ...]]:
    """The source that all tensor-core-bound entries share, and the ids of those among the used entries."""
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
    """The profile with the times of one entry, or one of its `NUMBERS`, multiplied by 1 + `change` (> 0).

    Rates and shares are divided by this factor, times and slow-downs multiplied (a slow-down stays at least
    1). `n_sms`: SMs of the accelerator, for laws that are a formula of it. Raises InputError for an unknown
    id.
    """
    key = (Same(profile), id_, change, n_sms)
    return _SHIFTED.get(key, lambda: shifted_together(profile, {id_: (change,)}, n_sms))


_SHIFTED: BoundedCache[CalibrationProfile] = BoundedCache(512)
"""Shifted profiles, so that plans and scenarios with one profile share the prices at its shifted rates."""


def shifted_together(
    profile: CalibrationProfile, changes: Mapping[str, Sequence[float]], n_sms: int
) -> CalibrationProfile:
    """The profile with several entries shifted as by `shifted`, each by its changes one after the other."""
    known = {entry.id: entry for entry in profile.entries()}
    numbers: dict[str, Any] = {}
    moved: dict[str, Entry] = {}
    for id_, each in changes.items():
        own = getattr(profile, id_) if id_ in NUMBERS else known.get(id_) or profile.entry(id_)
        for change in each:
            own = _moved(own, 1.0 + change, n_sms)
        (numbers if id_ in NUMBERS else moved)[id_] = own
    tuples = {
        field: tuple([moved.get(entry.id, entry) for entry in getattr(profile, field)])
        for field in ("gemm_tables", "curves", "laws", "priors")
    }
    result = profile.model_copy(update=numbers | tuples)
    before, entries = profile._shifted_from or (profile, frozenset())
    result._shifted_from = before, entries | changes.keys()
    return result


def _moved(own: Entry | Sourced, factor: float, n_sms: int) -> Entry | Sourced:
    """An entry or a number with its times multiplied by a factor."""
    if isinstance(own, Sourced):
        return own.model_copy(update={"value": own.value * factor})
    changes: dict[str, Any]
    if isinstance(own, GemmTable):
        changes = {"points": tuple([_gemm_row(own, row, factor) for row in own.points])}
    elif isinstance(own, MeasuredCurve):
        scale = factor if _is_time(own) else 1.0 / factor
        changes = {"points": tuple([(p[0], p[1] * scale, *p[2:]) for p in own.points])}
    elif isinstance(own, Law):
        measured = own.points
        if own.form == "free_sms":
            measured = tuple((float(n), n_sms / (n_sms - n)) for n in range(n_sms))
        points = tuple((n, max(1.0, s * factor) if n else s) for n, s in measured)
        changes = {"form": "table", "points": points}
    else:
        assert isinstance(own, Prior)
        changes = {"fraction": min(1.0, own.fraction / factor)}
    new = own.model_copy(update=changes)
    new.__dict__.pop("curve", None)  # it was computed from the old points
    return new


def _gemm_row(table: GemmTable, row: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    scale = factor if table.unit == "us" else 1.0 / factor
    return (*row[:4], row[4] * scale, *row[5:])


def _is_time(curve: MeasuredCurve) -> bool:
    return curve.y_unit in ("us", "ms", "s", "ns") or curve.y_name.startswith(
        ("time", "latency", "slow-down")
    )


# -- response ----------------------------------------------------------------------------------------
# First-order response of the step time to prices, along the critical path of one execution (pure).

END_OF_STEP = ("gradient reduction", "gradient norm", "optimizer", "parameter gather")


class ResponsePart(Struct, frozen=True):
    """The price of a stretch of the critical path."""

    kind: BlockKind
    phase: Phase
    overlapped_share: float | None
    payload: bool


class PathWeights(Struct, frozen=True):
    """Seconds of a critical path by price; `rest_s` has no price that could change."""

    parts: Mapping[ResponsePart, float]
    send_s: float
    end_s: Mapping[tuple[int, str], float]
    """Seconds by (pipeline rank, part of the end of the step)."""
    rest_s: float


def path_weights(path: list[Segment]) -> PathWeights:
    """Sum the segments of a critical path by price."""
    parts: defaultdict[ResponsePart, int] = defaultdict(int)
    ends: defaultdict[tuple[int, str], int] = defaultdict(int)
    send = rest = 0
    for segment in path:
        length = segment.end_ns - segment.begin_ns
        task = segment.task
        if task is not None:
            parts[ResponsePart(task.kind, task.phase, task.overlapped_share, segment.payload)] += length
        elif segment.cause == "pipeline send":
            send += length
        elif segment.cause in END_OF_STEP:
            ends[segment.rank, segment.cause] += length
        else:
            rest += length
    return PathWeights(
        {part: ns / NS for part, ns in parts.items()},
        send / NS,
        {key: ns / NS for key, ns in ends.items()},
        rest / NS,
    )


def response_s(weights: PathWeights, before: CostTable, after: CostTable) -> float:
    """Seconds by which the step changes when prices go from `before` to `after` (docs/model.md, eq. U1).

    The path stays the same, and every stretch changes with its own price. This is exact for small changes; a
    large change may move the path, which makes the true change larger.
    """
    changes = [
        seconds * (_price(after, part) / old - 1.0)
        for part, seconds in weights.parts.items()
        if (old := _price(before, part)) > 0.0
    ]
    if before.send_s > 0.0:
        changes.append(weights.send_s * (after.send_s / before.send_s - 1.0))
    for (rank, cause), seconds in weights.end_s.items():
        field = {"gradient reduction": "reduce_s", "gradient norm": "norm_s", "optimizer": "optimizer_s"}
        name = field.get(cause, "gather_s")
        old = getattr(before.sync[rank], name)
        if old > 0.0:
            changes.append(seconds * (getattr(after.sync[rank], name) / old - 1.0))
    return fsum(changes)


def spread_response_s(path: Sequence[Segment], clock: FloatArray, before: float, after: float) -> float:
    """Seconds by which the step changes when the spread of GPU speed goes from one CV to another (eq. U5).

    `clock`: time factors 1 / (1 + cv z) [pipeline ranks, members]. The draws z and the members on the path
    stay the same.
    """
    if before <= 0.0:
        return 0.0
    changes = []
    for segment in path:
        if segment.task is not None and not segment.payload:
            speed = 1.0 / float(clock[segment.rank, segment.member % clock.shape[1]])
            other = max(1.0 + (speed - 1.0) * after / before, 0.1)
            changes.append((segment.end_ns - segment.begin_ns) / NS * (speed / other - 1.0))
    return fsum(changes)


def redrawn_response_s(path: Sequence[Segment], before: Program, after: Program) -> float:
    """Seconds by which the step changes when the same draws have another spread (docs/model.md, eq. U6).

    `after` is `before` with other run-to-run noise or expert load; the path and its members stay the same.
    """
    changes = []
    for segment in path:
        if segment.place is not None:
            old, new = (_duration_ns(program, segment) for program in (before, after))
            if old > 0.0:
                changes.append((segment.end_ns - segment.begin_ns) / NS * (new / old - 1.0))
    return fsum(changes)


def _duration_ns(program: Program, segment: Segment) -> float:
    """Time (ns) of a segment's task on its member, or of its slowest member's payload alone on its links."""
    assert segment.place is not None
    position, number = segment.place
    step = program.ranks[segment.rank][position]
    task = step.code.tasks[number]
    microbatch = step.microbatches[task.side]
    if segment.payload and task.transfer is not None:
        return task.transfer.payload_ns.item(microbatch)
    return float(task.rows_ns[microbatch][segment.member])


def _price(table: CostTable, part: ResponsePart) -> float:
    if part.payload:
        cost = table.transfer[
            part.kind, part.phase, "alone" if part.overlapped_share is None else "overlapped"
        ]
        return cost.payload_s
    return sum(table.phase_s(part.kind, part.phase, part.overlapped_share))


# -- step evidence -----------------------------------------------------------------------------------
# Calibration evidence of a step's prices, weighted by how often the step uses each (pure).


def step_evidence(program: Program) -> Evidence:
    """Evidence of all compute of a program, with its readings weighted by seconds of the step.

    All blocks, micro-batches and pipeline ranks and the ends of the step count, with their seconds at even
    load and without waits.
    """
    templates = {id(step.code): step.code for steps in program.ranks for step in steps}
    runs = Counter(id(step.code) for steps in program.ranks for step in steps)
    prices = {id(task.price): task.price for code in templates.values() for task in code.tasks}
    times: Counter[int] = Counter()
    for number, code in templates.items():
        for task in code.tasks:
            times[id(task.price)] += runs[number]
    return combined(
        [
            *((price.evidence, times[number]) for number, price in prices.items()),
            *((sync.evidence, 1) for sync in program.costs.sync),
        ]
    )
