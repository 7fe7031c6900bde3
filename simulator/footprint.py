"""Memory of a plan: activations in flight come from the schedule itself (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moesim.hwmodels.cluster import Cluster
from moesim.simulator.layout.memory import MemoryReport, RankStages, memory_by_kind
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Schedule, actions_of


def in_flight_states(schedule: Schedule, rank: int) -> tuple[Mapping[int, int], ...]:
    """Largest sets of micro-batches in flight on a rank, by stage.

    A micro-batch is in flight from the start of its F until the end of its last backward part (W, or B).
    States that another one covers are left out; an overlapped pair holds both its micro-batches.
    """
    now: Counter[int] = Counter()
    peaks: list[Counter[int]] = []
    for step in schedule.ranks[rank]:
        actions = actions_of(step)
        entering = [a.stage for a in actions if a.kind == "F"]
        now.update(entering)
        if entering:
            state = +now
            if not any(all(other[s] >= n for s, n in state.items()) for other in peaks):
                peaks = [o for o in peaks if not all(state[s] >= n for s, n in o.items())]
                peaks.append(state)
        now.subtract(a.stage for a in actions if a.kind in ("B", "W"))
    return tuple(dict(sorted(p.items())) for p in peaks)


def memory_report(
    scenario: Scenario, shape: ModelShape, cluster: Cluster, layout: Layout, schedule: Schedule, stages: StageAssignment
) -> MemoryReport:
    """Bytes per GPU by kind, for every pipeline rank and the fullest."""
    ranks = [
        RankStages(schedule.stages_on_rank(rank), in_flight_states(schedule, rank)) for rank in range(schedule.pp)
    ]
    return memory_by_kind(
        shape,
        layout,
        scenario.recipe,
        stages,
        ranks,
        sequence=scenario.batch.sequence_length,
        recompute=scenario.recompute,
        communication_sms=scenario.communication.sms,
        capacity_bytes=cluster.accelerator.hbm_bytes,
    )
