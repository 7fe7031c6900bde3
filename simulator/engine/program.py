"""The engine's input: task templates, and the duration of every task before the simulation starts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, Same, read_only
from moesim.simulator.cost.formulas import payload_seconds
from moesim.simulator.cost.table import CostTable, PhaseCost, TransferCost
from moesim.simulator.engine.link_map import Demand, LinkMap
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import Schedule
from moesim.simulator.schedules.template import WEIGHT_OF, OverlapOrder, Stream, Template

# -- durations -------------------------------------------------------------------------------------

SingleArray = NDArray[np.float32]

NS = 1e9
"""Nanoseconds in a second; cost functions return seconds, the engine counts integer nanoseconds."""
LONGEST_PHASE_S = 1e5
"""Longest phase in seconds; ninety thousand of them in series still fit into 64 bits of nanoseconds."""


def slowest_draws(
    generator: np.random.Generator, shape: tuple[int, int], together: int, stands_for: int
) -> SingleArray:
    """32-bit normal draws [micro-batches, members], each the largest of GPUs that meet in a layer (eq. E1a).

    `together`: neighbouring members that meet; `stands_for`: GPUs that each of them stands for.
    """
    rows, members = shape
    draws = generator.standard_normal((rows, members // together), dtype=np.float32)
    for _ in range(stands_for * together - 1):
        np.maximum(draws, generator.standard_normal(draws.shape, dtype=np.float32), out=draws)
    return draws if together == 1 else np.repeat(draws, together, axis=1)


def whole_ns(seconds: FloatArray) -> IntArray:
    """Seconds as whole nanoseconds.

    Raises InputError for a phase longer than any real one, OverflowError for values that are no durations.
    """
    longest = float(seconds.max(initial=0.0))
    if longest > LONGEST_PHASE_S:
        raise InputError(
            f"a single phase of a micro-batch takes {longest:.3g} s with these rates and sizes; a step is "
            f"counted in nanoseconds with phases of at most {LONGEST_PHASE_S:g} s (a day and a half): raise "
            "peaks, bandwidths and efficiencies, or lower batch.sequence_length and parallel.microbatch"
        )
    if not 0.0 <= float(seconds.min(initial=0.0)) <= longest:
        raise OverflowError(f"durations from {seconds.min():.6g} to {longest:.6g} s are not durations")
    return np.rint(seconds * NS).astype(np.int64)


# -- programs --------------------------------------------------------------------------------------

TRANSFER_STREAMS: tuple[Stream, ...] = ("communication", "sharding")


class MemberVariation(Struct, frozen=True):
    """Differences between members, as vectors with one value a member.

    `clock`: time factor of each member [pipeline ranks, members]. `loads`: relative received rows
    [MoE blocks, micro-batches, members]. `node_loads`: the loads averaged over the members of a node.
    `jitter_cv`: relative spread of a phase's duration from run to run. `seed`: the seed of that spread.
    `stands_for`: GPUs behind every member that meet inside each layer, so that a phase lasts as long as on
    the slowest of them. `in_step`: consecutive members that meet so (full resolution, where each GPU is one).
    """

    clock: FloatArray
    loads: FloatArray
    node_loads: FloatArray
    jitter_cv: float | FloatArray
    seed: int
    stands_for: int = 1
    in_step: int = 1


class TransferRows(NamedTuple):
    """Durations of a transfer phase for every micro-batch: launch after the barrier, then the payload."""

    launch_ns: int
    payload_ns: FloatArray
    """Payload of the slowest member, alone on its links, per micro-batch."""
    given_ns: IntArray | None
    """Payload of each member, alone on its links [micro-batches, members]; None: that of `cost` at the loads,
    which the compiled engine works out as it needs it."""
    cost: TransferCost
    demand: Demand | None
    """Links and bytes, where they are the same for every micro-batch."""
    load: FloatArray
    """Relative received rows [micro-batches, members]; a single row where routing does not matter."""
    node_load: FloatArray
    """`load` averaged over the members of a node."""

    def member_row_ns(self, microbatch: int) -> IntArray:
        """Payload of each member in a micro-batch, alone on its links."""
        if self.given_ns is not None:
            return np.asarray(self.given_ns[microbatch])
        row = microbatch % len(self.load)
        return self._at(self.node_load[row], self.load[row])

    @property
    def member_ns(self) -> IntArray:
        """Payload of each member, alone on its links [micro-batches, members]."""
        if self.given_ns is not None:
            return self.given_ns
        shape = len(self.payload_ns), self.load.shape[1]
        return np.broadcast_to(self._at(self.node_load, self.load), shape)

    def _at(self, node_load: FloatArray, load: FloatArray) -> IntArray:
        seconds = payload_seconds((self.cost.nic_s, node_load), (self.cost.scale_up_s, load))
        return np.rint(seconds * NS).astype(np.int64)


class Formula(NamedTuple):
    """Numbers from which compiled code works out the compute of a phase (eq. E1).

    `load`, `draws` and `clock`: memory addresses of [micro-batches, members] arrays, of relative rows, of
    32-bit normal draws of run-to-run noise and of time factors; the factors that 0 stands for are 1. `cv`:
    spread of the noise.
    """

    fixed_s: float
    row_s: float
    load: int
    draws: int
    clock: int
    cv: float


NO_FORMULA = Formula(0.0, 0.0, 0, 0, 0, 0.0)
"""Stands for a phase without one."""


class PhaseRows:
    """Nanoseconds [micro-batches, members] of a phase's compute, worked out when somebody reads them.

    The compiled engine works out the row of each micro-batch from `formula` instead; the results are equal.
    Figures of the numbers are kept, the numbers only while somebody, such as a bounded cache, keeps them.
    """

    __slots__ = ("_arrays", "_figures", "_kept", "_make", "formula", "nbytes")

    def __init__(
        self,
        shape: tuple[int, int],
        make: Callable[[], tuple[IntArray, dict[Hashable, IntArray]]],
        formula: Formula | None = None,
        arrays: tuple[Any, ...] = (),
    ) -> None:
        """`make`: gives read-only numbers and figures of them; `arrays`: load, draws and clock of
        `formula`, None for factors of 1."""
        self.nbytes = 8 * shape[0] * shape[1]
        self.formula, self._make, self._arrays = formula, make, arrays
        self._figures: dict[Hashable, IntArray] = {}
        self._kept: ref[IntArray] | None = None

    @classmethod
    def of(cls, rows_ns: IntArray) -> PhaseRows:
        """Numbers that are there already."""
        return cls((rows_ns.shape[0], rows_ns.shape[1]), lambda: (rows_ns, {}))

    @property
    def ns(self) -> IntArray:
        """The numbers."""
        kept = None if self._kept is None else self._kept()
        if kept is None:
            kept, figures = self._make()
            self._kept = ref(kept)
            self._figures |= figures
        return kept

    def item(self, microbatch: int, member: int) -> int:
        """One of the numbers, from the formula where there is one."""
        if self.formula is None or len(self._arrays) != 3:
            return int(self.ns.item(microbatch, member))
        fixed_s, row_s, *_, cv = self.formula
        load, *draws, clock = self._arrays
        seconds = fixed_s + row_s * (1.0 if load is None else load.item(microbatch, member))
        factor = clock.item(microbatch, member)
        if draws[0] is not None:
            factor *= max(draws[0].item(microbatch, member) * cv + 1.0, 0.0)
        return round(float(seconds * factor) * NS)

    @property
    def slowest_ns(self) -> IntArray:
        """Duration of the slowest member by micro-batch."""
        return self._figure("slowest", np.maximum)

    @property
    def fastest_ns(self) -> IntArray:
        """Duration of the fastest member by micro-batch."""
        return self._figure("fastest", np.minimum)

    @property
    def total_ns(self) -> IntArray:
        """Sum over members by micro-batch."""
        return self._figure("total", np.add)

    @property
    def has_figures(self) -> bool:
        """Whether all three are kept."""
        return len(self._figures) == 3

    def keep(self, figures: IntArray) -> None:
        """Keep slowest, fastest and total [3, micro-batches] that were worked out without the numbers."""
        self._figures["slowest"], self._figures["fastest"], self._figures["total"] = figures

    def _figure(self, name: Hashable, reduce: np.ufunc) -> IntArray:
        """Reduction over the members."""
        figure = self._figures.get(name)
        if figure is None:
            numbers = self.ns
            figure = self._figures.get(name)  # which may have come with the numbers
            if figure is None:
                figure = self._figures[name] = np.asarray(reduce.reduce(numbers, axis=1))
        return figure


class CompiledTask(NamedTuple):
    """One task of a template with its durations for every micro-batch."""

    phase: Phase
    kind: BlockKind
    block: int
    side: int
    deps: tuple[int, ...]
    overlapped_share: float | None
    """Share of the task that runs beside busy communication SMs; None outside overlapped pairs."""
    price: PhaseCost
    compute: PhaseRows
    """Compute of every micro-batch and member; for a transfer, the small kernels before it."""
    transfer: TransferRows | None
    stream: Stream = "compute"
    """In-order stream that the task runs on."""

    @property
    def rows_ns(self) -> IntArray:
        """Nanoseconds [micro-batches, members] of `compute`."""
        return self.compute.ns


class TemplateColumns(NamedTuple):
    """The tasks of a template as vectors.

    `side` and `dep_count` [tasks]; `deps`: the tasks before each task, one task after the other. `numbers`:
    `fixed_s`, `row_s` and `cv` of their formulas [3, tasks]; `addresses`: `load`, `draws` and `clock`
    [3, tasks]. `without_formula`: positions of the tasks without one.
    """

    side: IntArray
    dep_count: IntArray
    deps: IntArray
    numbers: FloatArray
    addresses: IntArray
    without_formula: tuple[int, ...]


class TemplatePart(Struct, frozen=True, eq=False, dict=True):
    """What does not depend on the pipeline rank that runs a template.

    `tasks`: the tasks without the durations of their transfers, whose positions are in `transfers`.
    `template`: what they were made from, at the stages `stages` of both sides.
    """

    tasks: tuple[CompiledTask, ...]
    transfers: tuple[int, ...]
    microbatches: int
    members: int
    template: Template
    stages: tuple[int, int]

    @cached_property
    def columns(self) -> TemplateColumns:
        """The tasks as vectors."""
        usual = [task.compute.formula or NO_FORMULA for task in self.tasks]
        numbers = np.array(usual, dtype=np.float64).reshape(-1, len(Formula._fields)).T
        addresses = np.array([own[2:5] for own in usual], dtype=np.int64).reshape(-1, 3).T
        return TemplateColumns(
            np.array([task.side for task in self.tasks], dtype=np.int64),
            np.array([len(task.deps) for task in self.tasks], dtype=np.int64),
            np.array(list(chain.from_iterable(task.deps for task in self.tasks)), dtype=np.int64),
            numbers[[0, 1, 5]],
            addresses,
            tuple(number for number, task in enumerate(self.tasks) if task.compute.formula is None),
        )

    @cached_property
    def compute_ns(self) -> tuple[FloatArray, FloatArray]:
        """Compute of each side per micro-batch, averaged over members, without exposed collectives."""
        sides = np.zeros(self.microbatches), np.zeros(self.microbatches)
        for number, task in enumerate(self.tasks):
            if number not in self.transfers:
                mean = task.compute.total_ns / self.members
                np.add(sides[task.side], mean - task.price.exposed_s * NS, out=sides[task.side])
        return sides

    @cached_property
    def weight_ns(self) -> FloatArray:
        """Weight-gradient part of that compute (backward side)."""
        weight = np.zeros(self.microbatches)
        for number, task in enumerate(self.tasks):
            if number not in self.transfers and task.phase in WEIGHT_OF:
                weight += task.compute.total_ns / self.members
        return weight


class CompiledTemplate(Struct, frozen=True):
    """A template on one pipeline rank, ready to run for any micro-batch."""

    kind: str
    tasks: tuple[CompiledTask, ...]
    forward_out: int | None
    """Task after which the activation is sent; None sends it at the end of the action."""
    backward_out: int | None
    """Task after which the gradient is sent; None sends it at the end of the action."""
    transfers: tuple[int, ...]
    """Positions of the transfer tasks."""
    before: tuple[int | None, ...]
    """Position of the previous task on the stream of each task; None for the first."""
    part: TemplatePart
    """What all ranks that run the template share."""


class PlacedStep(NamedTuple):
    """One schedule step on its pipeline rank."""

    label: str
    code: CompiledTemplate
    stages: tuple[int, int]
    """(stage of the forward side, stage of the backward side); -1 where the side is absent."""
    microbatches: tuple[int, int]


class Program(Struct, frozen=True):
    """A schedule with its costs: `ranks[r]` is what pipeline rank r runs, in order."""

    schedule: Schedule
    members: int
    ranks: tuple[tuple[PlacedStep, ...], ...]
    costs: CostTable
    blocks: tuple[tuple[BlockKind, ...], ...]
    variation: MemberVariation
    link_map: LinkMap
    group: int = 0
    """Number of the expert-parallel group of each pipeline rank."""


class PricedSchedule(Struct, frozen=True):
    """The schedule, the blocks of its stages and all prices, which the groups of a step share.

    `blocks[stage]`: block kinds of the stage in forward order. `order`: how an overlapped pair interleaves.
    """

    schedule: Schedule
    blocks: tuple[tuple[BlockKind, ...], ...]
    costs: CostTable
    order: OverlapOrder | None


# -- programs as vectors ---------------------------------------------------------------------------


class ActionTable(Struct, frozen=True, eq=False):
    """Every action of a program in the order of pipeline ranks, and every task in the order of actions.

    `steps[a]`: the placed step. `rank[a]`: its pipeline rank. `code[a]`: its template in `codes`.
    `stages[a]` and `microbatches[a]`: (forward, backward), -1 where the side is absent. `first_action[r]`:
    first action of rank r, with the number of all actions at the end. `first_task[a]`: number of the first
    task of action a, with the number of all tasks at the end.
    """

    steps: tuple[PlacedStep, ...]
    codes: tuple[CompiledTemplate, ...]
    rank: IntArray
    code: IntArray
    stages: IntArray
    microbatches: IntArray
    first_action: IntArray
    first_task: IntArray

    @property
    def tasks(self) -> int:
        """Number of all tasks."""
        return int(self.first_task[-1])

    def of_code(self) -> Iterator[tuple[CompiledTemplate, IntArray]]:
        """Each template with the numbers of its actions, in the order in which templates appear."""
        order = np.argsort(self.code, kind="stable")
        ends = np.cumsum(np.bincount(self.code, minlength=len(self.codes)))
        begin = 0
        for code, end in zip(self.codes, ends.tolist(), strict=True):
            yield code, order[begin:end]
            begin = end


def action_table(program: Program) -> ActionTable:
    """The table of a program's actions."""
    steps = tuple(chain.from_iterable(program.ranks))
    ids = [id(step.code) for step in steps]
    codes = tuple({number: step.code for number, step in zip(ids, steps, strict=True)}.values())
    numbers = {id(code): number for number, code in enumerate(codes)}
    code = np.array([numbers[one] for one in ids], dtype=np.int64)
    sizes = np.array([len(one.tasks) for one in codes], dtype=np.int64)
    rank, stages, microbatches, first = _PLACES.get(Same(program.schedule), lambda: _places(program))
    first_task = np.append(0, np.cumsum(sizes[code] if len(steps) else sizes[:0]))
    return ActionTable(steps, codes, rank, code, stages, microbatches, first, first_task)


def _places(program: Program) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Rank, stages, micro-batches of every action and first action of every rank, which the schedule says."""
    steps = list(chain.from_iterable(program.ranks))
    counts = np.array([len(own) for own in program.ranks], dtype=np.int64)
    pairs = ([step.stages for step in steps], [step.microbatches for step in steps])
    stages, microbatches = (np.array(pair, dtype=np.int64).reshape(-1, 2) for pair in pairs)
    rank, first = np.repeat(np.arange(len(counts)), counts), np.append(0, np.cumsum(counts))
    return read_only(rank), read_only(stages), read_only(microbatches), read_only(first)


_PLACES: BoundedCache[tuple[IntArray, IntArray, IntArray, IntArray]] = BoundedCache(
    16_000_000, lambda columns: sum(column.nbytes for column in columns)
)
"""What the schedules before say of their actions, limited in bytes."""


def hop_targets(program: Program, actions: ActionTable) -> IntArray:
    """Pipeline rank to which each action sends its activation and its gradient [actions, 2]; -1 for none."""
    schedule = program.schedule
    if program.costs.send_s == 0.0:
        return np.full((len(actions.steps), 2), -1)
    backward = np.array([code.kind != "W" for code in actions.codes], dtype=bool)[actions.code]
    stages = actions.stages + np.array([1, -1])
    held = np.stack([actions.stages[:, 0] >= 0, backward], axis=1)
    sent = held & (stages >= 0) & (stages < schedule.n_stages)
    routes = np.array(schedule.routes)
    direction = actions.microbatches * len(routes) // schedule.microbatches
    target = routes[np.where(sent, direction, 0), np.where(sent, stages, 0)]
    return np.where(sent & (target != actions.rank[:, None]), target, -1)
