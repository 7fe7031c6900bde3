"""The end of the step: gradient reduction, global norm, optimizer and parameter gather (pure).

These parts share links with nothing else, so no engine has to simulate them.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesim.simulator.cost import formulas
from moesim.simulator.cost.formulas import SyncParts
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.records import SyncRecord


def end_of_step(
    programs: Sequence[Program], free_ns: Sequence[Sequence[int]]
) -> tuple[list[SyncRecord], int]:
    """The end of the step on every pipeline rank, and the nanosecond at which the step ends (eq. E5).

    `free_ns[group][r]`: when pipeline rank r of each program was free after its last action. A rank's
    reduction waits for all groups of all ranks that hold the same parameters (in a bidirectional schedule
    also the mirror rank); gradient clipping makes the norm a barrier of all ranks.
    """
    schedule, sync = programs[0].schedule, programs[0].costs.sync
    done = [max(group[r] for group in free_ns) for r in range(schedule.pp)]
    slow = [max(program.link_map.sync_slowness(r) for program in programs) for r in range(schedule.pp)]
    parts = [
        SyncParts(
            round(cost.reduce_s * slower * NS),
            round(cost.norm_s * NS),
            round(cost.optimizer_s * NS),
            round(cost.gather_s * slower * NS),
        )
        for cost, slower in zip(sync, slow, strict=True)
    ]
    holders = [schedule.holders(r) for r in range(schedule.pp)]
    result = [
        SyncRecord(end, (t.ready, t.reduced), (t.meet, t.norm), (t.norm, t.updated), (t.updated, t.gathered))
        for end, t in zip(done, formulas.end_of_step(done, holders, parts, max), strict=True)
    ]
    return result, max((s.gather[1] for s in result), default=0)
