"""The engine's input: task templates, and the duration of every task before the simulation starts.

A `Program` is plain data. Its vectors have one entry a *member*, a GPU of one expert-parallel group of each
pipeline rank. Folded resolution runs one program, full resolution one for every such group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.formulas import busy_share, compute_seconds, payload_seconds
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost, TransferCost
from moesim.simulator.engine.demand import Demand
from moesim.simulator.engine.durations import NS, slowest_draws, whole_ns
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.model.block import may_route
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import Action, Overlap, Schedule
from moesim.simulator.schedules.template import (
    EP_PHASES,
    WEIGHT_OF,
    ActionKind,
    OverlapOrder,
    Stream,
    Template,
    build_template,
)

TRANSFER_STREAMS: tuple[Stream, ...] = ("communication", "sharding")

LOAD_TOLERANCE = 1e-9
"""Mean rows of the members that are below 1 by less than this count as complete."""


@dataclass(frozen=True, slots=True)
class MemberVariation:
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


@dataclass(frozen=True, slots=True)
class TransferRows:
    """Durations of a transfer phase for every micro-batch: launch after the barrier, then the payload."""

    launch_ns: int
    payload_ns: list[float]
    """Payload of the slowest member, alone on its links, per micro-batch."""
    member_ns: IntArray
    """Payload of each member, alone on its links [micro-batches, members]."""
    cost: TransferCost
    demand: Demand | None
    """Links and bytes, where they are the same for every micro-batch."""
    load: FloatArray
    """Relative received rows [micro-batches, members]; a single row where routing does not matter."""
    node_load: FloatArray
    """`load` averaged over the members of a node."""


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """One task of a template with its durations for every micro-batch."""

    phase: Phase
    kind: BlockKind
    block: int
    side: int
    deps: tuple[int, ...]
    overlapped_share: float | None
    """Share of the task that runs beside busy communication SMs; None outside overlapped pairs."""
    price: PhaseCost
    rows_ns: IntArray
    """Compute in nanoseconds [micro-batches, members]; for a transfer, the small kernels before it."""
    transfer: TransferRows | None
    stream: Stream = "compute"
    """In-order stream that the task runs on."""


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
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
    compute_ns: tuple[FloatArray, FloatArray]
    """Compute of each side per micro-batch, averaged over the members, without exposed collectives."""
    weight_ns: FloatArray
    """Weight-gradient part of that compute (backward side)."""


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """One schedule step on its pipeline rank."""

    label: str
    code: CompiledTemplate
    stages: tuple[int, int]
    """(stage of the forward side, stage of the backward side); -1 where the side is absent."""
    microbatches: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Program:
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

    def hops(self, rank: int, step: PlacedStep) -> list[tuple[int, int]]:
        """(source, target) pipeline ranks of a step's sends, for its activation and its gradient."""
        if self.costs.send_s == 0.0:
            return []
        forward = step.stages[0] + 1 if step.stages[0] >= 0 else -1
        backward = step.stages[1] - 1 if step.code.kind != "W" else -1
        to = [
            self.schedule.rank_of(stage, microbatch)
            for stage, microbatch in zip((forward, backward), step.microbatches, strict=True)
            if 0 <= stage < self.schedule.n_stages
        ]
        return [(rank, target) for target in to if target != rank]


@dataclass(frozen=True, slots=True)
class PricedSchedule:
    """The schedule, the blocks of its stages and all prices, which the groups of a step share.

    `blocks[stage]`: block kinds of the stage in forward order. `order`: how an overlapped pair interleaves.
    """

    schedule: Schedule
    blocks: tuple[tuple[BlockKind, ...], ...]
    costs: CostTable
    order: OverlapOrder | None


def compile_program(
    priced: PricedSchedule, variation: MemberVariation, link_map: LinkMap, group: int = 0
) -> Program:
    """Compute the duration of every task of a schedule, for all micro-batches and members of a group.

    `variation` holds MoE loads in stage and block order. Run-to-run noise is drawn separately for every
    `group`.
    """
    members = variation.clock.shape[1]
    compiler = _Compiler(priced, variation, link_map, group)
    ranks = tuple(
        tuple(compiler.place(rank, step) for step in steps)
        for rank, steps in enumerate(priced.schedule.ranks)
    )
    return Program(priced.schedule, members, ranks, priced.costs, priced.blocks, variation, link_map, group)


class _Compiler:
    """Compiles steps and caches what they share: templates by stage pair, durations by block and phase."""

    def __init__(
        self, priced: PricedSchedule, variation: MemberVariation, link_map: LinkMap, group: int
    ) -> None:
        schedule, blocks = priced.schedule, priced.blocks
        self.schedule, self.blocks, self.costs, self.order = schedule, blocks, priced.costs, priced.order
        self.variation, self.members = variation, variation.clock.shape[1]
        self.link_map, self.group = link_map, group
        routed = [(s, b) for s, kinds in enumerate(blocks) for b, k in enumerate(kinds) if may_route(k)]
        self.routed = {place: number for number, place in enumerate(routed)}
        # Where capacity dropped rows, a transfer sends fewer bytes than under even load.
        kept = variation.loads.mean(axis=2) if variation.loads.size else np.ones((len(routed), 1))
        self.dropping = {
            number for number, rows in enumerate(kept) if float(rows.min()) < 1.0 - LOAD_TOLERANCE
        }
        micro = range(schedule.microbatches)
        # A stage of a bidirectional schedule runs on two pipeline ranks, one per direction.
        self.clock = [
            variation.clock[[schedule.rank_of(stage, m) for m in micro]] for stage in range(len(blocks))
        ]
        cv = variation.jitter_cv
        self.jitter = [
            cv if isinstance(cv, float) else cv[[schedule.rank_of(stage, m) for m in micro]]
            for stage in range(len(blocks))
        ]
        self.templates: dict[tuple[int, ActionKind, int, int], CompiledTemplate] = {}
        self.noise: dict[tuple[int, int, Phase], FloatArray] = {}
        self.payloads: dict[tuple[object, ...], tuple[list[float], IntArray]] = {}
        self.even = np.ones((1, self.members))
        self.rows: dict[tuple[int, int, Phase, PhaseCost], IntArray] = {}

    def place(self, rank: int, step: Action | Overlap) -> PlacedStep:
        forward, backward = (step.first, step.second) if isinstance(step, Overlap) else _sides(step)
        kind: ActionKind = (
            step.kind if isinstance(step, Action) else "F&B" if step.second.kind == "B" else "F&I"
        )
        stages = (forward.stage if forward else -1, backward.stage if backward else -1)
        micro = (forward.microbatch if forward else -1, backward.microbatch if backward else -1)
        key = (rank, kind, *stages)
        if key not in self.templates:
            self.templates[key] = self._compile(*key)
        return PlacedStep(str(step), self.templates[key], stages, micro)

    def _compile(self, rank: int, kind: ActionKind, forward: int, backward: int) -> CompiledTemplate:
        sets = [[self.costs.phases(k) for k in self.blocks[s]] if s >= 0 else [] for s in (forward, backward)]
        template = build_template(kind, sets[0], sets[1], self.order)
        mode: Mode = "overlapped" if template.on_two_streams else "alone"
        shares = self._busy_shares(template, (forward, backward)) if template.by_duration else {}
        tasks = []
        for task in template.tasks:
            stage = (forward, backward)[task.side]
            block_kind = self.blocks[stage][task.block]
            cost = self.costs.transfer.get((block_kind, task.phase, mode))
            # The bytes of routed rows depend on the load; those of a parameter gather do not.
            routed = self.routed.get((stage, task.block)) if task.phase in EP_PHASES else None
            transfer = None if cost is None else self._transfer(rank, task.phase, routed, cost)
            share = shares.get(task.layer_pair, task.overlapped_share)
            price = self.costs.phase(block_kind, task.phase, share)
            rows = self._compute_rows(stage, task.block, task.phase, price)
            tasks.append(
                CompiledTask(
                    task.phase,
                    block_kind,
                    task.block,
                    task.side,
                    task.deps,
                    share,
                    price,
                    rows,
                    transfer,
                    "compute" if transfer is None else task.stream,
                )
            )
        late = self.schedule.awaits_sends  # outputs are posted when the whole action has ended
        return CompiledTemplate(
            kind,
            tuple(tasks),
            None if late else template.forward_out,
            None if late else template.backward_out,
            tuple(n for n, task in enumerate(tasks) if task.transfer is not None),
            _before_on_stream(tasks),
            *self._totals(tasks),
        )

    def _busy_shares(self, template: Template, stages: tuple[int, int]) -> dict[int, float]:
        """Share of each layer pair's compute that runs beside busy communication SMs (eq. E20)."""
        moved: dict[int, float] = {}
        computed: dict[int, float] = {}
        for task in template.tasks:
            kind = self.blocks[stages[task.side]][task.block]
            key: tuple[BlockKind, Phase, Mode] = (kind, task.phase, "overlapped")
            transfer, price = self.costs.transfer.get(key), self.costs.compute.get(key)
            pair = task.layer_pair
            if transfer is not None:
                before = price.fixed_s + price.row_s if price else 0.0
                moved[pair] = moved.get(pair, 0.0) + transfer.payload_s + before
            elif price is not None:
                computed[pair] = computed.get(pair, 0.0) + price.fixed_s + price.row_s
        return {
            pair: float(busy_share(moved.get(pair, 0.0), computed.get(pair, 0.0)))
            for pair in {task.layer_pair for task in template.tasks}
        }

    def _totals(self, tasks: list[CompiledTask]) -> tuple[tuple[FloatArray, FloatArray], FloatArray]:
        """Sums over a template that the report needs, for all micro-batches at once."""
        zero = np.zeros(self.schedule.microbatches)
        compute, weight = [zero.copy(), zero.copy()], zero.copy()
        for task in tasks:
            if task.transfer is None:
                mean = task.rows_ns.mean(axis=1)
                compute[task.side] += mean - task.price.exposed_s * NS
                if task.phase in WEIGHT_OF:
                    weight += mean
        return (compute[0], compute[1]), weight

    def _compute_rows(self, stage: int, block: int, phase: Phase, cost: PhaseCost) -> IntArray:
        """Nanoseconds [micro-batches, members] of a compute phase at a price."""
        key = (stage, block, phase, cost)
        if key not in self.rows:
            number = self.routed.get((stage, block)) if cost.row_s else None
            load = 1.0 if number is None else self.variation.loads[number]
            shape = (self.schedule.microbatches, self.members)
            seconds = np.empty(shape)
            seconds[:] = compute_seconds(cost.fixed_s, cost.row_s, load)
            if cost.fixed_s + cost.row_s > 0.0:
                seconds *= self.clock[stage] * self._noise(key[:3], shape)
            self.rows[key] = whole_ns(seconds)
        return self.rows[key]

    def _noise(self, key: tuple[int, int, Phase], shape: tuple[int, int]) -> FloatArray | float:
        """Run-to-run factor of a phase, drawn once a micro-batch and member for all modes."""
        cv = self.jitter[key[0]]
        if isinstance(cv, float) and cv == 0.0:
            return 1.0
        if key not in self.noise:
            entropy = [self.variation.seed, key[0], key[1], _PHASE_NUMBER[key[2]]]
            entropy += [self.group] if self.group else []
            draws = slowest_draws(
                np.random.default_rng(entropy), shape, self.variation.in_step, self.variation.stands_for
            )
            self.noise[key] = np.maximum(1.0 + cv * draws, 0.0)
        return self.noise[key]

    def _transfer(self, rank: int, phase: Phase, routed: int | None, cost: TransferCost) -> TransferRows:
        load = self.even if routed is None else self.variation.loads[routed]
        node_load = self.even if routed is None else self.variation.node_loads[routed]
        payload_ns, member_ns = self._payload(rank, phase, routed, cost)
        return TransferRows(
            round(cost.launch_s * NS),
            payload_ns,
            member_ns,
            cost,
            self.link_map.uniform(rank, phase, cost) if routed not in self.dropping else None,
            load,
            node_load,
        )

    def _payload(
        self, rank: int, phase: Phase, routed: int | None, cost: TransferCost
    ) -> tuple[list[float], IntArray]:
        """Payload in ns of the slowest member and of each member; phases with equal rates share both."""
        nic, scale_up = self.link_map.slowness(rank, phase)
        healthy = isinstance(nic, float) and isinstance(scale_up, float)
        key = (routed, cost.nic_s, cost.scale_up_s, None if healthy else (rank, phase))
        if key not in self.payloads:
            shape = (self.schedule.microbatches, self.members)
            load = self.even if routed is None else self.variation.loads[routed]
            node_load = self.even if routed is None else self.variation.node_loads[routed]
            payload = payload_seconds((cost.nic_s, node_load), (cost.scale_up_s, load), (nic, scale_up))
            payload = np.broadcast_to(payload, shape)
            slowest = (payload.max(axis=1) * NS).tolist()
            self.payloads[key] = slowest, whole_ns(payload)
        return self.payloads[key]


def _before_on_stream(tasks: Sequence[CompiledTask]) -> tuple[int | None, ...]:
    last: dict[Stream, int] = {}
    before = []
    for number, task in enumerate(tasks):
        before.append(last.get(task.stream))
        last[task.stream] = number
    return tuple(before)


def _sides(step: Action) -> tuple[Action | None, Action | None]:
    return (step, None) if step.kind == "F" else (None, step)


_PHASE_NUMBER: dict[Phase, int] = {phase: number for number, phase in enumerate(get_args(Phase))}
"""Part of the seed of a phase's jitter."""
