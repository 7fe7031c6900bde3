"""Pipeline schedules as plain data: actions in PyTorch's notation, and the steps of every rank in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, Same

# -- actions, and their text form in the notation of PyTorch's pipelining ------------------------------

Kind = Literal["F", "I", "W", "B"]
"""Kind of an action: forward (F), input gradient (I), weight gradient (W), or both gradients in one (B)."""

KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")

OVERLAP_SUFFIX = "OVERLAP_F_B"

# Six digits bound every index: a hostile file cannot ask for a stage number that fills the memory.
_ACTION = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")
_OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_COMMUNICATION = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_", "RECV_")
_FORMAT = (
    "write <stage><F|I|W|B><micro-batch>, such as 3F12 (F forward, I input gradient, W weight gradient, "
    "B both gradients), or an overlapped pair such as (0F7;7B3)OVERLAP_F_B"
)


class Action(Struct, frozen=True):
    """The forward or a gradient (`kind`) of one stage for one micro-batch, such as `3F12`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """Text form, such as `3F12`."""
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(Struct, frozen=True):
    """A forward and a backward action that run as one overlapped pair, such as `(0F7;7B3)OVERLAP_F_B`."""

    first: Action
    second: Action

    def __str__(self) -> str:
        """Text form, such as `(0F7;7B3)OVERLAP_F_B`."""
        return f"({self.first};{self.second}){OVERLAP_SUFFIX}"


Step: TypeAlias = Action | Overlap
"""One step of a rank, either a single action or an overlapped pair."""


def actions_of(step: Step) -> tuple[Action, ...]:
    """Actions of a step, in the order in which they are written."""
    return (step.first, step.second) if isinstance(step, Overlap) else (step,)


def parse_step(text: str, where: str = "schedule") -> Step:
    """Read one step, as the reverse of `str(step)`; blanks around it are ignored.

    Raises InputError, beginning with `where`, for text that is not a step.
    """
    cell = text.strip()
    pair = _OVERLAP.fullmatch(cell)
    if pair is None:
        return _parse_action(cell, cell, where)
    first = _parse_action(pair[1].strip(), cell, where)
    second = _parse_action(pair[2].strip(), cell, where)
    if first.kind != "F" or second.kind not in ("B", "I"):
        raise InputError(
            f"{where}: {_shown(cell)} is not an overlapped pair: the first part must be a forward (F) and "
            f"the second a backward (B or I); {_FORMAT}."
        )
    return Overlap(first, second)


def _parse_action(text: str, cell: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        reason = (
            " (communication and sharding belong to PyTorch's compute_comms format, this is compute_only)"
        )
        reason = reason if any(word in text for word in _COMMUNICATION) else ""
        raise InputError(f"{where}: cannot read {_shown(cell)} as a schedule step{reason}; {_FORMAT}.")
    kind: Kind = match[2]  # type: ignore[assignment]  # the pattern admits no other letter
    return Action(int(match[1]), kind, int(match[3]))


def _shown(text: str) -> str:
    """Quote input text so that control characters and very long cells stay one readable line."""
    return ascii(text if len(text) <= 60 else text[:57] + "...")


# -- the steps of every rank in order, and the ranks of every stage ------------------------------------

Awaited = Literal["schedule", "edges", "all"]
"""Sends that a rank waits for: as the code of the schedule does, also those of warm-up and flush, or all."""
Placement = Literal["loop", "v", "bidirectional", "custom"]


_PAIRED: BoundedCache[bool] = BoundedCache(64)


def _has_pairs(ranks: tuple[tuple[Step, ...], ...]) -> bool:
    return any(isinstance(step, Overlap) for steps in ranks for step in steps)


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
        return self.pairs or _PAIRED.get(Same(self.ranks), lambda: _has_pairs(self.ranks))

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
