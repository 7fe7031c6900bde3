"""Simulates failures, detection, repair, restart and rollback of many replicas of a run at once.

The simulation is discrete-event: one pass of the loop advances every replica to its own next event (an
interruption of the job, or the end of the phase) with NumPy vectors. The time between two events has a closed
form, so checkpoints need no events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray

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
