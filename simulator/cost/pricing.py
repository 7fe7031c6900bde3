"""From a scenario to the seconds of every phase, transfer and synchronisation (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import fsum

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import GENERIC
from moesim.simulator.cost.collectives.ring import busiest_bytes
from moesim.simulator.cost.communication import (
    EpOperation,
    Links,
    all_to_all_seconds,
    collective_beside_compute,
    engine_transfer,
    ep_transfer,
    ring_seconds,
)
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.price_evidence import Evidence
from moesim.simulator.cost.profile_use import communication_law
from moesim.simulator.cost.sharded import transfer_cost
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.parallel import Layout, tokens_per_gpu
from moesim.simulator.layout.routing import Gate, TargetStatistics, expected_targets, transfer_bytes
from moesim.simulator.model.counts import block_parameters, expert_parameters
from moesim.simulator.model.framework import apply_framework
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, row_bytes
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario

EP_OPERATION: dict[Phase, EpOperation] = {
    "dispatch F": "dispatch",
    "combine B": "dispatch",  # the backward of a combine sends rows out again
    "combine F": "combine",
    "dispatch B": "combine",
}


@dataclass(slots=True)
class Pricer:
    """Prices the parts of one scenario; every method is a pure function of the fields."""

    job: ResolvedJob
    evidence: Evidence = field(default_factory=Evidence)
    _links: Links | None = field(default=None, init=False, repr=False)
    _parameters: dict[BlockKind, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def scenario(self) -> Scenario:
        """The scenario of the job."""
        return self.job.scenario

    @property
    def shape(self) -> ModelShape:
        """The model of the job."""
        return self.job.shape

    @property
    def cluster(self) -> Cluster:
        """The cluster of the job."""
        return self.job.cluster

    @property
    def profile(self) -> CalibrationProfile:
        """The calibration profile of the job."""
        return self.job.profile

    @property
    def layout(self) -> Layout:
        """Where the ranks of the job stand."""
        return self.job.layout

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one model replica."""
        return self.scenario.parallel.microbatch * self.scenario.batch.sequence_length

    @property
    def ep_tokens(self) -> float:
        """Tokens that one GPU sends into its expert-parallel group: CP and TP split them."""
        return tokens_per_gpu(self.scenario.parallel, self.scenario.batch.sequence_length)

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
        return apply_framework(found, s.software, s.recipe, plan.zero_stage, dense + expert, sharded)

    def context(self, mode: Mode) -> SmContext:
        """SMs of a phase: all of them, or all but the communication SMs, which idle or are busy."""
        return SmContext(0 if mode == "alone" else self.scenario.communication.sms, mode == "overlapped")

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

    def note_carried_shares(self) -> None:
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
        dense_ring, expert_ring = self.rings(1)
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
            longer = self.longer_beside(name, dense * size, dense_ring)
            alone[phase] = self.data_parallel_s(dense * size, expert * size, 1)
            both = alone[phase] + longer
            costs[phase] = TransferCost(0.0, both, both, nic, scale_up, 0.0, both)
        return costs, alone

    def data_parallel_s(self, dense_bytes: float, expert_bytes: float, copies: int) -> float:
        """Seconds of a reduce-scatter or all-gather over the data-parallel groups, one after the other.

        `copies`: pipeline ranks that hold the same parameters (2 for a bidirectional pipeline): they
        multiply the replicas of the experts and of the rest (eq. X7).
        """
        dense_ring, expert_ring = self.rings(copies)
        return self._ring_s(dense_bytes, *dense_ring) + self._ring_s(expert_bytes, *expert_ring)

    def longer_beside(self, name: str, total_bytes: float, ring: tuple[int, int]) -> float:
        """Seconds that a ring takes longer beside compute, and the curve that says so (eq. O8)."""
        longer, curve, note = collective_beside_compute(name, total_bytes, *ring, self.links, self.profile)
        self.evidence.add([curve] if curve else [], [note] if note else [])
        return longer

    def _ring_s(self, total_bytes: float, ranks: int, ranks_per_node: int) -> float:
        """Seconds of a ring, and the rates that it stands on."""
        if ranks > 1 and total_bytes > 0.0:
            self.evidence.add(["collective.scale_up_fraction"] if ranks_per_node > 1 else [], [])
            self.evidence.add(["collective.nic_fraction"] if ranks > ranks_per_node else [], [])
        return ring_seconds(total_bytes, ranks, ranks_per_node, self.links, self.profile)

    def rings(self, copies: int) -> tuple[tuple[int, int], tuple[int, int]]:
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
