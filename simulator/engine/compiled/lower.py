"""Writes the programs of a step into the flat tables that the compiled event loop reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.formulas import payload_seconds
from moesim.simulator.cost.table import CostTable, Mode, PhaseKey, TransferCost
from moesim.simulator.engine.compilation import busy_shares
from moesim.simulator.engine.compiled.state import (
    BY_PATTERN,
    BY_ROW,
    COMMUNICATION,
    COMPUTE,
    SHARDING,
    StepSizes,
    Tables,
)
from moesim.simulator.engine.full_resolution.link_map import ClusterLinkMap, ExchangePattern
from moesim.simulator.engine.link_map import TO_EXPERTS, Demand, FoldedLinkMap, LinkMap
from moesim.simulator.engine.program import (
    LONGEST_PHASE_S,
    NS,
    ActionTable,
    CompiledTask,
    CompiledTemplate,
    MemberVariation,
    Program,
    TemplateColumns,
    TransferRows,
    action_table,
    hop_targets,
)
from moesim.simulator.engine.task_durations import MOST_DEVIATIONS, load_facts, most_rows
from moesim.simulator.model.operator import BlockKind, Phase


class LoweredStep(Struct, frozen=True):
    """The tables of a step.

    `actions`: the action table of each group. `first_transfer`: first row of `RunState.waits` of each group,
    and their end. `kept`: the arrays behind the addresses, which must live as
    long as the tables are used; the programs keep those behind formulas.
    """

    tables: Tables
    sizes: StepSizes
    actions: tuple[ActionTable, ...]
    first_transfer: tuple[int, ...]
    kept: tuple[Any, ...]


def lower(programs: Sequence[Program], few_links: bool, capacity_units: int) -> LoweredStep:
    """The tables of the programs of all groups.

    `few_links`: which of the two link pools SimPy takes for as many links. `capacity_units`: the integer that
    stands for the whole capacity of a link.
    """
    lowering = _Lowering()
    actions = tuple(action_table(program) for program in programs)
    code_base, first_transfer = [], []
    for program, table in zip(programs, actions, strict=True):
        first_transfer.append(len(lowering.transfer_rows))
        code_base.append(lowering.templates(program, table))
    first_transfer.append(len(lowering.transfer_rows))
    first, schedule = programs[0], programs[0].schedule
    count, routes = schedule.microbatches, np.array(schedule.routes, dtype=np.int64)
    rank_of = np.ascontiguousarray(routes[np.arange(count) * len(routes) // count].T)  # [stage, micro-batch]
    pairs = lowering.pairs(programs, actions)
    columns = lowering.columns(first.members)
    task_base = np.cumsum([0, *(table.tasks for table in actions)])
    action_base = np.cumsum([0, *(len(table.steps) for table in actions)])
    waits = [wait for rank in range(schedule.pp) for wait in schedule.awaits(rank)]
    capacity = np.ascontiguousarray(first.link_map.capacity_bytes_per_ns, dtype=np.float64)
    with np.errstate(divide="ignore"):
        unit = capacity_units / capacity
    tables = Tables(
        rank_of=rank_of,
        process_first=_joined([t.first_action for t in actions], action_base),
        action_code=np.concatenate([t.code + b for t, b in zip(actions, code_base, strict=True)]),
        action_stages=np.concatenate([t.stages for t in actions]),
        action_microbatches=np.concatenate([t.microbatches for t in actions]),
        action_waits=np.array(waits * len(programs), dtype=np.int64),
        action_first_task=_joined([t.first_task for t in actions], task_base),
        capacity=capacity,
        unit=unit,
        **columns,
        **pairs,
    )
    sizes = StepSizes(
        members=first.members,
        groups=len(programs),
        ranks=schedule.pp,
        stages=schedule.n_stages,
        microbatches=schedule.microbatches,
        sends_take_time=first.costs.send_s * NS != 0.0,
        few_links=few_links,
        actions=int(action_base[-1]),
        tasks=int(task_base[-1]),
        wait_rows=len(lowering.transfer_rows) if isinstance(first.link_map, ClusterLinkMap) else 0,
    )
    return LoweredStep(tables, sizes, actions, tuple(first_transfer), tuple(lowering.kept))


def _joined(firsts: Sequence[IntArray], bases: IntArray) -> IntArray:
    """The row starts of all groups as one vector, with the end of the last row at its end."""
    parts = [first[:-1] + base for first, base in zip(firsts, bases[:-1].tolist(), strict=True)]
    return np.concatenate([*parts, bases[-1:]])


class _Lowering(Struct):
    """Rows of the tables so far; every shared array, demand and pattern is written down once."""

    addresses: dict[int, int] = field(default_factory=dict)
    """Where every array begins, by its identity."""
    kept: list[tuple[Any, Any]] = field(default_factory=list)
    """Every array and its contiguous form, kept alive so that identities and addresses stay theirs."""
    transfer_places: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Addresses of the payloads and loads of transfers, by the identities of payload and load."""
    demands: list[Demand] = field(default_factory=list)
    demand_numbers: dict[int, int] = field(default_factory=dict)
    row_demands: list[int] = field(default_factory=list)
    patterns: list[ExchangePattern] = field(default_factory=list)
    pattern_numbers: dict[int, int] = field(default_factory=dict)
    codes: list[tuple[int, ...]] = field(default_factory=list)
    parts: list[TemplateColumns] = field(default_factory=list)
    rows: list[IntArray] = field(default_factory=list)
    transfer_of: list[int] = field(default_factory=list)
    """Number of the transfer of each task; that of a compute task is 0, a row of zeros."""
    transfer_rows: list[tuple[int, ...]] = field(default_factory=lambda: [(COMPUTE,) * 10])
    transfer_numbers: list[tuple[float, ...]] = field(default_factory=lambda: [(0.0,) * 4])

    def templates(self, program: Program, table: ActionTable) -> int:
        """Write down the templates of a program; return the number of the first."""
        base = len(self.codes)
        for code, actions in table.of_code():
            self._template(program, int(table.rank[actions[0]]), code)
        return base

    def _template(self, program: Program, rank: int, code: CompiledTemplate) -> None:
        forward, backward, kind = code.forward_out, code.backward_out, code.kind
        self.codes.append(
            (
                -1 if forward is None else forward,
                -1 if backward is None else backward,
                int(forward is None and kind in ("F", "F&B", "F&I")),
                int(backward is None and kind in ("B", "I", "F&B", "F&I")),
                int(kind != "W"),
            )
        )
        part = code.part.columns
        self.parts.append(part)
        rows = np.zeros(len(code.tasks), dtype=np.int64)
        for position in part.without_formula:
            rows[position] = self._address(code.tasks[position].rows_ns, np.int64)
        self.rows.append(rows)
        numbers = [0] * len(code.tasks)
        for position in code.transfers:
            numbers[position] = len(self.transfer_rows)
            self._transfer(program, rank, code.tasks[position])
        self.transfer_of += numbers

    def _transfer(self, program: Program, rank: int, task: CompiledTask) -> None:
        """Write down the transfer of a task."""
        transfer = task.transfer
        assert transfer is not None
        launch_ns, payload_ns, given, cost, demand, load, node_load = transfer
        if demand is None:
            which, first_row, pattern, per_peer = self._demand(program, rank, task, transfer)
        else:
            which, first_row, pattern, per_peer = self._number(demand), 0, 0, (0.0, 0.0)
        key = id(payload_ns), id(load)  # which decide the others
        places = self.transfer_places.get(key)
        if places is None:
            arrays = (payload_ns, np.float64), (given, np.int64), (load, np.float64), (node_load, np.float64)
            at = [0 if array is None else self._address(array, dtype) for array, dtype in arrays]
            places = self.transfer_places[key] = tuple(at)
        payload, own, loads, nodes = places
        kind = SHARDING if task.stream == "sharding" else COMMUNICATION
        demanded = which, first_row, pattern
        self.transfer_rows.append((kind, launch_ns, payload, own, *demanded, loads, nodes, len(load)))
        self.transfer_numbers.append((cost.nic_s, cost.scale_up_s, *per_peer))

    def _demand(
        self, program: Program, rank: int, task: CompiledTask, transfer: TransferRows
    ) -> tuple[int, int, int, tuple[float, float]]:
        """(demand, first of its rows, pattern, bytes a peer of both hops) of a transfer whose load counts."""
        cost, link_map = transfer.cost, program.link_map
        if isinstance(link_map, ClusterLinkMap):
            pattern = link_map.pattern(rank, task.phase in TO_EXPERTS)
            nic, scale_up = pattern.bytes_per_peer(cost.nic_bytes, cost.scale_up_bytes)
            number = self.pattern_numbers.setdefault(id(pattern), len(self.patterns))
            if number == len(self.patterns):
                self.patterns.append(pattern)
            return BY_PATTERN, 0, number, (nic, scale_up)
        first = len(self.row_demands)
        for load, node_load in zip(transfer.load, transfer.node_load, strict=True):
            demand = link_map.transfer(rank, task.phase, cost, load, node_load)
            self.row_demands.append(self._number(demand))
        return BY_ROW, first, 0, (0.0, 0.0)

    def _number(self, demand: Demand) -> int:
        number = self.demand_numbers.setdefault(id(demand), len(self.demands))
        if number == len(self.demands):
            self.demands.append(demand)  # which keeps it alive, so that its identity stays its own
        return number

    def _address(self, values: Any, dtype: npt.DTypeLike) -> int:
        """Where the contiguous form of an array, or of a list of numbers, begins."""
        found = self.addresses.get(id(values))
        if found is None:
            array = np.ascontiguousarray(values, dtype=dtype)
            self.kept.append((values, array))
            found = self.addresses[id(values)] = array.__array_interface__["data"][0]
        return found

    def pairs(self, programs: Sequence[Program], actions: Sequence[ActionTable]) -> dict[str, Any]:
        """The sends between every two pipeline ranks of every group that exchange any."""
        shape = (len(programs), programs[0].schedule.pp, programs[0].schedule.pp)
        alone, most = np.zeros(shape), np.ones(shape)
        demand, slow = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for group, (program, table) in enumerate(zip(programs, actions, strict=True)):
            link_map, costs = program.link_map, program.costs
            targets = hop_targets(program, table)
            sends, exchange = targets >= 0, np.zeros(shape[1:], dtype=bool)
            exchange[np.broadcast_to(table.rank[:, None], targets.shape)[sends], targets[sends]] = True
            for source, target in np.argwhere(exchange).tolist():
                factor = link_map.send_slowness(source, target)
                if not isinstance(factor, float):
                    slow[group, source, target] = self._address(factor, np.float64)
                    most[group, source, target] = factor.max()
                alone[group, source, target] = costs.send_s * NS * most[group, source, target]
                sent = link_map.send(source, target, costs.send_bytes)
                demand[group, source, target] = self._number(sent)
        return {"pair_alone": alone, "pair_demand": demand, "pair_slow": slow, "pair_slow_most": most}

    def columns(self, members: int) -> dict[str, Any]:
        """The columns of templates, tasks, demands and patterns."""
        code = np.array(self.codes, dtype=np.int64).reshape(-1, 5)
        which = np.array(self.transfer_of, dtype=np.int64)
        task = np.array(self.transfer_rows, dtype=np.int64).T
        numbers = np.array(self.transfer_numbers, dtype=np.float64).T
        names = (
            *("task_kind", "task_launch", "task_payload", "task_member", "task_demand", "task_first_row"),
            *("task_pattern", "task_load", "task_node_load", "task_load_rows"),
        )
        number_names = "task_nic_s", "task_scale_up_s", "task_nic_bytes", "task_scale_up_bytes"
        code_names = (
            *("code_forward_out", "code_backward_out", "code_posts_forward", "code_posts_backward"),
            "code_takes_gradient",
        )
        columns: dict[str, Any] = {n: column[which] for n, column in zip(names, task, strict=True)}
        columns |= {n: np.ascontiguousarray(code[:, i]) for i, n in enumerate(code_names)}
        demands, patterns, parts = self.demands, self.patterns, self.parts
        formulas = np.concatenate([np.zeros((3, 0)), *(part.numbers for part in parts)], axis=1)
        arrays = np.concatenate([np.zeros((3, 0), np.int64), *(part.addresses for part in parts)], axis=1)
        shapes: dict[tuple[bytes, ...], PatternEntries] = {}
        shape_of = [_entries(pattern, members, shapes) for pattern in patterns]
        first_row = _starts([len(entries.counts) for entries in shapes.values()])
        row_of = {id(entries): row for entries, row in zip(shapes.values(), first_row.tolist(), strict=False)}
        return columns | {
            "code_first": _starts([len(part.side) for part in parts]),
            "task_dep_first": _starts(_ints([part.dep_count for part in parts])),
            "task_deps": _ints([part.deps for part in parts]),
            "task_side": _ints([part.side for part in parts]),
            "task_rows": _ints(self.rows),
            "task_transfer": which,
            **dict(zip(("task_fixed_s", "task_row_s", "task_cv"), formulas, strict=True)),
            **dict(zip(("task_received", "task_draws", "task_clock"), arrays, strict=True)),
            **dict(zip(number_names, (row[which] for row in numbers), strict=True)),
            "row_demand": np.array(self.row_demands, dtype=np.int64),
            "demand_first": _starts([len(demand.links) for demand in demands]),
            "demand_links": _ints([demand.links for demand in demands]).astype(np.int32),
            "demand_bytes": _floats([demand.bytes for demand in demands]),
            "pattern_first_link": _starts([len(pattern.links) for pattern in patterns]),
            "pattern_links": _ints([pattern.links for pattern in patterns]).astype(np.int32),
            "pattern_row": np.array([row_of[id(entries)] for entries in shape_of], dtype=np.int64),
            "pattern_link_first": _starts(_ints([entries.counts for entries in shapes.values()])),
            "pattern_source": _ints([entries.source for entries in shapes.values()]).astype(np.int32),
            "pattern_share": _floats([entries.share for entries in shapes.values()]),
        }


PriceOf: TypeAlias = tuple[BlockKind, Phase, float | tuple[int, int] | None]
"""Kind of block, phase, and the share of it beside busy communication SMs: None outside of pairs, a number,
or (part, layer pair) where durations decide it."""


class StepRates(NamedTuple):
    """What may differ between runs of the same step: prices, differences between members, and links."""

    costs: CostTable
    variation: MemberVariation
    link_map: LinkMap


RATED = (
    *("task_fixed_s", "task_row_s", "task_cv", "task_received", "task_launch", "task_load", "task_node_load"),
    *("task_nic_s", "task_scale_up_s", "pair_alone", "capacity", "unit"),
)
"""The columns of `Tables` that rates change and that hold no address of an array made anew."""


class RepeatedStep:
    """The tables of one program for other rates, made from its own without compiling it again.

    The arithmetic of every number is that of `TaskDurations`, for all tasks at once.
    """

    def __init__(self, program: Program, few_links: bool, capacity_units: int) -> None:
        """The last two arguments are those of `lower`."""
        self.program, self.units = program, capacity_units
        self.lowered = lower([program], few_links, capacity_units)
        tables, own = self.lowered.tables, program.variation
        self.parts = {id(code.part): code.part for code in self.lowered.actions[0].codes}
        prices: dict[PriceOf, int] = {}
        payloads: dict[tuple[int, PhaseKey], int] = {}
        price_of: list[int] = []
        payload_of: list[int] = []
        stage_of: list[int] = []
        rows: list[TransferRows] = []
        first, size = _address_of(own.loads), own.loads[:1].nbytes or 1
        for code in self.lowered.actions[0].codes:
            part = code.part
            mode: Mode = "overlapped" if part.template.on_two_streams else "alone"
            for task, of in zip(code.tasks, part.template.tasks, strict=True):
                share = (id(part), of.layer_pair) if part.template.by_duration else task.overlapped_share
                price_of.append(prices.setdefault((task.kind, task.phase, share), len(prices)))
                stage_of.append(part.stages[task.side])
                moved = task.transfer
                if moved is None:
                    payload_of.append(-1)
                    continue
                # Number of the block among those with routed experts; -1 where its loads do not matter.
                offset = _address_of(moved.load) - first
                routed = offset // size if 0 <= offset < own.loads.nbytes else -1
                payload_of.append(payloads.setdefault((routed, (task.kind, task.phase, mode)), len(rows)))
                if payload_of[-1] == len(rows):
                    rows.append(moved)
        self.prices, self.payloads = list(prices), [key for _, key in payloads]
        self.routed = np.array([routed for routed, _ in payloads], dtype=np.int64)
        self.price_of, self.payload_of, self.stage_of = map(np.array, (price_of, payload_of, stage_of))
        self.bytes = [_bytes(moved.cost) for moved in rows]
        self.pairs = [(source, target) for _, source, target in np.argwhere(tables.pair_alone > 0.0).tolist()]
        self.possible = all(moved.given_ns is None for moved in rows) and not tables.pair_slow.any()
        """Whether `at` can give tables; if so, at the program's own rates it gives the program's own."""
        same = self.at(StepRates(program.costs, own, program.link_map))
        self.possible = same is not None and all(
            np.array_equal(getattr(same.tables, name), getattr(tables, name)) for name in RATED
        )

    def at(self, rates: StepRates) -> LoweredStep | None:
        """The tables at other rates; None where steps, bytes or the kind of a duration would differ too."""
        if not (self.possible and self._same_steps(rates)):
            return None
        (costs, variation, link_map), tables, own = rates, self.lowered.tables, self.program.variation
        fixed_s, row_s = self._prices(costs)
        moved = [costs.transfer[key] for key in self.payloads]
        nic_s, scale_up_s = np.array([(cost.nic_s, cost.scale_up_s) for cost in moved]).reshape(-1, 2).T
        most, cv = most_rows(variation)[:, self.routed], float(variation.jitter_cv)
        slowest = payload_seconds((nic_s[:, None], most[0]), (scale_up_s[:, None], most[1]))
        if not (
            min(a.min(initial=0.0) for a in (fixed_s, row_s, nic_s, scale_up_s)) >= 0.0
            and self._usual(fixed_s, row_s, variation)
            and (slowest <= LONGEST_PHASE_S).all()
        ):
            return None
        payload_ns = np.append(slowest * NS, [np.zeros(slowest.shape[1])], axis=0)
        clock = np.ascontiguousarray(variation.clock[tables.rank_of])  # [stages, micro-batches, members]
        alone = np.zeros_like(tables.pair_alone)
        for pair in self.pairs:
            alone[0, *pair] = costs.send_s * NS * link_map.send_slowness(*pair)
        capacity = np.ascontiguousarray(link_map.capacity_bytes_per_ns, dtype=np.float64)
        with np.errstate(divide="ignore"):
            unit = self.units / capacity
        computes, of = tables.task_clock != 0, self.payload_of
        changed = tables._replace(
            task_received=_in_place_of(tables.task_received, own.loads, variation.loads),
            task_load=_in_place_of(tables.task_load, own.loads, variation.loads),
            task_node_load=_in_place_of(tables.task_node_load, own.node_loads, variation.node_loads),
            task_fixed_s=fixed_s,
            task_row_s=row_s,
            task_cv=np.where(computes, cv, 0.0),
            task_clock=np.where(computes, _address_of(clock) + self.stage_of * clock[0].nbytes, 0),
            task_launch=np.array([*(round(cost.launch_s * NS) for cost in moved), 0], dtype=np.int64)[of],
            task_payload=np.where(of >= 0, _address_of(payload_ns) + of * payload_ns[0].nbytes, 0),
            task_nic_s=np.append(nic_s, 0.0)[of],
            task_scale_up_s=np.append(scale_up_s, 0.0)[of],
            pair_alone=alone,
            capacity=capacity,
            unit=unit,
        )
        kept = *self.lowered.kept, clock, payload_ns, self.program
        return replace(self.lowered, tables=changed, kept=kept)

    def _prices(self, costs: CostTable) -> tuple[FloatArray, FloatArray]:
        """`fixed_s` and `row_s` of every task."""
        shares = {
            key: busy_shares(part.template, part.stages, self.program.blocks, costs)
            for key, part in self.parts.items()
        }
        each = [
            costs.phase_s(kind, phase, shares[share[0]][share[1]] if isinstance(share, tuple) else share)
            for kind, phase, share in self.prices
        ]
        fixed_s, row_s = np.array(each)[self.price_of].T
        return np.ascontiguousarray(fixed_s), np.ascontiguousarray(row_s)

    def _usual(self, fixed_s: FloatArray, row_s: FloatArray, variation: MemberVariation) -> bool:
        """Whether tasks with and without compute stay such, and none takes unusually long."""
        tables, facts, cv = self.lowered.tables, load_facts(variation), float(variation.jitter_cv)
        rows = np.where(tables.task_received != 0, facts.most, 1.0)
        clock = float(variation.clock.max(initial=0.0)) * self.lowered.sizes.members
        longest_s = (fixed_s + row_s * rows) * (1.0 + MOST_DEVIATIONS * cv) * clock
        same = (fixed_s + row_s == 0.0) == (tables.task_fixed_s + tables.task_row_s == 0.0)
        same &= (row_s == 0.0) == (tables.task_row_s == 0.0)
        return facts.least >= 0.0 and bool((same & (longest_s <= LONGEST_PHASE_S)).all())

    def _same_steps(self, rates: StepRates) -> bool:
        """Whether the steps have the same tasks, noise and bytes."""
        (costs, variation, link_map), before, own = rates, self.program.costs, self.program.variation
        cv = variation.jitter_cv
        return (
            isinstance(link_map, FoldedLinkMap)
            and costs.compute.keys() == before.compute.keys()
            and costs.transfer.keys() == before.transfer.keys()
            and (costs.send_bytes, costs.send_s == 0.0, costs.scatters_wait, costs.gathers_wait)
            == (before.send_bytes, before.send_s == 0.0, before.scatters_wait, before.gathers_wait)
            and [_bytes(costs.transfer[key]) for key in self.payloads] == self.bytes
            and link_map.sends_like(self.program.link_map)
            and isinstance(cv, float)
            and (cv == 0.0) == (own.jitter_cv == 0.0)
            and (variation.seed, variation.stands_for, variation.in_step, variation.clock.shape)
            == (own.seed, own.stands_for, own.in_step, own.clock.shape)
            and variation.loads.shape == own.loads.shape
            and (_same_loads(variation, own) or (_send_all(variation) and _send_all(own)))
        )


def _bytes(cost: TransferCost) -> tuple[float, float]:
    return cost.nic_bytes, cost.scale_up_bytes


def _same_loads(one: MemberVariation, other: MemberVariation) -> bool:
    """Whether the loads, which are read-only, are views of the same numbers."""
    pairs = (one.loads, other.loads), (one.node_loads, other.node_loads)
    return all(a.shape == b.shape and _address_of(a) == _address_of(b) for a, b in pairs)


def _send_all(variation: MemberVariation) -> bool:
    """Whether no transfer sends fewer bytes than under even load, and loads lie one after the other."""
    loads = variation.loads, variation.node_loads
    return all(array.flags.c_contiguous for array in loads) and not load_facts(variation).dropping


def _in_place_of(addresses: IntArray, own: FloatArray, other: FloatArray) -> IntArray:
    """Addresses, of which those inside the array `own` point to the same places of `other`."""
    offset = addresses - _address_of(own)
    return np.where((offset >= 0) & (offset < own.nbytes), _address_of(other) + offset, addresses)


def _address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class PatternEntries(NamedTuple):
    """The entries of a pattern link by link: their number on each link, and the source and share of each."""

    counts: IntArray
    source: IntArray
    share: FloatArray


def _entries(
    pattern: ExchangePattern, members: int, shapes: dict[tuple[bytes, ...], PatternEntries]
) -> PatternEntries:
    """The entries of a pattern, which it shares with those that differ only in the numbers of their links."""
    arrays = pattern.entry_link, pattern.entry_pair, pattern.entry_share, pattern.loaded
    key = (
        *(array.tobytes() for array in arrays),
        bytes(str((pattern.outer_pairs, len(pattern.links))), "ascii"),
    )
    if key not in shapes:
        # Those of one link keep their order, and so does their sum.
        order = np.argsort(pattern.entry_link, kind="stable")
        pair = pattern.entry_pair[order]
        shapes[key] = PatternEntries(
            np.bincount(pattern.entry_link, minlength=len(pattern.links)),
            pattern.loaded[pair] + members * (pair >= pattern.outer_pairs),
            pattern.entry_share[order],
        )
    return shapes[key]


def _starts(counts: Sequence[int] | IntArray) -> IntArray:
    return np.append(0, np.cumsum(np.asarray(counts, dtype=np.int64))).astype(np.int64)


def _ints(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)


def _floats(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0), *parts])
