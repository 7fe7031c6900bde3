"""From a scenario to the seconds of every phase, transfer and synchronisation (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, fsum, log2

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import GENERIC
from moesim.simulator.as_run import as_run
from moesim.simulator.block_prices import block_compute, block_transfers
from moesim.simulator.collectives.ring import busiest_bytes
from moesim.simulator.cost.communication import (
    EpOperation,
    Links,
    all_to_all_seconds,
    collective_beside_compute,
    engine_transfer,
    ep_transfer,
    notify_seconds,
    ring_seconds,
    send_seconds,
)
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.overlap import Beside, behind_window
from moesim.simulator.cost.sharded import slowed_beside, transfer_cost
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost, SyncCost, TransferCost
from moesim.simulator.launches import held_back_by_host
from moesim.simulator.layout.groups import sends_on_a_link
from moesim.simulator.layout.in_flight import held_by_rank
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.routing import Gate, TargetStatistics, expected_targets, transfer_bytes
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.counts import block_parameters, expert_parameters
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.operators import block_operators, optimizer_operators
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, row_bytes
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.price_evidence import Evidence
from moesim.simulator.profile_use import collective_residual, communication_law
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Overlap, Schedule

EP_OPERATION: dict[Phase, EpOperation] = {
    "dispatch F": "dispatch",
    "combine B": "dispatch",  # the backward of a combine sends rows out again
    "combine F": "combine",
    "dispatch B": "combine",
}


@dataclass(slots=True)
class Pricer:
    """Prices the parts of one scenario; every method is a pure function of the fields."""

    scenario: Scenario
    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile
    layout: Layout
    evidence: Evidence = field(default_factory=Evidence)
    _links: Links | None = field(default=None, init=False, repr=False)
    _parameters: dict[BlockKind, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one model replica."""
        return self.scenario.parallel.microbatch * self.scenario.batch.sequence_length

    @property
    def ep_tokens(self) -> float:
        """Tokens that one GPU sends into its expert-parallel group: CP and TP split them."""
        plan = self.scenario.parallel
        return self.tokens / (plan.cp * plan.tp)

    @property
    def received_rows(self) -> float:
        """Expert rows that a GPU computes under uniform routing."""
        return self.ep_tokens * self.shape.moe.top_k if self.shape.moe else 0.0

    @property
    def received_tokens(self) -> float | None:
        """Distinct tokens behind those rows: one that chose two experts of a GPU arrives once."""
        if self.shape.moe is None or self.scenario.parallel.ep == 1:
            return None
        return self.ep_tokens * self.targets().distinct_gpus

    @property
    def ep_nodes(self) -> int:
        """Nodes that one expert-parallel group spans."""
        return self.layout.nodes_spanned(self.layout.ep_group(0))

    @property
    def links(self) -> Links:
        """Nominal link rates and latencies of one GPU."""
        if self._links is not None:
            return self._links
        node, fabric = self.cluster.node, self.cluster.network.fabric
        self._links = Links(
            scale_up_bytes_per_s=node.scale_up_bytes_per_s,
            scale_up_latency_s=node.scale_up_latency_s,
            nic_bytes_per_s=self.nic_bytes_per_s,
            nic_latency_s=fabric.latency_cross_leaf.value if fabric else 0.0,
            gpus_per_node=node.n_gpus,
            curves="engine." if self.cluster.accelerator.communication_engine else "",
            wiring=node.scale_up_shares,
            ep_per_node=self.scenario.parallel.ep // self.ep_nodes,
        )
        return self._links

    @property
    def nic_bytes_per_s(self) -> float:
        """Nominal scale-out rate of one GPU: its NICs, or their switch ports where those are slower."""
        node, fabric = self.cluster.node, self.cluster.network.fabric
        if self.cluster.nodes == 1 or fabric is None:
            return 0.0
        return min(node.scale_out_bytes_per_s, fabric.link_bandwidth.value * node.n_nics_per_gpu)

    def targets(self) -> TargetStatistics:
        """Expected distinct targets of a token.

        A global placement spreads the experts of a group over all nodes: the gate's limit on groups then
        limits no nodes, and the statistics are those of a gate without it.
        """
        assert self.shape.moe is not None
        routing = self.scenario.routing
        scattered = routing.eplb is not None and routing.eplb.policy == "global"
        ranking = "unlimited" if scattered else routing.gate
        gate = Gate.of(self.shape.moe, ranking, routing.groups_per_token)
        per_node = self.scenario.parallel.ep // self.ep_nodes
        return expected_targets(gate, self.scenario.parallel.ep, per_node)

    # -- compute -------------------------------------------------------------------------------------

    def operators(self, kind: BlockKind) -> dict[Phase, tuple[Operator, ...]]:
        """Operators of a block by phase."""
        s, plan = self.scenario, self.scenario.parallel
        found = block_operators(
            self.shape,
            kind,
            s.recipe,
            tokens=self.tokens,
            sequence=s.batch.sequence_length,
            tp=plan.tp,
            cp=plan.cp,
            ep=plan.ep,
            received_rows=self.received_rows,
            received_tokens=self.received_tokens,
            # The policies differ in what is kept (bytes), not in what is computed again.
            recompute="selective" if s.recompute == "deepseek-v3" else s.recompute,
            redundant_experts=s.routing.redundant_experts,
            unfused_attention=s.software.attention == "unfused",
            dropout=s.software.dropout,
            expert_tp=plan.expert_tp,
            sequence_parallel=plan.sequence_parallel,
        )
        dense, expert = self.block_parameters(kind)
        sharded = dense * (self.layout.dp * plan.cp > 1) + expert * (self.layout.expert_dp > 1)
        return as_run(found, s.software, s.recipe, plan.zero_stage, dense + expert, sharded)

    def context(self, mode: Mode) -> SmContext:
        """SMs of a phase: all of them, or all but the communication SMs, which idle or are busy."""
        return SmContext(0 if mode == "alone" else self.scenario.communication.sms, mode == "beside")

    def phase(self, operators: tuple[Operator, ...], mode: Mode) -> PhaseCost:
        """Seconds of one phase: the part that grows with routed rows, and the rest."""
        fixed = row = best = worst = 0.0
        for operator in operators:
            cost = operator_seconds(operator, self.cluster.accelerator, self.profile, self.context(mode))
            self.evidence.add(cost.curve_ids, (*cost.extrapolations, *cost.assumptions))
            self.evidence.weigh(cost.curve_ids[0], cost.seconds, cost.residual)
            best += cost.best_seconds
            worst += cost.worst_seconds
            if operator.per_received_row:
                row += cost.seconds
            else:
                fixed += cost.seconds
        return PhaseCost(fixed, row, 0.0, best, worst)

    # -- transfers -----------------------------------------------------------------------------------

    def ep_slowdown(self, mode: Mode) -> tuple[float, float]:
        """How much longer an EP kernel takes beside compute, and how sure that is."""
        if mode == "alone":
            return 1.0, 0.0
        law = communication_law(self.profile)
        if law is None:
            self.evidence.extrapolated.add(
                f"profile {self.profile.name}: no law for communication beside compute, no slow-down priced"
            )
            return 1.0, 0.0
        reading = law.curve.at(self.scenario.communication.sms)
        self.evidence.add([law.id], [reading.note] if reading.extrapolated else [])
        return reading.value, law.residual.relative

    def ep_phase(self, phase: Phase, mode: Mode) -> TransferCost:
        """One dispatch or combine of a micro-batch."""
        operation = EP_OPERATION[phase]
        recipe = self.scenario.recipe
        if self.scenario.communication.kernels == "nccl":
            return self._nccl_phase()
        wire = recipe.dispatch if operation == "dispatch" else recipe.combine
        bytes_ = transfer_bytes(self.targets(), self.ep_tokens, row_bytes(self.shape.hidden, wire))
        engine = self.cluster.accelerator.communication_engine
        if engine is not None:
            time = engine_transfer(bytes_, self.links, self.profile, nodes=self.ep_nodes)
        else:
            slowdown, residual = self.ep_slowdown(mode)
            time = ep_transfer(
                operation,
                bytes_,
                self.links,
                self.profile,
                sms=self.scenario.communication.sms,
                nodes=self.ep_nodes,
                kernels=self.scenario.communication.kernels,
                slowdown=slowdown,
                slowdown_residual=residual,
            )
        self.evidence.add(time.curve_ids, time.extrapolations)
        return transfer_cost(time, bytes_.ib_bytes, bytes_.nvlink_bytes)

    def _nccl_phase(self) -> TransferCost:
        """All-to-all of NCCL: every chosen expert gets its own copy of a row, in BF16 (eq. O6)."""
        assert self.shape.moe is not None
        sent = self.ep_tokens * self.shape.moe.top_k * self.shape.hidden * 2.0
        time = all_to_all_seconds(sent, self.scenario.parallel.ep, self.ep_nodes, self.links, self.profile)
        self.evidence.add(time.curve_ids, time.extrapolations)
        return transfer_cost(time, time.nic_bytes, time.scale_up_bytes)

    def _note_carried_shares(self) -> None:
        """Say where shares of link rates stand on other hardware, or on an assumption."""
        accelerator, profile = self.cluster.accelerator, self.profile
        engine = accelerator.communication_engine
        if engine is not None:
            self.evidence.extrapolated.add(
                f"{accelerator.name}: a dedicated engine ({engine.name}) moves collectives at assumed shares "
                "of the link rates (engine.* curves); no slow-down of or by compute beside it is priced"
            )
        elif profile.accelerator == "any" or GENERIC in profile.include:
            self.evidence.extrapolated.add(
                f"profile {profile.name}: communication shares of Hopper used for {accelerator.name}"
            )

    def sharded_phases(self, kind: BlockKind) -> tuple[dict[Phase, TransferCost], dict[Phase, float]]:
        """ZeRO-3's all-gathers and reduce-scatter of a block beside its compute, and their seconds alone."""
        recipe = self.scenario.recipe
        dense, expert = self.block_parameters(kind)
        dense_ring, expert_ring = self._rings(1)
        costs: dict[Phase, TransferCost] = {}
        alone: dict[Phase, float] = {}
        phases: tuple[Phase, ...] = ("gather F", "gather B", "scatter W")
        for phase in phases:
            scatter = phase == "scatter W"
            size = BYTES_PER_ELEMENT[recipe.gradient_reduce if scatter else recipe.parameter_gather]
            rings = ((dense, dense_ring), (expert, expert_ring))
            moved = [busiest_bytes("all_gather", held * size, *ring) for held, ring in rings]
            nic, scale_up = (fsum(bytes_[i] for bytes_ in moved) for i in (0, 1))
            name = "reduce_scatter" if scatter else "all_gather"
            longer = self._longer_beside(name, dense * size, dense_ring)
            alone[phase] = self.data_parallel_s(dense * size, expert * size, 1)
            both = alone[phase] + longer
            costs[phase] = TransferCost(0.0, both, both, nic, scale_up, 0.0, both)
        return costs, alone

    def data_parallel_s(self, dense_bytes: float, expert_bytes: float, copies: int) -> float:
        """Seconds of a reduce-scatter or all-gather over the data-parallel groups, one after the other.

        `copies`: pipeline ranks that hold the same parameters (2 for a bidirectional pipeline): they
        multiply the replicas of the experts and of the rest (eq. X7).
        """
        dense_ring, expert_ring = self._rings(copies)
        return self._ring_s(dense_bytes, *dense_ring) + self._ring_s(expert_bytes, *expert_ring)

    def _longer_beside(self, name: str, total_bytes: float, ring: tuple[int, int]) -> float:
        """Seconds that a ring takes longer beside compute, and the curve that says so (eq. O8)."""
        longer, curve, note = collective_beside_compute(name, total_bytes, *ring, self.links, self.profile)
        self.evidence.add([curve] if curve else [], [note] if note else [])
        return longer

    def _slower_beside(
        self, names: Sequence[str], kinds: Sequence[BlockKind], element_bytes: float, copies: int
    ) -> float:
        """How many times as long data-parallel collectives, block by block, take beside compute (eq. O8).

        1 where the profile has not measured it. Only the rings of the dense parameters were.
        """
        alone = longer = 0.0
        ring = self._rings(copies)[0]
        for kind in kinds:
            dense, expert = (held * element_bytes for held in self.block_parameters(kind))
            alone += len(names) * self.data_parallel_s(dense, expert, copies)
            longer += fsum(self._longer_beside(name, dense, ring) for name in names)
        return 1.0 + longer / alone if alone else 1.0

    def _ring_s(self, total_bytes: float, ranks: int, ranks_per_node: int) -> float:
        """Seconds of a ring, and the rates that it stands on."""
        if ranks > 1 and total_bytes > 0.0:
            self.evidence.add(["collective.scale_up_fraction"] if ranks_per_node > 1 else [], [])
            self.evidence.add(["collective.nic_fraction"] if ranks > ranks_per_node else [], [])
        return ring_seconds(total_bytes, ranks, ranks_per_node, self.links, self.profile)

    def _rings(self, copies: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(ranks, ranks a node) of the rings of the dense parameters and of the experts."""
        plan, layout = self.scenario.parallel, self.layout
        node = self.links.gpus_per_node
        dense_ranks = layout.dp * plan.cp
        per_node = max(1, min(node // min(plan.tp, node), dense_ranks))
        expert_per_node = max(1, min(node // min(plan.ep * plan.expert_tp, node), layout.expert_dp))
        if self.cluster.nodes == 1:  # every copy is on the one node
            per_node, expert_per_node = dense_ranks * copies, layout.expert_dp * copies
        return (dense_ranks * copies, per_node), (layout.expert_dp * copies, expert_per_node)

    def block_parameters(self, kind: BlockKind) -> tuple[float, float]:
        """(dense, expert) parameters of a block on one GPU, replicas of experts included."""
        if kind in self._parameters:
            return self._parameters[kind]
        plan = self.scenario.parallel
        total = block_parameters(self.shape, kind).total
        moe = self.shape.moe
        experts = moe.experts * expert_parameters(self.shape) if moe and kind in ("moe", "mtp") else 0
        dense = (total - experts) / plan.tp
        redundant = self.scenario.routing.redundant_experts
        if moe and experts and redundant:  # gradients and parameters of a replica travel like any expert's
            experts += redundant * expert_parameters(self.shape)
        self._parameters[kind] = dense, experts / plan.ep / plan.expert_tp
        return self._parameters[kind]

    # -- the whole table -----------------------------------------------------------------------------

    def table(self, schedule: Schedule, stages: StageAssignment) -> CostTable:
        """Prices of everything that the schedule and its stages need."""
        paired = any(isinstance(step, Overlap) for rank in schedule.ranks for step in rank)
        modes: tuple[Mode, ...] = ("alone", "quiet", "beside") if paired else ("alone",)
        compute: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
        transfer: dict[tuple[BlockKind, Phase, Mode], TransferCost] = {}
        for kind in sorted({block.kind for stage in stages.stages for block in stage}):
            compute |= block_compute(self, kind, modes)
            transfer |= block_transfers(self, kind, modes)
            if self.scenario.parallel.zero_stage == 3:
                sharded, alone = self.sharded_phases(kind)
                transfer |= {(kind, phase, "alone"): cost for phase, cost in sharded.items()}
                compute |= slowed_beside(kind, compute, alone, self.profile.lost_beside_nccl.value)
            compute |= held_back_by_host(self, kind, compute, transfer, modes)
        send_bytes, send_s, across = self.send(schedule)
        return CostTable(compute, transfer, send_bytes, send_s, self.sync(schedule, stages), across)

    def send(self, schedule: Schedule) -> tuple[float, float, bool]:
        """(bytes, seconds, across nodes?) of one activation or gradient between pipeline neighbours.

        Each tensor-parallel rank sends its own part of the sequence, in BF16. Where any hop of the
        pipeline crosses nodes, all are priced so (eq. X4).
        """
        if schedule.pp == 1:
            return 0.0, 0.0, False
        size = self.ep_tokens * self.shape.hidden * 2.0
        across = self.layout.nodes_spanned(self.layout.pp_group(0)) > 1
        shared = 1 if across else sends_on_a_link(self.layout, self.links.wiring)
        seconds = send_seconds(size, self.links, self.profile, across_nodes=across, shared=shared)
        return size, seconds, across

    def sync(self, schedule: Schedule, stages: StageAssignment) -> tuple[SyncCost, ...]:
        """End of the step on every pipeline rank (docs/model.md, section "End of the step")."""
        if self.cluster.n_gpus > 1:
            self._note_carried_shares()
        held = held_by_rank(schedule, stages)
        same = {kinds: self.rank_sync(kinds, schedule) for kinds in dict.fromkeys(held)}
        return tuple(same[kinds] for kinds in held)

    def rank_sync(self, kinds: tuple[BlockKind, ...], schedule: Schedule) -> SyncCost:
        """End of the step on a pipeline rank that holds these blocks (docs/model.md, eq. E5)."""
        plan, recipe, layout = self.scenario.parallel, self.scenario.recipe, self.layout
        copies = len(schedule.routes)
        held = [self.block_parameters(kind) for kind in kinds]
        dense, expert = fsum(d for d, _ in held), fsum(e for _, e in held)
        reduce_bytes = BYTES_PER_ELEMENT[recipe.gradient_reduce]
        gather_bytes = BYTES_PER_ELEMENT[recipe.parameter_gather]
        reduce_s = self.data_parallel_s(dense * reduce_bytes, expert * reduce_bytes, copies)
        gather_s = self.data_parallel_s(dense * gather_bytes, expert * gather_bytes, copies)
        if plan.zero_stage == 0:  # an all-reduce: the gradients are gathered as well, before the optimizer
            reduce_s, gather_s = 2.0 * reduce_s, 0.0
        if plan.zero_stage == 3:
            reduce_s = gather_s = 0.0  # both happen block by block inside the step
        elif self.scenario.software.overlap_data_parallel:
            seconds = {kind: self._passes_s(kind) for kind in sorted(set(kinds))}
            passes = min(schedule.pp, schedule.microbatches) if plan.vpp > 1 else 1
            forward_s, backward_s = (passes * fsum(seconds[kind][i] for kind in kinds) for i in (0, 1))
            parts, lost = len(kinds), self.profile.lost_beside_nccl.value
            both = ("reduce_scatter", "all_gather")
            names = both if plan.zero_stage == 0 else both[:1]
            reduced, gathered = (
                Beside(lost, self._slower_beside(chosen, kinds, size, copies))
                for chosen, size in ((names, reduce_bytes), (both[1:], gather_bytes))
            )
            reduce_s = behind_window(reduce_s, backward_s, parts, reduced)
            gather_s = behind_window(gather_s, forward_s, parts, gathered)
        shards = (layout.dp * plan.cp * copies, layout.expert_dp * copies) if plan.zero_stage else (1, 1)
        owned = dense / shards[0] + expert / shards[1]
        local = dense + expert if recipe.linear == "fp8" else 0.0
        update = self.phase(optimizer_operators(owned, recipe, local), "alone")
        nodes = max(2, self.cluster.nodes)
        links = self.links
        norm_s = 2 * ceil(log2(nodes)) * links.nic_latency_s + notify_seconds(links, 1)
        total = reduce_s + norm_s + update.fixed_s + gather_s
        worst = (
            (reduce_s + gather_s) * (1.0 + collective_residual(self.profile, links.curves))
            + norm_s
            + update.worst_s
        )
        return SyncCost(reduce_s, norm_s, update.fixed_s, gather_s, update.best_s, max(worst, total))

    def _passes_s(self, kind: BlockKind) -> tuple[float, float]:
        """(forward, backward) compute of one block and micro-batch alone."""
        priced = {phase: self.phase(ops, "alone") for phase, ops in self.operators(kind).items()}
        forward = fsum(c.fixed_s + c.row_s for p, c in priced.items() if p.endswith(" F"))
        return forward, fsum(c.fixed_s + c.row_s for c in priced.values()) - forward
