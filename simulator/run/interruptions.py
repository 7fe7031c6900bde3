"""Derives the interruptions of a run plan: rates, checkpoint costs and interval, and whether it can end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, format_quantity
from moesim.simulator.model.precision import Precision
from moesim.simulator.run.checkpoint import (
    checkpoint_bytes,
    daly_interval_s,
    expected_seconds,
    optimal_interval_s,
    young_interval_s,
)
from moesim.simulator.run.failures import FailureModel
from moesim.simulator.run.report import CheckpointReport
from moesim.simulator.scenario.run_plan import Checkpoint, RunPlan

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
        notes += _checkpoint_notes(plan.checkpoint)
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


def _checkpoint_notes(save: Checkpoint) -> list[str]:
    notes = []
    if save.size is None:
        notes.append(
            "a checkpoint holds master weights and both moments once; weights are cast anew from them"
        )
    if save.asynchronous and save.stall is None:
        notes.append(
            "asynchronous checkpoints: training waits for the copy to host memory at the nominal host link"
        )
    return notes
