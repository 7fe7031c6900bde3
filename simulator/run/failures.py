"""Simulates failures, repair, restart and rollback, and the checkpoints that limit what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, format_quantity
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.run.report import CheckpointReport
from moesim.simulator.scenario.run_plan import Checkpoint, RunPlan

# -- failures ----------------------------------------------------------------------------------------
# Simulates failures, detection, repair, restart and rollback of many replicas of a run at once.
#
# The simulation is discrete-event: one pass of the loop advances every replica to its own next event (an
# interruption of the job, or the end of the phase) with NumPy vectors. The time between two events has a
# closed form, so checkpoints need no events.

RANDOM_STREAM = 7
"""Separates this stream of random numbers from the other streams of a scenario's seed."""


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Rate and costs of the interruptions of a run. Times are in s, the rate is in 1/s of the whole job.

    `shares`: probability of each cause. `takes_node`: whether a cause sends its node to repair. `spares`:
    number of standby nodes; None means that a replacement is always available. `lag_s`: time from the
    continuation of training until a checkpoint is durable (0 where training waits for the write).
    """

    rate_per_s: float
    interval_s: float
    stall_s: float
    lag_s: float = 0.0
    detection_s: float = 0.0
    restart_s: float = 0.0
    shares: tuple[float, ...] = (1.0,)
    takes_node: tuple[bool, ...] = (False,)
    spares: int | None = None
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Seconds of every phase and replica, [phases, replicas]; by cause [phases, causes, replicas].

    wall = work + checkpoints + lost + detection + waiting + restart, with the parts by cause summed. `lost`:
    training and checkpoints that were repeated. `waiting`: waits for a spare node.
    """

    wall: FloatArray
    work: FloatArray
    checkpoints: FloatArray
    waiting: FloatArray
    lost: FloatArray
    detection: FloatArray
    restart: FloatArray
    interruptions: IntArray


def simulate_failures(
    work_s: Sequence[float],
    model: FailureModel,
    replicas: int,
    seed: int,
    factors: FloatArray | None = None,
) -> RunOutcome:
    """Run the phases one after the other in every replica (eq. J4).

    `work_s`: training seconds of each phase without interruptions; `factors` multiplies them in each replica
    (uncertain step time). A phase ends with a durable checkpoint. The n-th interruption of replica i uses the
    same random numbers for every model (common random numbers). With rate 0 every replica takes the same
    time.
    """
    state = _State(model, replicas, seed, len(work_s))
    scale = np.ones(replicas) if factors is None else np.asarray(factors, dtype=np.float64)
    for phase, seconds in enumerate(work_s):
        state.run_phase(phase, seconds * scale)
    return state.outcome


class _State:
    """Clocks, spare nodes and pending restarts of all replicas."""

    def __init__(self, model: FailureModel, replicas: int, seed: int, phases: int) -> None:
        assert len(model.shares) == len(model.takes_node)
        self.model, self.replicas = model, replicas
        self.rng = np.random.default_rng([seed, RANDOM_STREAM])
        self.bounds = np.cumsum(np.array(model.shares))[:-1]
        self.takes_node = np.array(model.takes_node)
        self.now = np.zeros(replicas)
        slots = 0 if model.spares is None else model.spares + 1
        self.ready = np.zeros((replicas, slots))  # when each replacement node is available
        if slots:
            self.ready[:, -1] = np.inf  # slot of the node that breaks next
        by_phase, by_cause = (phases, replicas), (phases, len(model.shares), replicas)
        zeros = np.zeros
        self.outcome = RunOutcome(
            zeros(by_phase), zeros(by_phase), zeros(by_phase), zeros(by_phase),
            zeros(by_cause), zeros(by_cause), zeros(by_cause), zeros(by_cause, dtype=np.int64),
        )  # fmt: skip

    def run_phase(self, phase: int, work: FloatArray) -> None:
        m, out = self.model, self.outcome
        began = self.now.copy()
        count = np.maximum(np.ceil(work / m.interval_s), 1.0) if math.isfinite(m.interval_s) else work * 0 + 1
        last = np.where(count > 1, work - (count - 1) * (m.interval_s if count.max() > 1 else 0.0), work)
        stretch = m.interval_s + m.stall_s
        done = np.zeros(self.replicas)
        restart = np.zeros(self.replicas)  # rest of the restart before training continues
        why = np.zeros(self.replicas, dtype=np.int64)  # cause of the pending restart
        out.work[phase] = work
        out.checkpoints[phase] = count * m.stall_s + m.lag_s
        active = np.arange(self.replicas)
        while active.size:
            until, cause = self._next_interruption()
            until, cause, before = until[active], cause[active], restart[active]
            remaining = (count - done - 1)[active] * (stretch if count.max() > 1 else 0.0) + (
                last[active] + m.stall_s + m.lag_s
            )
            again = until < before  # interrupted while still restarting
            ends = ~again & (until - before >= remaining)
            spent = np.minimum(until, before)
            np.add.at(out.restart[phase], (why[active], active), spent)
            self.now[active[ends]] += (before + remaining)[ends]
            struck = ~ends
            self.now[active[struck]] += until[struck]
            hit = ~again & struck
            self._roll_back(phase, active[hit], (until - before)[hit], cause[hit], done, count)
            self._bring_back(phase, active[struck], cause[struck])
            restart[active[struck]] = m.restart_s
            why[active[struck]] = cause[struck]
            active = active[struck]
        out.wall[phase] = self.now - began

    def _next_interruption(self) -> tuple[FloatArray, IntArray]:
        """(seconds until the next interruption, its cause) of every replica.

        Finished replicas draw too, so that their streams of random numbers stay aligned.
        """
        draws = self.rng.standard_exponential(self.replicas)
        cause = np.searchsorted(self.bounds, self.rng.random(self.replicas), side="right")
        if self.model.rate_per_s <= 0.0:
            return np.full(self.replicas, np.inf), cause
        return draws / self.model.rate_per_s, cause

    def _roll_back(
        self,
        phase: int,
        who: IntArray,
        ran: FloatArray,
        cause: IntArray,
        done: FloatArray,
        count: FloatArray,
    ) -> None:
        """Return replicas to their last durable checkpoint, and count the time since then as lost."""
        m = self.model
        stretch = m.interval_s + m.stall_s
        finished = np.minimum(np.floor(ran / stretch), count[who] - 1 - done[who])
        into = ran - np.where(finished > 0, finished * stretch, 0.0)
        fresh = (finished > 0) & (into < m.lag_s)  # the newest checkpoint was still being written
        durable = finished - fresh
        kept = np.where(durable > 0, durable * stretch, 0.0)
        np.add.at(self.outcome.lost[phase], (cause, who), ran - kept)
        done[who] += durable

    def _bring_back(self, phase: int, who: IntArray, cause: IntArray) -> None:
        """Add detection, and the wait for a replacement node where the cause took a node."""
        m, out = self.model, self.outcome
        np.add.at(out.interruptions[phase], (cause, who), 1)
        np.add.at(out.detection[phase], (cause, who), m.detection_s)
        self.now[who] += m.detection_s
        if m.spares is None:
            return
        broken = who[self.takes_node[cause]]
        self.ready[broken, -1] = self.now[broken] + m.repair_s
        first = np.argmin(self.ready[broken], axis=1)
        wait = np.maximum(self.ready[broken, first] - self.now[broken], 0.0)
        self.ready[broken, first] = self.ready[broken, -1]
        self.ready[broken, -1] = np.inf
        out.waiting[phase, broken] += wait
        self.now[broken] += wait


# -- checkpoint --------------------------------------------------------------------------------------
# Closed forms of checkpoints: bytes, stall, expected time under failures and best interval (pure).


def checkpoint_bytes(parameters: int, recipe: Precision) -> float:
    """Bytes of a checkpoint, which holds master weights and both Adam moments of every parameter (eq. J2)."""
    each = BYTES_PER_ELEMENT[recipe.master_weights] + 2.0 * BYTES_PER_ELEMENT[recipe.moments]
    return parameters * each


def young_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Young's first-order optimum of the training time between checkpoints in s (Young 1974; eq. J6)."""
    return math.sqrt(2.0 * stall_s * mean_time_between_s)


def daly_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Daly's higher-order optimum of the time between checkpoints in s (Daly 2006, eq. 37; eq. J6)."""
    if stall_s >= 2.0 * mean_time_between_s:
        return mean_time_between_s
    ratio = stall_s / (2.0 * mean_time_between_s)
    root = math.sqrt(2.0 * stall_s * mean_time_between_s)
    return root * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall_s


def optimal_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """The interval that minimises the exact expectation of eq. J5: (1 - t/M) e^((t+d)/M) = 1.

    It is found by bisection on (0, M), where the left side decreases. Detection and restart scale the cost of
    every interval by the same factor, and the lag of an asynchronous write adds nearly the same to each, so
    they do not change the optimum.
    """
    if math.isinf(mean_time_between_s):
        return math.inf
    low, high = 0.0, 1.0
    ratio = stall_s / mean_time_between_s
    for _ in range(50):  # to 1e-15 of M
        middle = 0.5 * (low + high)
        if math.log1p(-middle) + middle + ratio > 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high) * mean_time_between_s


def segments(work_s: float, interval_s: float) -> tuple[int, float]:
    """(number of stretches of training between checkpoints, length of the last one in s)."""
    count = max(1, math.ceil(work_s / interval_s)) if math.isfinite(interval_s) else 1
    return count, work_s - (count - 1) * interval_s if count > 1 else work_s


def expected_seconds(
    work_s: float,
    interval_s: float,
    stall_s: float,
    mean_time_between_s: float,
    detection_s: float,
    restart_s: float,
) -> float:
    """Expected wall time of `work_s` s of training under exponential failures (Daly 2006, exact; eq. J5).

    Every stretch ends with a checkpoint for which training waits. Failures strike during training,
    checkpoints and restarts. The result is inf where a stretch practically never succeeds.
    """
    count, last_s = segments(work_s, interval_s)
    if math.isinf(mean_time_between_s):
        return work_s + count * stall_s
    rate = 1.0 / mean_time_between_s

    def attempt(length_s: float) -> float:
        return math.expm1(rate * (length_s + stall_s))

    try:
        again = math.exp(rate * restart_s) * (mean_time_between_s + detection_s)
        return ((count - 1) * attempt(interval_s) + attempt(last_s)) * again
    except OverflowError:
        return math.inf


# -- interruptions -----------------------------------------------------------------------------------
# Derives the interruptions of a run plan: rates, checkpoint costs and interval, and whether it can end.

MOST_SLOWDOWN = 20.0
"""Largest ratio of expected time to training time at which a run still finishes in practice."""

MOST_INTERRUPTIONS = 50_000
"""Largest number of expected interruptions at which simulating a run is still useful."""


@dataclass(frozen=True, slots=True)
class Interruptions:
    """All interruptions of training: the failure model, names of causes, and checkpoint figures."""

    model: FailureModel
    causes: tuple[str, ...]
    checkpoint: CheckpointReport | None
    notes: tuple[str, ...]

    @property
    def certain(self) -> bool:
        """Whether the run has no random interruptions."""
        return self.model.rate_per_s <= 0.0

    def expected_seconds(self, work_s: Sequence[float]) -> float:
        """Wall seconds by the closed form (eq. J5), with spares always available.

        An asynchronous write counts as its stall only.
        """
        m = self.model
        between = math.inf if self.certain else 1.0 / m.rate_per_s
        return math.fsum(
            expected_seconds(w, m.interval_s, m.stall_s, between, m.detection_s, m.restart_s) for w in work_s
        )

    def check_feasible(self, work_s: Sequence[float]) -> None:
        """Raise InfeasibleError with the reason where the run practically never ends."""
        if self.certain:
            return
        m, work = self.model, math.fsum(work_s)
        expected = self.expected_seconds(work_s)
        between = 1.0 / m.rate_per_s
        if expected <= MOST_SLOWDOWN * work and expected * m.rate_per_s <= MOST_INTERRUPTIONS:
            return
        length = m.interval_s + m.stall_s
        tries = math.exp(min(length / between, 700.0))
        raise InfeasibleError(
            f"the run never finishes in practice: one interruption every {_time(between)} on the whole job, "
            f"while training to the next checkpoint takes {_time(length)} ({tries:.3g} attempts on average) "
            f"and coming back {_time(m.detection_s + m.restart_s)}; expected {expected / work:.3g} times the "
            "training time. A shorter run.checkpoint.interval, faster run.restart, fewer nodes or fewer "
            "failures are needed"
        )

    def check_waiting(self, work_s: float, waiting_s: float) -> None:
        """Raise InfeasibleError where the run mostly waits for repaired nodes; arguments are mean seconds."""
        if work_s + waiting_s > MOST_SLOWDOWN * work_s:
            raise InfeasibleError(
                f"the run never finishes in practice: it trains for {_time(work_s)} and waits for a spare "
                f"node for {_time(waiting_s)}, with {self.model.spares} spares, one interruption every "
                f"{_time(1.0 / self.model.rate_per_s)} and {_time(self.model.repair_s)} of repair. More "
                "run.spares or a shorter repair are needed"
            )


def _time(seconds: float) -> str:
    for unit, size in (("days", SECONDS_PER_DAY), ("h", SECONDS_PER_HOUR), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return format_quantity(seconds, "s")


def interruptions(plan: RunPlan, cluster: Cluster, parameters: int, recipe: Precision) -> Interruptions:
    """The interruptions of a plan on a cluster (eqs. J2 to J4).

    `parameters`: number of trained parameters, which sets the size of a checkpoint. Raises InputError where
    an asynchronous write takes longer than the interval.
    """
    rate = plan.failures
    between = rate.mean_time_between_s(cluster.nodes) if rate else math.inf
    notes: list[str] = []
    saved = None
    if plan.checkpoint is not None:
        saved = _saved(plan.checkpoint, cluster, parameters, recipe, between)
        if plan.checkpoint.size is None:
            notes.append(
                "a checkpoint holds master weights and both moments once; weights are cast anew from them"
            )
        if plan.checkpoint.asynchronous and plan.checkpoint.stall is None:
            notes.append(
                "asynchronous checkpoints: training waits for the copy to host memory at the nominal host "
                "link"
            )
    if rate is not None and rate.causes is None and plan.spares is not None:
        notes.append(
            f"failure rate {rate.name!r} states no causes: every interruption is taken to break a node"
        )
    if plan.interrupted and plan.spares is None:
        notes.append("run.spares is not set: a replacement node is always at hand, unpaid until it is needed")
    counts = rate.counts if rate and plan.interrupted else ()
    total = sum(c.count for c in counts)
    asynchronous = plan.checkpoint is not None and plan.checkpoint.asynchronous
    model = FailureModel(
        rate_per_s=0.0 if math.isinf(between) else 1.0 / between,
        interval_s=saved.interval_s if saved else math.inf,
        stall_s=saved.stall_s if saved else 0.0,
        lag_s=saved.write_s if saved and asynchronous else 0.0,
        detection_s=plan.restart.detection.value if plan.restart else 0.0,
        restart_s=plan.restart.recovery.value if plan.restart else 0.0,
        shares=tuple(c.count / total for c in counts) or (1.0,),
        takes_node=tuple(c.node for c in counts) or (False,),
        spares=plan.spares.count if plan.spares else None,
        repair_s=plan.spares.repair.value if plan.spares else 0.0,
    )
    return Interruptions(model, tuple(c.cause for c in counts), saved, tuple(notes))


def stall_and_write_s(save: Checkpoint, cluster: Cluster, size_bytes: float) -> tuple[float, float]:
    """(seconds that training waits for a checkpoint, seconds of its write) (eq. J3).

    Both are the write of a synchronous checkpoint. With an asynchronous one training waits for the copy to
    host memory, in which every GPU copies its share over its own host link; the write overlaps with training.
    """
    write = size_bytes / save.storage.write_bytes_per_s(cluster.nodes)
    if save.stall is not None:
        return save.stall.value, max(write, save.stall.value)
    if not save.asynchronous:
        return write, write
    host = cluster.accelerator.host_bandwidth
    if host is None:
        raise InputError(
            f"run.checkpoint.asynchronous: accelerator {cluster.accelerator.name!r} has no figure "
            "host_bandwidth; state run.checkpoint.stall, or set asynchronous: false"
        )
    return size_bytes / cluster.n_gpus / host.value, write


def _saved(
    save: Checkpoint, cluster: Cluster, parameters: int, recipe: Precision, between_s: float
) -> CheckpointReport:
    size = save.size.value if save.size is not None else checkpoint_bytes(parameters, recipe)
    stall, write = stall_and_write_s(save, cluster, size)
    least = write if save.asynchronous else 0.0
    random = math.isfinite(between_s)
    optimal = max(optimal_interval_s(stall, between_s), least) if random else None
    interval = save.interval_s
    if interval is None:
        if optimal is None or optimal <= 0.0:
            raise InputError(
                "run.checkpoint.interval: optimal has no answer where nothing fails or a checkpoint costs "
                "nothing; state a time, for example 30 min"
            )
        interval = optimal
    if interval < least:
        raise InputError(
            f"run.checkpoint.interval={save.interval}: one asynchronous write of "
            f"{format_quantity(size, 'bytes')} to {save.storage.name} takes {_time(write)}; use a longer "
            "interval or faster storage"
        )
    return CheckpointReport(
        bytes=size,
        interval_s=interval,
        stall_s=stall,
        write_s=write,
        mean_time_between_interruptions_s=between_s if random else None,
        young_s=young_interval_s(stall, between_s) if random else None,
        daly_s=daly_interval_s(stall, between_s) if random else None,
        optimal_s=optimal,
    )
