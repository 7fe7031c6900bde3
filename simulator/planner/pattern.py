"""A schedule as arithmetic: its order for few micro-batches, and how it grows with more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.memory import RankStages
from moesim.simulator.schedules import (
    Overlap,
    Schedule,
    Step,
    build,
    needs_of,
    provides_of,
    spec_of,
    validate,
)
from moesim.simulator.schedules.action import actions_of
from moesim.simulator.schedules.template import ActionKind
from moesim.simulator.schedules.timeline import Needs, unit_times

FILLS = (2, 3)
"""Pipeline fills that the two sample schedules of a pattern hold at least: warm-up and drain are over."""

Key: TypeAlias = tuple[ActionKind, int, int]
"""(kind, stage of the forward side or -1, stage of the backward side or -1)."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a step hands on: which of its ends, and how many of its outputs cross to another rank with it.

    0: the next stage is on the same rank. Only outputs that leave at the same moment count.
    """

    forward: bool
    crossing: int


@dataclass(frozen=True, slots=True)
class Op:
    """One step in an order that respects every dependency: rows of a table of times."""

    rank: int
    key: Key
    before: int
    """Row of the end of the rank's previous step; -1 for its first."""
    waits: tuple[int, ...]
    """Rows of the arrivals that it needs."""
    end: int
    outputs: tuple[tuple[int, Output], ...]
    awaited: int
    """How many of its own sends the rank waits for at its end."""


@dataclass(frozen=True, slots=True)
class Order:
    """One sample schedule compiled for replay."""

    microbatches: int
    ops: tuple[Op, ...]
    rows: int
    last: tuple[int, ...]
    """Row of the end of each rank's last step."""
    awaits_sends: bool


@dataclass(frozen=True, slots=True)
class Ends:
    """First and last work of a rank: stage of its first forward and of its last input gradient, and the
    stages of the weight gradients that follow."""

    first_stage: int
    last_stage: int
    trailing_weights: tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """A schedule for one or two numbers of micro-batches; figures for more continue in a straight line.

    In its steady state every schedule here adds the same steps for each further micro-batch (or round, or
    pair of them), so counts are exact and times are those of an eventually periodic max-plus system.
    """

    name: str
    samples: tuple[Schedule, ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.samples[0].pp

    @property
    def n_stages(self) -> int:
        """Stages that one micro-batch passes."""
        return self.samples[0].n_stages

    @property
    def copies(self) -> int:
        """Pipeline ranks that hold the same parameters."""
        return len(self.samples[0].routes)

    @cached_property
    def paired(self) -> bool:
        """Whether it has overlapped pairs."""
        return self.samples[-1].paired

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """The samples compiled."""
        return tuple(_compile(schedule) for schedule in self.samples)

    @cached_property
    def counts(self) -> tuple[tuple[Mapping[Key, int], ...], ...]:
        """How often each rank runs each kind of step, for each sample."""
        return tuple(tuple(Counter(map(key_of, steps)) for steps in s.ranks) for s in self.samples)

    @cached_property
    def split(self) -> bool:
        """Whether input and weight gradients run apart somewhere."""
        return any(key[0] == "I" for rank in self.counts[-1] for key in rank)

    @cached_property
    def ends(self) -> tuple[Ends, ...]:
        """Where each rank begins and ends."""
        return tuple(_ends(steps) for steps in self.samples[-1].ranks)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the ranks that hold the same stages."""
        return tuple(self.samples[0].holders(rank) for rank in range(self.pp))

    @cached_property
    def in_flight(self) -> tuple[tuple[RankStages, ...], ...]:
        """Fullest moments of every rank, for each sample."""
        return tuple(tuple(rank_stages(schedule)) for schedule in self.samples)

    def along(
        self, first: FloatArray | float, last: FloatArray | float, microbatches: FloatArray
    ) -> FloatArray:
        """A figure known for the samples, continued to other numbers of micro-batches."""
        if len(self.samples) == 1:
            return np.broadcast_to(np.asarray(first, dtype=np.float64), np.shape(microbatches))
        m1, m2 = self.samples[0].microbatches, self.samples[1].microbatches
        slope = (np.asarray(last) - np.asarray(first)) / (m2 - m1)
        return np.asarray(first + slope * (microbatches - m1))


@lru_cache(maxsize=4096)
def pattern(name: str, pp: int, microbatches: int, vpp: int) -> Pattern:
    """The pattern of a schedule: itself where it is short, else two shorter ones of the same kind.

    A schedule that does not say when its steady state repeats itself (`ScheduleSpec.microbatch_step`) is
    validated and taken whole. Raises InputError where its builder refuses the sizes or what it builds cannot
    run.
    """
    step = spec_of(name).microbatch_step
    if step is None:
        whole = _pattern(name, pp, vpp, (microbatches,))
        validate(whole.samples[0])
        return whole
    grain = step(pp, microbatches)
    sizes = [_reduced(microbatches, grain, fills * pp) for fills in FILLS]
    if microbatches <= sizes[1] or sizes[0] == sizes[1]:
        return _pattern(name, pp, vpp, (microbatches,))
    return _pattern(name, pp, vpp, tuple(sizes))


def _reduced(microbatches: int, grain: int, least: int) -> int:
    """The smallest number of at least `least` that is whole grains below `microbatches`."""
    return microbatches - max(0, microbatches - least) // grain * grain


@lru_cache(maxsize=4096)
def _pattern(name: str, pp: int, vpp: int, sizes: tuple[int, ...]) -> Pattern:
    return Pattern(name, tuple(build(name, pp, size, vpp) for size in sizes))


def key_of(step: Step) -> Key:
    """Kind and stages of a step."""
    if isinstance(step, Overlap):
        return "F&B" if step.second.kind == "B" else "F&I", step.first.stage, step.second.stage
    return (step.kind, step.stage, -1) if step.kind == "F" else (step.kind, -1, step.stage)


def _ends(steps: Sequence[Step]) -> Ends:
    keys = [key_of(step) for step in steps]
    last = max(n for n, key in enumerate(keys) if key[0] not in ("F", "W"))
    return Ends(keys[0][1], keys[last][2], tuple(key[2] for key in keys[last + 1 :]))


def _compile(schedule: Schedule) -> Order:
    """Rows for every end and every arrival, and the steps in order of their unit times."""
    times = unit_times(schedule)
    order = sorted((times[r][n][1], r, n) for r in range(schedule.pp) for n in range(len(schedule.ranks[r])))
    arrivals: dict[Needs, int] = {}
    rows, ops = 0, []
    before = [-1] * schedule.pp
    for _, rank, position in order:
        step = schedule.ranks[rank][position]
        actions = actions_of(step)
        # What this rank made itself has ended before, so only what other steps hand on is waited for.
        waits = tuple(
            arrivals[need]
            for action in actions
            for need in needs_of(action, schedule.n_stages)
            if need[1] != action.stage
        )
        end, rows = rows, rows + 1
        given = []
        for action in actions:
            target = action.stage + (1 if action.kind == "F" else -1)
            needed = next((n for n in provides_of(action) if n[0] in ("F", "backward")), None)
            if needed is not None and 0 <= target < schedule.n_stages:
                arrivals[needed] = rows
                given.append((rows, action.kind == "F", schedule.rank_of(target, action.microbatch) != rank))
                rows += 1
        late = schedule.awaits_sends
        together = sum(crosses for _, _, crosses in given) if late else 1
        outputs = tuple((row, Output(forward, crosses * together)) for row, forward, crosses in given)
        ops.append(Op(rank, key_of(step), before[rank], waits, end, outputs, together if late else 0))
        before[rank] = end
    return Order(schedule.microbatches, tuple(ops), rows, tuple(before), schedule.awaits_sends)
