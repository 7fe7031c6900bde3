"""Compiles a priced schedule to a program: templates of all steps with the durations of their tasks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from moesim.simulator.common.bounded_cache import ENTRY_BYTES, BoundedCache, Same
from moesim.simulator.cost.formulas import busy_share
from moesim.simulator.cost.table import CostTable, Mode
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.engine.program import (
    CompiledTask,
    CompiledTemplate,
    MemberVariation,
    PlacedStep,
    PricedSchedule,
    Program,
    TemplatePart,
)
from moesim.simulator.engine.task_durations import TaskDurations
from moesim.simulator.model.block import may_route
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import Action, Overlap, Schedule
from moesim.simulator.schedules.template import (
    EP_PHASES,
    SHARDING_PHASES,
    ActionKind,
    Stream,
    Template,
    build_template,
)


def compile_program(
    priced: PricedSchedule, variation: MemberVariation, link_map: LinkMap, group: int = 0
) -> Program:
    """Compute the duration of every task of a schedule, for all micro-batches and members of a group.

    `variation` holds MoE loads in stage and block order. Run-to-run noise is drawn separately for every
    `group`.
    """
    schedule = priced.schedule
    compiler = _Compiler(priced, variation, link_map, group)
    outlines = _OUTLINES.get(
        Same(schedule),
        lambda: (schedule, tuple(tuple(_outline(step) for step in steps) for steps in schedule.ranks)),
    )[1]
    ranks = tuple([compiler.place(rank, steps) for rank, steps in enumerate(outlines)])
    members = variation.clock.shape[1]
    return Program(schedule, members, ranks, priced.costs, priced.blocks, variation, link_map, group)


StepOutline = tuple[tuple[ActionKind, int, int], str, tuple[int, int], tuple[int, int]]
"""(kind and stages of its template), label, stages and micro-batches of a step."""

_OUTLINES: BoundedCache[tuple[Schedule, tuple[tuple[StepOutline, ...], ...]]] = BoundedCache(
    100_000, lambda kept: sum(map(len, kept[1]))
)
"""Outlines of the steps of the schedules before, limited by their number."""


def _outline(step: Action | Overlap) -> StepOutline:
    forward: Action | None
    backward: Action | None
    kind: ActionKind
    if isinstance(step, Overlap):
        forward, backward = step.first, step.second
        kind = "F&B" if step.second.kind == "B" else "F&I"
    else:
        forward, backward = (step, None) if step.kind == "F" else (None, step)
        kind = step.kind
    stages = (forward.stage if forward else -1, backward.stage if backward else -1)
    micro = (forward.microbatch if forward else -1, backward.microbatch if backward else -1)
    return (kind, *stages), str(step), stages, micro


class _CompiledPart(Struct, frozen=True):
    """A compiled template without its transfers, the same on all pipeline ranks that run it.

    `transfers`: position of each transfer task, its number among routed blocks if the load decides its bytes,
    and its mode.
    """

    template: CompiledTemplate
    transfers: tuple[tuple[int, int | None, Mode], ...]


_TOKENS: BoundedCache[object] = BoundedCache(4096)
"""An object for the prices of a block or of a stage, so that the keys made from it are short."""


def _part_bytes(part: _CompiledPart) -> int:
    return sum(task.compute.nbytes + ENTRY_BYTES for task in part.template.tasks)


_PARTS: BoundedCache[_CompiledPart] = BoundedCache(128_000_000, _part_bytes)
"""Parts of the scenarios before. Most of their arrays are shared, so that they take less than this."""


class _Compiler:
    """Compiles steps and keeps what they share: templates by stage pair."""

    def __init__(
        self, priced: PricedSchedule, variation: MemberVariation, link_map: LinkMap, group: int
    ) -> None:
        self.schedule, self.blocks, self.costs, self.order = (
            priced.schedule,
            priced.blocks,
            priced.costs,
            priced.order if priced.schedule.paired else None,
        )
        routed = [(s, b) for s, kinds in enumerate(self.blocks) for b, k in enumerate(kinds) if may_route(k)]
        self.routed = {place: number for number, place in enumerate(routed)}
        self.phases = {
            kind: self.costs.phases(kind) for kind in dict.fromkeys(k for kinds in self.blocks for k in kinds)
        }
        self.durations = TaskDurations(self.schedule, len(self.blocks), variation, link_map, group)
        self.parts: dict[tuple[ActionKind, int, int], _CompiledPart] = {}
        self.price_keys: dict[tuple[BlockKind, bool], Hashable] = {}
        self.side_keys: dict[tuple[int, bool], Hashable] = {}

    def place(self, rank: int, steps: tuple[StepOutline, ...]) -> tuple[PlacedStep, ...]:
        codes = {key: self._on_rank(rank, key) for key in dict.fromkeys([step[0] for step in steps])}
        return tuple([PlacedStep(label, codes[key], *both) for key, label, *both in steps])

    def _on_rank(self, rank: int, key: tuple[ActionKind, int, int]) -> CompiledTemplate:
        part = self.parts.get(key)
        if part is None:
            part = self.parts[key] = self._part(*key)
        if not part.transfers:
            return part.template
        tasks = list(part.template.tasks)
        for position, routed, mode in part.transfers:
            task = tasks[position]
            cost = self.costs.transfer[task.kind, task.phase, mode]
            transfer = self.durations.transfer(rank, task.phase, routed, cost)
            tasks[position] = CompiledTask(*task[:8], transfer, task.stream)
        return replace(part.template, tasks=tuple(tasks))

    def _part(self, kind: ActionKind, forward: int, backward: int) -> _CompiledPart:
        sides = (forward, backward)
        sets = [[self.phases[k] for k in self.blocks[s]] if s >= 0 else [] for s in sides]
        waits = {"scatters_wait": self.costs.scatters_wait, "gathers_wait": self.costs.gathers_wait}
        template = build_template(kind, sets[0], sets[1], self.order, **waits)
        key = (
            Same(template),
            tuple(self._side_key(stage, template.on_two_streams) if stage >= 0 else None for stage in sides),
            self.durations.loads.key,
            self.schedule.awaits_sends,
        )
        return _PARTS.get(key, lambda: self._new_part(template, sides))

    def _side_key(self, stage: int, paired: bool) -> Hashable:
        """Stands for the blocks of a stage, their prices, noise and numbers among routed blocks."""
        key = (stage, paired)
        if key not in self.side_keys:
            blocks = self.blocks[stage]
            numbers = tuple([self.routed.get((stage, block)) for block in range(len(blocks))])
            prices = tuple([self._prices_key(kind, paired) for kind in blocks])
            self.side_keys[key] = _TOKENS.get((self.durations.stage_tokens[stage], numbers, prices), object)
        return self.side_keys[key]

    def _prices_key(self, kind: BlockKind, paired: bool) -> Hashable:
        """Stands for a block's prices of compute with their evidence, and for its transfers by phase."""
        key = (kind, paired)
        if key not in self.price_keys:
            prices = [
                (phase, mode, price, price.evidence, price.moved)
                for (k, phase, mode), price in self.costs.compute.items()
                if k == kind and (mode != "alone") == paired
            ]
            moved = [
                # With shares by duration, the payloads of an overlapped pair decide its compute (eq. E20).
                (phase, cost.payload_s if paired else None)
                for (k, phase, mode), cost in self.costs.transfer.items()
                if k == kind and (mode != "alone") == paired
            ]
            self.price_keys[key] = _TOKENS.get((kind, tuple(prices), tuple(moved)), object)
        return self.price_keys[key]

    def _new_part(self, template: Template, sides: tuple[int, int]) -> _CompiledPart:
        mode: Mode = "overlapped" if template.on_two_streams else "alone"
        shares = busy_shares(template, sides, self.blocks, self.costs)
        tasks: list[CompiledTask] = []
        transfers: list[tuple[int, int | None, Mode]] = []
        before: list[int | None] = []
        last: dict[Stream, int] = {}
        for task in template.tasks:
            stage = sides[task.side]
            block_kind = self.blocks[stage][task.block]
            share = shares.get(task.layer_pair, task.overlapped_share)
            price = self.costs.phase(block_kind, task.phase, share)
            routed = self.routed.get((stage, task.block))
            rows = self.durations.rows((stage, task.block, task.phase), price, routed)
            stream: Stream = "compute"
            if (block_kind, task.phase, mode) in self.costs.transfer:
                # The bytes of routed rows depend on the load; those of a parameter gather do not.
                transfers.append((len(tasks), routed if task.phase in EP_PHASES else None, mode))
                stream = task.stream
            before.append(last.get(stream))
            last[stream] = len(tasks)
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
                    None,
                    stream,
                )
            )
        late = self.schedule.awaits_sends  # outputs are posted when the whole action has ended
        positions = tuple(position for position, _, _ in transfers)
        compiled = CompiledTemplate(
            template.kind,
            tuple(tasks),
            None if late else template.forward_out,
            None if late else template.backward_out,
            positions,
            tuple(before),
            TemplatePart(tuple(tasks), positions, *self.durations.shape, template, sides),
        )
        return _CompiledPart(compiled, tuple(transfers))


def busy_shares(
    template: Template, stages: tuple[int, int], blocks: Sequence[Sequence[BlockKind]], costs: CostTable
) -> dict[int, float]:
    """Share of each layer pair's compute that runs beside busy communication SMs, by duration (eq. E20).

    `stages`: those of both sides; `blocks`: the blocks of every stage. Empty where durations do not decide.
    """
    if not template.by_duration:
        return {}
    moved: dict[int, float] = {}
    computed: dict[int, float] = {}
    for task in template.tasks:
        kind = blocks[stages[task.side]][task.block]
        key: tuple[BlockKind, Phase, Mode] = (kind, task.phase, "overlapped")
        transfer, price = costs.transfer.get(key), costs.compute.get(key)
        pair = task.layer_pair
        if task.phase in SHARDING_PHASES:
            continue  # a library's collectives run on SMs of their own
        if transfer is not None:
            before = price.fixed_s + price.row_s if price else 0.0
            moved[pair] = moved.get(pair, 0.0) + transfer.payload_s + before
        elif price is not None:
            computed[pair] = computed.get(pair, 0.0) + price.fixed_s + price.row_s
    return {
        pair: float(busy_share(moved.get(pair, 0.0), computed.get(pair, 0.0)))
        for pair in {task.layer_pair for task in template.tasks}
    }
