"""Derives from a schedule which blocks each pipeline rank holds, and how many micro-batches at once."""

from __future__ import annotations

from typing import NamedTuple

from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.layout.memory import RankStages
from moesim.simulator.layout.stages import StageAssignment, blocks_with_parameters
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.schedules.action import Step, actions_of
from moesim.simulator.schedules.schedule import Schedule

State = frozenset[tuple[int, int]]
"""Micro-batches in flight at one moment, as (stage, count) pairs."""


def rank_stages(schedule: Schedule) -> list[RankStages]:
    """Return the stages of every pipeline rank and the moments at which its memory may peak.

    A chunk counts from the start of its forward to the end of its last backward part (B or W). A moment is
    dropped if another one has at least as many chunks of every stage. Several moments may remain because
    stages differ in size, so that the one with the most chunks need not take the most memory.
    """
    return list(_RANK_STAGES.get(Same(schedule), lambda: (schedule, _rank_stages(schedule)))[1])


def _rank_stages(schedule: Schedule) -> tuple[RankStages, ...]:
    return tuple(
        RankStages(
            schedule.stages_on_rank(rank),
            tuple(dict(state) for state in _largest_states(steps)),
        )
        for rank, steps in enumerate(schedule.ranks)
    )


_RANK_STAGES: BoundedCache[tuple[Schedule, tuple[RankStages, ...]]] = BoundedCache(
    100_000, lambda kept: sum(map(len, kept[0].ranks))
)
"""Stages of the schedules before, limited by the steps of those schedules."""


def _largest_states(steps: tuple[Step, ...]) -> list[list[tuple[int, int]]]:
    in_flight: dict[int, int] = {}
    states: set[State] = set()
    for step in steps:
        actions = actions_of(step)
        # An overlapped pair allocates the chunk of its forward before it frees that of its backward.
        started = [action.stage for action in actions if action.kind == "F"]
        if started:  # without a forward there are at most as many chunks as before
            for stage in started:
                in_flight[stage] = in_flight.get(stage, 0) + 1
            states.add(frozenset([item for item in in_flight.items() if item[1] > 0]))
        for action in actions:
            if action.kind in ("B", "W"):
                in_flight[action.stage] = in_flight.get(action.stage, 0) - 1
    largest: list[dict[int, int]] = []
    # A state that covers another one has more chunks, so every state is compared with larger ones alone.
    for state in sorted(states or {frozenset()}, key=lambda s: -sum(count for _, count in s)):
        if not any(_covers(larger, state) for larger in largest):
            largest.append(dict(state))
    return sorted(sorted(state.items()) for state in largest)


def _covers(larger: dict[int, int], smaller: State) -> bool:
    return all(larger.get(stage, 0) >= count for stage, count in smaller)


class RankChunks(NamedTuple):
    """Block kinds of each model chunk of a pipeline rank, and the rank where its place counts.

    Where only the blocks matter, `rank` is 0 and all blocks are one sorted chunk: ranks alike are equal.
    """

    chunks: tuple[tuple[BlockKind, ...], ...]
    rank: int = 0

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of all blocks of the rank, sorted."""
        return tuple(sorted(kind for chunk in self.chunks for kind in chunk))


def chunks_by_rank(schedule: Schedule, stages: StageAssignment, *, by_place: bool) -> list[RankChunks]:
    """Blocks on each pipeline rank; by chunk and rank, or only their kinds."""
    if not by_place:
        return [RankChunks((kinds,)) for kinds in block_kinds_by_rank(schedule, stages)]
    return [
        RankChunks(
            tuple(
                tuple(block.kind for block in blocks_with_parameters(stages, stage))
                for stage in schedule.stages_on_rank(rank)
            ),
            rank,
        )
        for rank in range(schedule.pp)
    ]


def block_kinds_by_rank(schedule: Schedule, stages: StageAssignment) -> list[tuple[BlockKind, ...]]:
    """Sorted kinds of the blocks on each pipeline rank; a head that runs twice counts once."""
    return [
        tuple(
            sorted(
                b.kind
                for stage in schedule.stages_on_rank(rank)
                for b in blocks_with_parameters(stages, stage)
            )
        )
        for rank in range(schedule.pp)
    ]
