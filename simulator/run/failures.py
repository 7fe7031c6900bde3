"""Failures, detection, repair, restart and rollback: a discrete-event simulation of many runs at once.

Every replica of the run is at its own next event (the job is interrupted, or the phase ends); one pass of
the loop advances all of them with NumPy vectors. The stretches between two events have a closed form, so
checkpoints cost no events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray

TAG = 7
"""Keeps this stream of random numbers apart from the others that a scenario's seed feeds."""


@dataclass(frozen=True, slots=True)
class FailureModel:
    """What interrupts a run and what that costs. Times in s, rate in 1/s of the whole job.

    `shares`: probability of each cause; `takes_node`: whether it sends its node to repair. `spares`: nodes
    that stand by, None = a replacement is always there. `lag_s`: how long after training goes on a
    checkpoint becomes durable (0 where training waits for the write).
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

    wall = work + checkpoints + lost + detection + waiting + restart, summed over causes where there are any.
    `lost`: training and checkpoints that were done again; `waiting`: for a spare node.
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

    `work_s`: training seconds of each phase without any interruption; `factors` multiplies them for each
    replica (an uncertain step time). A phase ends with a durable checkpoint. The n-th interruption of
    replica i uses the same random numbers whatever the model (common random numbers). A model of rate 0
    gives every replica the same time.
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
        self.rng = np.random.default_rng([seed, TAG])
        self.bounds = np.cumsum(np.array(model.shares))[:-1]
        self.takes_node = np.array(model.takes_node)
        self.now = np.zeros(replicas)
        slots = 0 if model.spares is None else model.spares + 1
        self.ready = np.zeros((replicas, slots))  # when each node that may replace another is there
        if slots:
            self.ready[:, -1] = np.inf  # place for the node that breaks next
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
        restart = np.zeros(self.replicas)  # still to do before training goes on
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
        """Time until the next one and its cause, for every replica, finished or not: streams stay aligned."""
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
        """Back to the last durable checkpoint; what ran since then is lost."""
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
        """Detection, and a node to go on with where the cause took one."""
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
