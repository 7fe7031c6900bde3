"""Replays a schedule for arrays of plans: the longest path through its steps, level by level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.memory.gpu import RankStages, rank_stages
from moesim.simulator.schedules import (
    Awaited,
    Overlap,
    Schedule,
    Step,
    awaiting,
    build,
    needs_of,
    provides_of,
    spec_of,
    validate,
)
from moesim.simulator.schedules.action import actions_of
from moesim.simulator.schedules.template import ActionKind
from moesim.simulator.schedules.timeline import Needs, unit_times

Key: TypeAlias = tuple[ActionKind, int, int]
"""(kind, stage of the forward side or -1, stage of the backward side or -1)."""

OUTPUTS = 3
"""Times after which a result of an action may leave: its whole, its forward output, its backward output."""


class ActionTimes(Struct, frozen=True):
    """Seconds of one action for every plan: the whole action, and the time until each output leaves."""

    whole: FloatArray
    forward_out: FloatArray
    backward_out: FloatArray


class ReplayLevel(Struct, frozen=True):
    """Schedule steps of which none depends on another, and that depend on steps of earlier levels only.

    All arrays have an entry for each step, those of outputs one for each output. Numbers of rows are rows of
    the table of times; a step without a predecessor names row 0, which is 0 s.
    """

    ranks: IntArray
    keys: IntArray
    """Position of each step's key in the keys of the order."""
    before: IntArray
    """Row of the end of the rank's previous step."""
    waits: tuple[tuple[IntArray, IntArray], ...]
    """Arrivals that steps wait for, as (positions of the steps, rows); of each step at most one in a pair."""
    ends: slice
    awaited: IntArray | None
    """Number of its own sends that the rank waits for at the end of each step; None where no rank does."""
    sources: IntArray
    """Position of the step of each output."""
    kinds: IntArray
    """What each output waits for: 0 the whole action, 1 its forward output, 2 its backward output."""
    crossing: IntArray
    """Outputs that leave to another rank at the same moment as each output; 0 if it stays on this rank."""
    outputs: slice


class Order(Struct, frozen=True):
    """One sample schedule compiled for replay."""

    keys: tuple[Key, ...]
    """The different steps of the schedule."""
    ranks: tuple[IntArray, ...]
    """For each key, the ranks that run it."""
    levels: tuple[ReplayLevel, ...]
    rows: int
    """Rows of the table of times: one for 0 s, and one for every end and every output of a step."""
    last: IntArray
    """Row of the end of each rank's last step."""


def key_of(step: Step) -> Key:
    """Kind and stages of a step."""
    if isinstance(step, Overlap):
        return "F&B" if step.second.kind == "B" else "F&I", step.first.stage, step.second.stage
    return (step.kind, step.stage, -1) if step.kind == "F" else (step.kind, -1, step.stage)


class _ReplayStep(Struct):
    """A step on its way into a level; rows of outputs are numbered once all levels are known."""

    rank: int
    key: Key
    before: int
    needs: tuple[tuple[int, int], ...]
    """(node, output of that node) of each arrival that the step waits for."""
    outputs: tuple[tuple[bool, int], ...]
    """(whether it is a forward output, outputs that cross with it)."""
    awaited: int
    level: int


def compile_order(schedule: Schedule) -> Order:
    """Sort the steps of a schedule into levels, and give every end and every output a row."""
    nodes = _nodes(schedule)
    levels: list[list[int]] = [[] for _ in range(max(node.level for node in nodes) + 1)]
    for number, node in enumerate(nodes):
        levels[node.level].append(number)
    keys = {key: place for place, key in enumerate(dict.fromkeys(node.key for node in nodes))}
    ends, outputs, rows = [0] * len(nodes), [0] * len(nodes), 1
    compiled = []
    for members in levels:
        first = rows
        for number in members:
            ends[number], rows = rows, rows + 1
        middle = rows
        for number in members:
            outputs[number], rows = rows, rows + len(nodes[number].outputs)
        spans = slice(first, middle), slice(middle, rows)
        compiled.append(_level([nodes[n] for n in members], keys, ends, outputs, spans, schedule))
    last = [0] * schedule.pp
    for number, node in enumerate(nodes):
        last[node.rank] = ends[number]
    ranks: list[set[int]] = [set() for _ in keys]
    for node in nodes:
        ranks[keys[node.key]].add(node.rank)
    run_by = tuple(np.array(sorted(own)) for own in ranks)
    return Order(tuple(keys), run_by, tuple(compiled), rows, np.array(last))


def _nodes(schedule: Schedule) -> list[_ReplayStep]:
    """The steps of a schedule, every one after those that it depends on."""
    times = unit_times(schedule)
    order = sorted((times[r][n][1], r, n) for r in range(schedule.pp) for n in range(len(schedule.ranks[r])))
    arrivals: dict[Needs, tuple[int, int]] = {}
    nodes: list[_ReplayStep] = []
    before = [-1] * schedule.pp
    awaits = [schedule.awaits(rank) for rank in range(schedule.pp)]
    for _, rank, position in order:
        step = schedule.ranks[rank][position]
        actions = actions_of(step)
        # A rank's own results are ready before, so a step waits only for the outputs of other stages.
        waits = tuple(
            arrivals[need]
            for action in actions
            for need in needs_of(action, schedule.n_stages)
            if need[1] != action.stage
        )
        given: list[tuple[bool, bool]] = []
        for action in actions:
            target = action.stage + (1 if action.kind == "F" else -1)
            needed = next((n for n in provides_of(action) if n[0] in ("F", "backward")), None)
            if needed is not None and 0 <= target < schedule.n_stages:
                arrivals[needed] = len(nodes), len(given)
                crosses = schedule.rank_of(target, action.microbatch) != rank
                given.append((action.kind == "F", crosses))
        late = awaits[rank][position]
        together = sum(crosses for _, crosses in given) if late else 1
        outputs = tuple((forward, crosses * together) for forward, crosses in given)
        after = [nodes[n].level for n in (before[rank], *(source for source, _ in waits)) if n >= 0]
        level = 1 + max(after, default=-1)
        nodes.append(
            _ReplayStep(rank, key_of(step), before[rank], waits, outputs, together if late else 0, level)
        )
        before[rank] = len(nodes) - 1
    return nodes


def _level(
    members: Sequence[_ReplayStep],
    keys: dict[Key, int],
    ends: Sequence[int],
    outputs: Sequence[int],
    spans: tuple[slice, slice],
    schedule: Schedule,
) -> ReplayLevel:
    waits = []
    for turn in range(max(len(node.needs) for node in members)):
        pairs = [(n, node.needs[turn]) for n, node in enumerate(members) if len(node.needs) > turn]
        rows = [outputs[source] + output for _, (source, output) in pairs]
        waits.append((np.array([n for n, _ in pairs]), np.array(rows)))
    given = [(n, *output) for n, node in enumerate(members) for output in node.outputs]
    late = schedule.awaits_sends
    return ReplayLevel(
        ranks=np.array([node.rank for node in members]),
        keys=np.array([keys[node.key] for node in members]),
        before=np.array([ends[node.before] if node.before >= 0 else 0 for node in members]),
        waits=tuple(waits),
        ends=spans[0],
        awaited=np.array([node.awaited for node in members]) if any(n.awaited for n in members) else None,
        sources=np.array([n for n, _, _ in given], dtype=np.int64),
        kinds=np.array([0 if late else 1 if forward else 2 for _, forward, _ in given], dtype=np.int64),
        crossing=np.array([crossing for _, _, crossing in given], dtype=np.int64),
        outputs=spans[1],
    )


def replay(
    order: Order, times: Callable[[int, Key], ActionTimes], owners: IntArray, send: FloatArray
) -> FloatArray:
    """Seconds at which every rank ends its last schedule step [ranks, plans], along the longest path.

    `times(pool, key)`: times of an action at the prices of a pool. `owners[r]`: the pool of pipeline rank r.
    `send`: seconds of one send and of two together [2, plans].
    """
    width = send.shape[1]
    pools = sorted(set(owners.tolist()))
    needed = np.zeros((len(pools), len(order.keys)), dtype=bool)
    for place, ranks in enumerate(order.ranks):
        needed[owners[ranks], place] = True
    table = np.zeros((len(pools), len(order.keys), OUTPUTS, width))
    for pool, place in zip(*np.nonzero(needed), strict=True):
        action = times(int(pool), order.keys[place])
        table[pool, place] = action.whole, action.forward_out, action.backward_out
    actions = table.reshape(-1, width)
    sends = np.concatenate([np.zeros((1, width)), send])
    rows = np.zeros((order.rows, width))
    for level in order.levels:
        prices = (owners[level.ranks] * len(order.keys) + level.keys) * OUTPUTS
        start = rows[level.before]
        for steps, arrivals in level.waits:
            if len(steps) == len(start):
                np.maximum(start, rows[arrivals], out=start)
            else:
                start[steps] = np.maximum(start[steps], rows[arrivals])
        end = rows[level.ends]
        np.add(start, actions[prices], out=end)
        if level.awaited is not None:
            end += sends[level.awaited]
        if len(level.sources):
            out = rows[level.outputs]
            np.add(start[level.sources], actions[prices[level.sources] + level.kinds], out=out)
            out += sends[level.crossing]
    return rows[order.last]


# -- pattern -----------------------------------------------------------------------------------------
# Schedule patterns: a schedule compiled for few micro-batches, and extrapolated to more.

FILLS = (2, 3)
"""Least pipeline fills in each of a pattern's two samples, so that both reach the steady state."""


class Ends(Struct, frozen=True):
    """The stages of a rank's first forward, its last input gradient and the weight gradients after that."""

    first_stage: int
    last_stage: int
    trailing_weights: tuple[int, ...]


class Pattern(Struct, frozen=True, dict=True):
    """A schedule for one or two numbers of micro-batches, from which larger numbers are extrapolated.

    In its steady state every schedule here adds the same steps for each further micro-batch (or round, or
    pair of them), so the linear extrapolation of counts is exact, and times are those of an eventually
    periodic max-plus system.
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
        """Whether the schedule has overlapped pairs."""
        return self.samples[-1].paired

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """The samples, compiled for replay."""
        return tuple(compile_order(schedule) for schedule in self.samples)

    @cached_property
    def counts(self) -> tuple[tuple[Mapping[Key, int], ...], ...]:
        """How often each rank runs each kind of step, by sample and rank."""
        return tuple(tuple(Counter(map(key_of, steps)) for steps in s.ranks) for s in self.samples)

    @cached_property
    def split(self) -> bool:
        """Whether any rank runs input and weight gradients as separate actions."""
        return any(key[0] == "I" for rank in self.counts[-1] for key in rank)

    @cached_property
    def ends(self) -> tuple[Ends, ...]:
        """First and last work of each rank."""
        return tuple(_ends(steps) for steps in self.samples[-1].ranks)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the ranks that hold the same stages."""
        return tuple(self.samples[0].holders(rank) for rank in range(self.pp))

    @cached_property
    def in_flight(self) -> tuple[tuple[RankStages, ...], ...]:
        """Moments of most micro-batches in flight of every rank, by sample and rank."""
        return tuple(tuple(rank_stages(schedule)) for schedule in self.samples)

    def along(
        self, first: FloatArray | float, last: FloatArray | float, microbatches: FloatArray
    ) -> FloatArray:
        """Extrapolate a figure of the two samples linearly to other numbers of micro-batches."""
        if len(self.samples) == 1:
            return np.broadcast_to(np.asarray(first, dtype=np.float64), np.shape(microbatches))
        m1, m2 = self.samples[0].microbatches, self.samples[1].microbatches
        slope = (np.asarray(last) - np.asarray(first)) / (m2 - m1)
        return np.asarray(first + slope * (microbatches - m1))


@lru_cache(maxsize=4096)
def pattern(name: str, pp: int, microbatches: int, vpp: int, awaited: Awaited = "schedule") -> Pattern:
    """The pattern of a schedule: the schedule itself if it is short, else two shorter samples of it.

    `awaited`: the sends that its runtime awaits.

    A schedule that does not state the period of its steady state (`ScheduleSpec.microbatch_step`) is
    validated and taken whole. Raises InputError if its builder refuses the sizes or builds a schedule that
    cannot run.
    """
    step = spec_of(name).microbatch_step
    if step is None:
        whole = _pattern(name, pp, vpp, awaited, (microbatches,))
        validate(whole.samples[0])
        return whole
    grain = step(pp, microbatches)
    sizes = [_reduced(microbatches, grain, fills * pp) for fills in FILLS]
    if microbatches <= sizes[1] or sizes[0] == sizes[1]:
        return _pattern(name, pp, vpp, awaited, (microbatches,))
    return _pattern(name, pp, vpp, awaited, tuple(sizes))


def _reduced(microbatches: int, grain: int, least: int) -> int:
    """The smallest number of at least `least` that lies a multiple of `grain` below `microbatches`."""
    return microbatches - max(0, microbatches - least) // grain * grain


@lru_cache(maxsize=4096)
def _pattern(name: str, pp: int, vpp: int, awaited: Awaited, sizes: tuple[int, ...]) -> Pattern:
    built = (build(name, pp, size, vpp) for size in sizes)
    return Pattern(name, tuple(awaiting(schedule, awaited) for schedule in built))


def _ends(steps: Sequence[Step]) -> Ends:
    keys = [key_of(step) for step in steps]
    last = max(n for n, key in enumerate(keys) if key[0] not in ("F", "W"))
    return Ends(keys[0][1], keys[last][2], tuple(key[2] for key in keys[last + 1 :]))
