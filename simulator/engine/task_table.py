"""Every task of a program as vectors, with what the members of a group need together (pure)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, TypeVar
from weakref import ref

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.table import PhaseCost, TransferCost
from moesim.simulator.engine.program import (
    TRANSFER_STREAMS,
    ActionTable,
    CompiledTask,
    Program,
    TransferRows,
    action_table,
)
from moesim.simulator.model.operator import Phase

# -- figures of prices -----------------------------------------------------------------------------

Item = TypeVar("Item")


class Priced(Protocol):
    """A price with its range."""

    @property
    def best_s(self) -> float:
        """Seconds in the best case."""

    @property
    def worst_s(self) -> float:
        """Seconds in the worst case."""


Figure = Callable[[Priced, float], float]
"""A figure of a price and its expected seconds."""


def by_identity(items: Sequence[Item]) -> tuple[IntArray, list[Item]]:
    """(number of every item in the list, the different objects among the items in their order)."""
    keys = list(map(id, items))
    different = dict(zip(keys, items, strict=True))
    number = {key: at for at, key in enumerate(different)}
    return np.array([number[key] for key in keys], dtype=np.int64), list(different.values())


# -- members of a group ----------------------------------------------------------------------------

AnyArray = np.ndarray[Any, Any]

_KEPT: dict[int, tuple[ref[AnyArray], dict[Hashable, Any]]] = {}
"""Figures by the identity of a live array."""


def most_loaded(load: FloatArray) -> FloatArray:
    """Relative rows of the most loaded member by micro-batch, from those of all [micro-batches, members].

    The loads of a block are a view of the loads of all blocks, with which the value is kept.
    """
    owner = load if load.base is None else load.base
    if not isinstance(owner, np.ndarray) or load.flags.writeable:
        return np.asarray(load.max(axis=1))
    name = ("load", load.__array_interface__["data"][0], load.shape, load.strides)
    kept = _kept_of(owner)
    if name not in kept:
        kept[name] = np.asarray(load.max(axis=1))
    return np.asarray(kept[name])


def _kept_of(array: AnyArray) -> dict[Hashable, Any]:
    """The figures that are kept of a read-only array."""
    key = id(array)
    kept = _KEPT.get(key)
    if kept is None or kept[0]() is not array:
        kept = _KEPT[key] = ref(array, lambda _: _KEPT.pop(key, None)), {}
    return kept[1]


# -- tasks -----------------------------------------------------------------------------------------


class TaskTable(Struct, frozen=True, eq=False, dict=True):
    """The tasks of a program in the order of its `ActionTable`, which is that of `RecordedTimes.ends`.

    The tasks of all templates, one template after another, are its template tasks: `of_template[i]` is
    template task i, and `first_of_code[c]` the first one of template c of `actions.codes`.
    """

    program: Program
    actions: ActionTable
    of_template: tuple[CompiledTask, ...]
    first_of_code: IntArray

    @cached_property
    def action(self) -> IntArray:
        """The action of every task."""
        return np.repeat(np.arange(len(self.actions.steps)), np.diff(self.actions.first_task))

    @cached_property
    def template_task(self) -> IntArray:
        """The template task of every task."""
        shift = self.first_of_code[self.actions.code] - self.actions.first_task[:-1]
        return np.arange(self.actions.tasks) + shift[self.action]

    @cached_property
    def side(self) -> IntArray:
        """The side of every task: 0 forward, 1 backward."""
        sides = np.array([task.side for task in self.of_template], dtype=np.int64)
        return np.asarray(sides[self.template_task])

    @cached_property
    def microbatch(self) -> IntArray:
        """The micro-batch of every task."""
        return np.asarray(self.actions.microbatches[self.action, self.side])

    @cached_property
    def slowest_ns(self) -> IntArray:
        """Compute in nanoseconds of the slowest member of every task."""
        number, rows = by_identity([task.compute for task in self.of_template])
        if not rows:
            return np.zeros(0, dtype=np.int64)
        slowest = np.array([row.slowest_ns for row in rows])
        return np.asarray(slowest[number[self.template_task], self.microbatch])

    @cached_property
    def groups(self) -> tuple[tuple[int, int, IntArray], ...]:
        """(pipeline rank, template, actions) of each template of a rank, in the order of their first use."""
        table = self.actions
        key = table.rank * len(table.codes) + table.code
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order], prepend=-1)).tolist()
        parts = [order[begin:end] for begin, end in pairwise([*bounds, len(order)])]
        parts.sort(key=lambda part: int(part[0]))
        return tuple((int(table.rank[part[0]]), int(table.code[part[0]]), part) for part in parts)

    @cached_property
    def transfers(self) -> TransferTable:
        """The transfers among the tasks."""
        return transfer_table(self)

    def price_figure(self, figure: Figure) -> FloatArray:
        """A figure of the compute of every template task."""
        number, prices = self._prices
        return np.array([figure(price, price.fixed_s + price.row_s) for price in prices])[number]

    @cached_property
    def _prices(self) -> tuple[IntArray, list[PhaseCost]]:
        return by_identity([task.price for task in self.of_template])

    def compute_tasks(self, group: tuple[int, int, IntArray]) -> Iterator[tuple[int, CompiledTask]]:
        """(template task, task) of the tasks of a group's template that are no transfers."""
        first = int(self.first_of_code[group[1]])
        tasks = enumerate(self.actions.codes[group[1]].tasks, start=first)
        return ((number, task) for number, task in tasks if task.transfer is None)


def task_table(program: Program, actions: ActionTable | None = None) -> TaskTable:
    """The tasks of a program; `actions`: its action table, where it exists already."""
    actions = action_table(program) if actions is None else actions
    sizes = np.array([len(code.tasks) for code in actions.codes], dtype=np.int64)
    tasks = tuple(task for code in actions.codes for task in code.tasks)
    return TaskTable(program, actions, tasks, np.append(0, np.cumsum(sizes)))


MoveKey = tuple[int, Phase, float, float]
"""What decides a transfer's links and bytes under even load: rank, phase, NIC and scale-up bytes."""


class TransferTable(Struct, frozen=True, eq=False):
    """The transfers among the tasks of a table, and the places at which its templates have them.

    `ranks`, `tasks` and `rows` have one entry a place. `moved_of[p]` is the number of its entry in `moved`,
    and `load_of[p]` that of its load among `loads`, which are the durations of one place with that load.
    `task[i]`: the task of transfer i; `place[i]`: its place; `microbatch[i]`: its micro-batch.
    """

    ranks: tuple[int, ...]
    tasks: tuple[CompiledTask, ...]
    rows: tuple[TransferRows, ...]
    moved: tuple[tuple[MoveKey, TransferCost], ...]
    moved_of: IntArray
    loads: tuple[TransferRows, ...]
    load_of: IntArray
    task: IntArray
    place: IntArray
    microbatch: IntArray

    def each(self, values: Sequence[float] | FloatArray) -> FloatArray:
        """One value a transfer, from one a place."""
        return np.asarray(np.array(values, dtype=np.float64)[self.place])

    def payload_ns(self) -> FloatArray:
        """Payload of the slowest member of every transfer, alone on its links."""
        number, payloads = by_identity([rows.payload_ns for rows in self.rows])
        if not payloads:
            return np.zeros(0)
        values = np.array(payloads)
        return np.asarray(values[number[self.place], self.microbatch])

    def fastest_ns(self) -> IntArray:
        """Compute of the fastest member before every transfer."""
        number, rows = by_identity([task.compute for task in self.tasks])
        if not rows:
            return np.zeros(0, dtype=np.int64)
        values = np.array([row.fastest_ns for row in rows])
        return np.asarray(values[number[self.place], self.microbatch])

    def launch_ns(self) -> FloatArray:
        """Launch of every transfer."""
        return self.each([rows.launch_ns for rows in self.rows])

    def stream(self) -> IntArray:
        """Number of the stream of every transfer in `TRANSFER_STREAMS`."""
        streams = [TRANSFER_STREAMS.index(task.stream) for task in self.tasks]
        return np.asarray(np.array(streams, dtype=np.int64)[self.place])

    def cost_figure(self, figure: Figure) -> FloatArray:
        """A figure of the payload of every transfer."""
        number, costs = by_identity([rows.cost for rows in self.rows])
        values = [figure(cost, max(cost.nic_s, cost.scale_up_s)) for cost in costs]
        return self.each(np.array(values, dtype=np.float64)[number])


def transfer_table(table: TaskTable) -> TransferTable:
    """The transfers of a program."""
    number = np.full(len(table.of_template), -1)
    ranks: list[int] = []
    tasks: list[CompiledTask] = []
    rows: list[TransferRows] = []
    costs: dict[tuple[int, Phase, int], int] = {}
    moved: dict[MoveKey, tuple[int, TransferCost]] = {}
    loads: dict[tuple[int, int, int, int], tuple[int, TransferRows]] = {}
    moved_of: list[int] = []
    load_of: list[int] = []
    for rank, code, actions in table.groups:
        template, first = table.actions.codes[code], int(table.first_of_code[code])
        stages = table.actions.stages[actions[0]].tolist()
        for transfer in template.transfers:
            task = template.tasks[transfer]
            own = task.transfer
            assert own is not None
            number[first + transfer] = len(tasks)
            ranks.append(rank)
            tasks.append(task)
            rows.append(own)
            key = (rank, task.phase, id(own.cost))
            if key not in costs:
                what = (rank, task.phase, own.cost.nic_bytes, own.cost.scale_up_bytes)
                costs[key] = moved.setdefault(what, (len(moved), own.cost))[0]
            moved_of.append(costs[key])
            # Places in one block have views of the same loads, or an even load.
            load = (id(own.load.base), len(own.load), stages[task.side], task.block)
            load_of.append(loads.setdefault(load, (len(loads), own))[0])
    place = number[table.template_task]
    at = np.flatnonzero(place >= 0)
    return TransferTable(
        tuple(ranks),
        tuple(tasks),
        tuple(rows),
        tuple((what, cost) for what, (_, cost) in moved.items()),
        np.array(moved_of, dtype=np.int64),
        tuple(own for _, own in loads.values()),
        np.array(load_of, dtype=np.int64),
        at,
        place[at],
        table.microbatch[at],
    )
