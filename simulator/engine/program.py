"""The engine's input: task templates, and the duration of every task before the simulation starts.

A `Program` is plain data. Its vectors have one entry a *member*, a GPU of one expert-parallel group of each
pipeline rank. Folded resolution runs one program, full resolution one for every such group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.table import CostTable, PhaseCost, TransferCost
from moesim.simulator.engine.demand import Demand
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import Schedule
from moesim.simulator.schedules.template import OverlapOrder, Stream

TRANSFER_STREAMS: tuple[Stream, ...] = ("communication", "sharding")


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


class TransferRows(NamedTuple):
    """Durations of a transfer phase for every micro-batch: launch after the barrier, then the payload."""

    launch_ns: int
    payload_ns: FloatArray
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


class PlacedStep(NamedTuple):
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
