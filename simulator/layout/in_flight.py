"""Which blocks a pipeline rank holds, and which micro-batches at once, read off a schedule."""

from __future__ import annotations

from collections import Counter

from moesim.simulator.layout.memory import RankStages
from moesim.simulator.layout.stages import StageAssignment, unique
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.schedules.action import Step, actions_of
from moesim.simulator.schedules.schedule import Schedule

State = frozenset[tuple[int, int]]


def rank_stages(schedule: Schedule) -> list[RankStages]:
    """Stages of every pipeline rank and the moments at which its memory can be fullest.

    A chunk counts from the start of its forward to the end of its last backward part (B or W). Of the
    moments only those remain that no other moment exceeds in every stage: stages differ in size, so
    the one with the most chunks need not be the fullest.
    """
    return [
        RankStages(schedule.stages_on_rank(rank), tuple(dict(state) for state in _largest_states(steps)))
        for rank, steps in enumerate(schedule.ranks)
    ]


def _largest_states(steps: tuple[Step, ...]) -> list[list[tuple[int, int]]]:
    held: Counter[int] = Counter()
    states: set[State] = set()
    for step in steps:
        actions = actions_of(step)
        # An overlapped pair holds its forward's chunk before it has freed its backward's.
        held.update(action.stage for action in actions if action.kind == "F")
        states.add(frozenset((+held).items()))
        held.subtract(action.stage for action in actions if action.kind in ("B", "W"))
    return [sorted(s) for s in sorted(states, key=sorted) if not any(_covers(o, s) for o in states if o != s)]


def _covers(larger: State, smaller: State) -> bool:
    counts = dict(larger)
    return all(counts.get(stage, 0) >= count for stage, count in smaller)


def held_by_rank(schedule: Schedule, stages: StageAssignment) -> list[tuple[BlockKind, ...]]:
    """Kinds of the blocks that each pipeline rank holds, sorted; shared tables once."""
    return [
        tuple(sorted(b.kind for stage in schedule.stages_on_rank(rank) for b in unique(stages, stage)))
        for rank in range(schedule.pp)
    ]
