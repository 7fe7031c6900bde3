"""What follows the last action: gradient reduction, global norm, optimizer, parameter gather (pure).

The parts do not share links with anything else, so no engine has to simulate them.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesim.simulator.engine.program import NS, Program
from moesim.simulator.engine.records import StepRecord, SyncRecord, free_ns


def end_of_step(
    programs: Sequence[Program], ranks: Sequence[Sequence[Sequence[StepRecord]]]
) -> tuple[list[SyncRecord], int]:
    """The end of the step on every pipeline rank, and the nanosecond at which the step ends (eq. E5).

    `ranks[group][r]`: the records of pipeline rank r of each program. A rank's reduction waits for every
    group of the ranks that hold the same parameters (the mirror rank of a bidirectional schedule); gradient
    clipping makes the norm a barrier of all ranks.
    """
    schedule, sync = programs[0].schedule, programs[0].costs.sync
    done = [max(free_ns(group[r]) for group in ranks) for r in range(schedule.pp)]
    ready = [max(done[holder] for holder in schedule.holders(r)) for r in range(schedule.pp)]
    slow = [max(program.link_map.sync_slowness(r) for program in programs) for r in range(schedule.pp)]
    reduced = [t + round(sync[r].reduce_s * slow[r] * NS) for r, t in enumerate(ready)]
    meet = max(reduced)
    result = []
    for r in range(schedule.pp):
        norm = meet + round(sync[r].norm_s * NS)
        updated = norm + round(sync[r].optimizer_s * NS)
        gathered = updated + round(sync[r].gather_s * slow[r] * NS)
        result.append(
            SyncRecord(done[r], (ready[r], reduced[r]), (meet, norm), (norm, updated), (updated, gathered))
        )
    return result, max((s.gather[1] for s in result), default=0)
