"""A pipeline schedule as plain data: the steps of every rank in order, and the ranks of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.schedules.action import Overlap, Step, actions_of

Awaited = Literal["schedule", "edges", "all"]
"""Sends that a rank waits for: as the code of the schedule does, also those of warm-up and flush, or all."""
Placement = Literal["loop", "v", "bidirectional", "custom"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of every pipeline rank in execution order.

    `ranks[r]` are the steps of rank r. `routes[d][stage]` is the rank that runs `stage` for the
    micro-batches of direction d. There is one direction, or two for a bidirectional pipeline, whose
    stages are counted in their own direction: micro-batches 0..M/2-1 follow `routes[0]` and enter at
    rank 0, M/2..M-1 follow `routes[1]` and enter at the last rank. With `awaits_sends` a rank posts the
    outputs of an action when all of it has ended, and starts its next action after they have been sent;
    otherwise outputs leave as soon as they exist and the rank goes on (docs/model.md, eq. E7). With
    `awaits_edges` it does so only in its warm-up and its flush (`steady`). With `pairs` its runtime joins
    forwards and backwards, and runs a backward that has no partner on the streams of a pair. The flags are
    properties of the runtime and not of the order, so schedules that differ in them alone are equal.
    """

    name: str
    microbatches: int
    routes: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Step, ...], ...]
    awaits_sends: bool = field(default=False, compare=False)
    awaits_edges: bool = field(default=False, compare=False)
    pairs: bool = field(default=False, compare=False)

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def n_stages(self) -> int:
        """Number of stages that one micro-batch passes through."""
        return len(self.routes[0])

    @property
    def vpp(self) -> int:
        """Largest number of stages of one direction on a rank."""
        return max(self.routes[0].count(rank) for rank in range(self.pp))

    @property
    def placement(self) -> Placement:
        """Name of the pattern of the routes; `custom` is any other single route, as read from a file."""
        pp, n_stages = self.pp, self.n_stages
        if len(self.routes) == 2:
            return "bidirectional"
        if self.routes[0] == loop_route(pp, n_stages):
            return "loop"
        return "v" if self.routes[0] == v_route(pp) else "custom"

    @property
    def paired(self) -> bool:
        """Whether the schedule has overlapped pairs, or would have them with more micro-batches."""
        return self.pairs or any(isinstance(step, Overlap) for steps in self.ranks for step in steps)

    def awaits(self, rank: int) -> tuple[bool, ...]:
        """Whether the rank waits for its own sends after each of its steps."""
        steps = self.ranks[rank]
        if self.awaits_sends or not self.awaits_edges:
            return (self.awaits_sends,) * len(steps)
        steady = steady_steps(steps)
        return tuple(position not in steady for position in range(len(steps)))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Rank that runs the actions of (stage, micro-batch)."""
        return self.routes[microbatch * len(self.routes) // self.microbatches][stage]

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """Stages whose parameters a rank holds, ascending, over all directions."""
        stages = {stage for route in self.routes for stage, owner in enumerate(route) if owner == rank}
        return tuple(sorted(stages))

    def holders(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold a stage of `rank`: the rank itself and, in a bidirectional pipeline, its mirror."""
        stages = self.stages_on_rank(rank)
        return tuple(sorted({route[stage] for route in self.routes for stage in stages}))


def awaiting(schedule: Schedule, awaited: Awaited) -> Schedule:
    """Return the schedule on a runtime that waits for these sends."""
    every, edges = schedule.awaits_sends or awaited == "all", awaited == "edges"
    if (every, edges) == (schedule.awaits_sends, schedule.awaits_edges):
        return schedule
    key = (Same(schedule), every, edges)
    return _AWAITING.get(key, lambda: replace(schedule, awaits_sends=every, awaits_edges=edges))


_AWAITING: BoundedCache[Schedule] = BoundedCache(100_000, lambda kept: sum(map(len, kept.ranks)))


def steady_steps(steps: Sequence[Step]) -> range:
    """Positions of the steady state, in which a rank alternates between forwards and backwards.

    The forwards before it are the warm-up, the backwards after it the flush. It is empty if all forwards come
    first.
    """
    kinds = [{action.kind for action in actions_of(step)} for step in steps]
    forwards = [position for position, kind in enumerate(kinds) if "F" in kind]
    backwards = [position for position, kind in enumerate(kinds) if kind - {"F"}]
    if not forwards or not backwards or forwards[-1] < backwards[0]:
        return range(0)
    first = backwards[0] - ("F" not in kinds[backwards[0]])
    return range(first, forwards[-1] + (2 if kinds[forwards[-1]] == {"F"} else 1))


def loop_route(pp: int, n_stages: int) -> tuple[int, ...]:
    """Route with stage s on rank s % pp."""
    return tuple(stage % pp for stage in range(n_stages))


def v_route(pp: int) -> tuple[int, ...]:
    """Route down the ranks and back up, with stages r and 2 pp - 1 - r on rank r."""
    return (*range(pp), *reversed(range(pp)))


def bidirectional_routes(pp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Routes of two directions, with stage s on rank s in the first and on rank pp - 1 - s in the second."""
    return tuple(range(pp)), tuple(reversed(range(pp)))
