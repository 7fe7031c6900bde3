"""Prices the operators of one job by block and phase. Every price is a value that carries its evidence.

The pricer caches its prices, so that placement, cost table, end of the step, host launches and reports share
one price of each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.host import load_host
from moesim.hwmodels.topologies import NetworkTier
from moesim.simulator.common.bounded_cache import BoundedCache, Same, model_key
from moesim.simulator.cost.compute import (
    OperatorCost,
    SmContext,
    beside_compute,
    operators_seconds,
    unaffected,
    without_timed_parts,
)
from moesim.simulator.cost.evidence import NO_EVIDENCE, combined
from moesim.simulator.cost.overlap import lost_beside
from moesim.simulator.cost.table import Mode, PhaseCost, PhaseKey
from moesim.simulator.dispatchers.protocol import Call, Links, TargetStatistics, on_stream
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.frameworks.kernel_lists import PLAIN, Feature, layer_sizes, with_layer_kernels
from moesim.simulator.frameworks.operators import apply_framework, with_stash
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.job import OfJob, ResolvedJob
from moesim.simulator.layout.parallel import Layout, tokens_per_gpu
from moesim.simulator.layout.routing import Gate, expected_targets
from moesim.simulator.memory.activations import stashed_bytes
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.counts import block_parameters, expert_parameters
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.operators import block_operators
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.template import EP_PHASES


@dataclass(frozen=True, slots=True)
class PhaseMemo:
    """Cached prices of the phases of a job, and the entries of the profile that they depend on."""

    costs: dict[PhaseKey, tuple[OperatorCost, ...]] = field(default_factory=dict)
    phases: dict[PhaseKey, PhaseCost] = field(default_factory=dict)
    dependencies: dict[PhaseKey, frozenset[str]] = field(default_factory=dict)
    loads: dict[PhaseKey, Mapping[Hashable, tuple[float, float]]] = field(default_factory=dict)
    """Seconds by the load that they put on the board (`load_clock`)."""


def phase_cost(
    operators: Iterable[Operator], costs: Iterable[OperatorCost], evidence: bool = True
) -> PhaseCost:
    """Sum of operators' prices, split into the part that grows with routed rows and the rest.

    `evidence`: whether the sum carries that of its parts.
    """
    fixed = row = best = worst = 0.0
    parts = []
    for operator, cost in zip(operators, costs, strict=True):
        best += cost.best_seconds
        worst += cost.worst_seconds
        if operator.per_received_row:
            row += cost.seconds
        else:
            fixed += cost.seconds
        if evidence:
            parts.append((cost.evidence, 1.0))
    return PhaseCost(fixed, row, 0.0, best, worst, evidence=combined(parts) if parts else NO_EVIDENCE)


# -- pricing key -------------------------------------------------------------------------------------
# Keys of what prices depend on, so that scenarios which differ elsewhere share their prices.
#
# The keys name every part of a job that pricing reads; a test records those reads.


def framework_copies(plan: ParallelPlan, job: ResolvedJob) -> tuple[object, ...]:
    """What else decides compute: copies of parameters sharded over replicas, and sums of gradients."""
    layout = Layout(plan, job.cluster.n_gpus, job.cluster.node.n_gpus)
    if _adds_up(plan, job.scenario):
        return "adds up", job.scenario.batch.sequences // (layout.dp * plan.microbatch)
    if plan.zero_stage < 2 or not job.scenario.software.fsdp:
        return ()
    return plan.zero_stage, plan.pp > 1, layout.dp * plan.cp > 1, layout.expert_dp > 1


def operators_key(job: ResolvedJob) -> Hashable:
    """All that the operators of a job and their prices alone on all SMs depend on.

    Of the plan it is how a layer is split and computed, so that plans with other pipelines share operators.
    """
    s, cluster, plan = job.scenario, job.cluster, job.scenario.parallel
    return (
        Same(job.shape),
        Same(job.profile),
        model_key(cluster.accelerator),
        cluster.n_gpus,
        cluster.node.n_gpus,
        (plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.microbatch, plan.sequence_parallel),
        (plan.shard_group, *framework_copies(plan, job)),
        s.batch.sequence_length,
        s.recipe,
        s.recompute,
        s.software,
        (s.routing.gate, s.routing.groups_per_token, s.routing.eplb, s.routing.redundant_experts),
        s.communication.model_copy(update={"sms": 0}),
    )


def _adds_up(plan: ParallelPlan, s: Scenario) -> bool:
    """Whether autograd adds the gradients of micro-batches up in place, because no FSDP takes them."""
    return s.software.weight_gradients == "written" and not plan.zero_stage


def table_key(job: ResolvedJob) -> Hashable:
    """All that the cost table of a job depends on, besides its schedule and stages."""
    s, host = job.scenario, job.scenario.software.host
    return (
        operators_key(job),
        s.parallel,
        (model_key(job.cluster.node), model_key(job.cluster.network), job.cluster.nodes, job.tiers),
        s.communication.sms,
        s.schedule,
        s.batch.sequences,  # whether gradients add up over micro-batches (`GradientSync`)
        (s.variation.power_clock, s.variation.jitter_cv.value),
        None if host is None else model_key(load_host(s.path(host))),
    )


def own_latents(scenario: Scenario, part: Attention | FeedForward) -> tuple[int, ...]:
    """Columns of the latents that sequence-parallel ranks form from their own tokens and gather; else empty.

    Megatron core runs the down-projections of MLA on every rank's own tokens (`parallel_mode` "duplicated",
    NVIDIA/Megatron-LM 26.04 `multi_latent_attention.py`).
    """
    split = scenario.software.modules != "torch" and scenario.parallel.sequence_parallel
    if not split or scenario.parallel.tp == 1 or not isinstance(part, Attention):
        return ()
    return part.gathered_latents


L = TypeVar("L", bound=Hashable)
V = TypeVar("V")
M = TypeVar("M")
Operators = Mapping[Phase, tuple[Operator, ...]]


@dataclass(frozen=True, slots=True)
class _Shared:
    """What pricers of equal `operators_key` share; some tens of kilobytes."""

    operators: dict[BlockKind, Operators] = field(default_factory=dict)
    alone: PhaseMemo = field(default_factory=PhaseMemo)
    paired: dict[int, PhaseMemo] = field(default_factory=dict)
    """Prices beside communication SMs, by their number."""
    parameters: dict[BlockKind, tuple[float, float]] = field(default_factory=dict)


LINK_SHARES = ("collective.", "p2p.", "engine.")
"""Prefixes of the curves that price sends and collectives, whose prices record no evidence."""


def _tiers_of(cluster: Cluster) -> tuple[NetworkTier, ...]:
    """Tiers of a cluster's network; none where a pool is priced on more GPUs than its own network joins."""
    try:
        return cluster.topology().tiers()
    except InputError:
        return ()


_TIERS: BoundedCache[tuple[NetworkTier, ...]] = BoundedCache(64)

_SHARED: BoundedCache[_Shared] = BoundedCache(512)

_PHASES: BoundedCache[tuple[Operator, ...]] = BoundedCache(8192)
"""Operators of phases: phases that compute alike have the same ones, whose prices they so share."""
_SUMS: BoundedCache[PhaseCost] = BoundedCache(8192)
_SHIFTED_SUMS: BoundedCache[PhaseCost] = BoundedCache(16_384)
"""Sums at shifted rates, which carry no evidence."""
_BOARD_LOADS: BoundedCache[Any] = BoundedCache(16_384)


def _bare_sum(operators: tuple[Operator, ...], costs: tuple[OperatorCost, ...]) -> PhaseCost:
    return phase_cost(operators, costs, evidence=False)


@dataclass(frozen=True)
class Pricer(OfJob):
    """Operators and prices of a job; every method is a pure function of the job with a cached result."""

    job: ResolvedJob
    _operators: dict[BlockKind, Operators] = field(default_factory=dict, repr=False, compare=False)
    """Cached operators by kind of block; they do not depend on rates."""
    _alone: PhaseMemo = field(default_factory=lambda: PhaseMemo(), repr=False, compare=False)
    """Cached prices alone on all SMs."""
    _paired: PhaseMemo = field(default_factory=lambda: PhaseMemo(), repr=False, compare=False)
    """Cached prices beside communication SMs."""
    _parameters: dict[BlockKind, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)
    _moves: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Cached prices of transfers and collectives."""
    _host_calls: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Cached host seconds of operators; they do not depend on rates."""
    _before: tuple[Pricer, frozenset[str]] | None = field(default=None, repr=False, compare=False)
    """Pricer of the same GPUs before entries of its profile were shifted, and their ids."""

    @classmethod
    def shared(cls, job: ResolvedJob) -> Pricer:
        """Pricer that shares operators and prices with those of other scenarios that price them alike."""
        kept = _SHARED.get(operators_key(job), _Shared)
        paired = kept.paired.setdefault(job.scenario.communication.sms, PhaseMemo())
        return cls(job, kept.operators, kept.alone, paired, kept.parameters)

    @property
    def shifted(self) -> bool:
        """Whether it prices another pricer's job at other rates, as intervals do."""
        return self._before is not None or self.profile._shifted_from is not None

    def moves(self, key: Hashable, price: Callable[[], M]) -> M:
        """A price of a transfer or collective, once for a key that says what moves.

        After an entry was shifted, what does not stand on it keeps the price from before.
        """
        known: M | None = self._moves.get(key)
        if known is None and self._before is not None and self._may_keep_moves:
            before, entries = self._before
            earlier = before._moves.get(key)
            if earlier is not None and entries.isdisjoint(earlier.evidence.entries):
                known = earlier
        if known is None:
            known = price()
        self._moves[key] = known
        return known

    def host_calls(self, key: Hashable, count: Callable[[], M]) -> M:
        """What `count` finds for the calls of operators, once for a key of operators and times."""
        if key not in self._host_calls:
            self._host_calls[key] = count()
        found: M = self._host_calls[key]
        return found

    @cached_property
    def _may_keep_moves(self) -> bool:
        """Whether the evidence of transfers and collectives says which of them stand on what was shifted."""
        assert self._before is not None
        before, entries = self._before
        if not entries:
            return before.links == self.links
        return not any(id_.startswith(LINK_SHARES) for id_ in entries) and entries <= {
            entry.id for entry in self.profile.entries()
        }

    def _memo(self, mode: Mode) -> PhaseMemo:
        return self._alone if mode == "alone" else self._paired

    def at_rates(
        self, *, profile: CalibrationProfile | None = None, cluster: Cluster | None = None
    ) -> Pricer:
        """Pricer of the same job at other rates (see `ResolvedJob.with_rates`), with shared operators.

        If the compute units stay and one entry of the profile is shifted, phases that do not depend on that
        entry keep their prices.
        """
        before: tuple[Pricer, frozenset[str]] | None = None
        if cluster is None or cluster.accelerator is self.cluster.accelerator:
            if profile is None:
                before = self, frozenset[str]()
            elif profile._shifted_from is not None and profile._shifted_from[0] is self.profile:
                before = self, profile._shifted_from[1]
        return self.of(self.job.with_rates(profile=profile, cluster=cluster), before)

    def at_host_slowness(self, slowness: float) -> Pricer:
        """Pricer of the same job with another factor on the host's times; the operators' prices stay."""
        software = self.scenario.software.model_copy(update={"host_slowness": slowness})
        scenario = self.scenario.model_copy(update={"software": software})
        return self.of(replace(self.job, scenario=scenario), (self, frozenset()))

    def of(self, job: ResolvedJob, before: tuple[Pricer, frozenset[str]] | None = None) -> Pricer:
        """Pricer of a job that differs in rates and spreads alone, with shared operators.

        `before`: the pricer whose prices may be kept, and the entries that were shifted since.
        """
        return Pricer(
            job,
            self._operators,
            _parameters=self._parameters,
            _host_calls=self._host_calls,
            _before=before,
        )

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one model replica."""
        return self.scenario.parallel.microbatch * self.scenario.batch.sequence_length

    @property
    def ep_tokens(self) -> float:
        """Tokens that one GPU sends into its expert-parallel group, after CP and TP split them."""
        return tokens_per_gpu(self.scenario.parallel, self.scenario.batch.sequence_length)

    @property
    def received_rows(self) -> float:
        """Expert rows that a GPU computes under uniform routing."""
        return self.ep_tokens * self.shape.moe.routed_rows if self.shape.moe else 0.0

    @property
    def received_tokens(self) -> float | None:
        """Distinct tokens behind `received_rows`; a token that chose two experts of a GPU arrives once."""
        if self.shape.moe is None or self.scenario.parallel.ep == 1:
            return None
        return self.ep_tokens * self.targets().distinct_gpus

    @cached_property
    def gradient_sync(self) -> GradientSync:
        """When the gradients of the job's plan are reduced over its replicas."""
        scenario = self.scenario
        return GradientSync.of(scenario.parallel, scenario.software, self.microbatches)

    @property
    def microbatches(self) -> int:
        """Micro-batches of one pipeline in a step."""
        return self.scenario.batch.sequences // (self.layout.dp * self.scenario.parallel.microbatch)

    @property
    def ep_nodes(self) -> int:
        """Nodes that one expert-parallel group spans."""
        return self.layout.nodes_spanned(self.layout.ep_group(0))

    @cached_property
    def links(self) -> Links:
        """Nominal link rates and latencies of one GPU."""
        node, fabric = self.cluster.node, self.cluster.network.fabric
        return Links(
            scale_up_bytes_per_s=node.scale_up_bytes_per_s,
            scale_up_latency_s=node.scale_up_latency_s,
            nic_bytes_per_s=self.cluster.nic_bytes_per_s,
            nic_latency_s=fabric.latency_cross_leaf.value if fabric else 0.0,
            gpus_per_node=node.n_gpus,
            curves="engine." if self.cluster.accelerator.communication_engine else "",
            wiring=node.scale_up_shares,
            in_network=self.scenario.communication.in_network,
            architecture=self.cluster.accelerator.architecture,
            ep_per_node=self.scenario.parallel.ep // self.ep_nodes,
            adapter=node.adapter or "",
        )

    @property
    def lost_beside_library(self) -> float:
        """Compute that a second of a library's data-parallel collective loses beside it (eq. O5)."""
        measured, sms = self.profile.lost_beside_nccl.value, self.scenario.communication.library_sms
        if sms is None:
            return measured
        return lost_beside(measured, sms, self.cluster.accelerator.n_sms)

    @cached_property
    def tiers(self) -> tuple[NetworkTier, ...]:
        """Levels of the network at which links limit what NICs can send (eq. N6)."""
        cluster = self.cluster
        if self.job.tiers is not None:
            return self.job.tiers
        if cluster.nodes == 1 or cluster.network.fabric is None:
            return ()
        place = (Same(cluster.node), Same(cluster.network), cluster.nodes)
        return _TIERS.get(place, lambda: _tiers_of(cluster))

    def targets(self) -> TargetStatistics:
        """Expected distinct targets of a token.

        A global placement spreads the experts of a group over all nodes. The gate's limit on groups then does
        not limit the nodes, so the statistics are those of a gate without that limit.
        """
        assert self.shape.moe is not None
        routing = self.scenario.routing
        scattered = routing.eplb is not None and routing.eplb.policy == "global"
        ranking = "unlimited" if scattered else routing.gate
        gate = Gate.of(self.shape.moe, ranking, routing.groups_per_token)
        per_node = self.scenario.parallel.ep // self.ep_nodes
        return expected_targets(gate, self.scenario.parallel.ep, per_node)

    @property
    def call(self) -> Call:
        """What a GPU sends into its expert-parallel group in a dispatch."""
        scenario, moe = self.scenario, self.shape.moe
        assert moe is not None
        return Call(
            scenario.parallel.ep,
            self.ep_nodes,
            scenario.communication.sms,
            tokens=self.ep_tokens,
            row=self.shape.routed_width,
            experts=moe.experts,
            local_experts=(moe.experts + scenario.routing.redundant_experts) / scenario.parallel.ep,
            choices=moe.routed_rows,
            targets=self.targets,
            fused=scenario.communication.fused_permutation,
        )

    def block_parameters(self, kind: BlockKind) -> tuple[float, float]:
        """(dense, expert) parameters of a block on one GPU, including redundant replicas of experts."""
        known = self._parameters.get(kind)
        if known is None:
            plan, moe, redundant = (
                self.scenario.parallel,
                self.shape.moe,
                self.scenario.routing.redundant_experts,
            )
            total, experts = block_parameters(self.shape, kind).total, 0
            if moe and self.shape.block(kind).routed:
                experts = moe.experts * expert_parameters(self.shape)
            dense = (total - experts) / plan.tp
            if experts and redundant:  # replicas communicate like any expert
                experts += redundant * expert_parameters(self.shape)
            known = self._parameters[kind] = dense, experts / plan.ep / plan.expert_tp
        return known

    def operators(self, kind: BlockKind) -> Operators:
        """Operators of a block by phase."""
        operators = self._operators.get(kind)
        if operators is None:
            operators = self._operators[kind] = self._operators_of(kind)
        return operators

    def _operators_of(self, kind: BlockKind) -> Operators:
        s, plan, layer = self.scenario, self.scenario.parallel, self.shape.block(kind).layer
        operators: Operators = block_operators(
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
            # Both policies recompute the same operators and store different tensors.
            recompute="selective" if s.recompute == "deepseek-v3" else s.recompute,
            redundant_experts=s.routing.redundant_experts,
            unfused_attention=s.software.attention == "unfused",
            flex_attention=s.software.attention == "flex",
            dropout=s.software.dropout,
            expert_tp=plan.expert_tp,
            sequence_parallel=plan.sequence_parallel,
            current_scales=s.software.fp8_scales == "current",
            separate_casts=s.software.fp8_activations == "separate",
            own_latents=layer is not None and bool(own_latents(s, layer.attention)),
            ring_attention=s.software.ring_attention == "pieces",
        )
        accelerator = self.cluster.accelerator
        operators = {ph: without_timed_parts(ops, accelerator, self.profile) for ph, ops in operators.items()}
        software = s.software
        if software.layer_kernels != PLAIN and layer is not None:
            features: set[Feature] = set()
            features |= {"dropout"} if software.dropout else set()
            features |= {"unfused"} if software.attention == "unfused" else set()
            rows, whole = self.tokens / plan.cp, s.recompute in ("full", "op")
            sequence, hidden = s.batch.sequence_length, self.shape.hidden
            split = plan.tp, plan.sequence_parallel
            sizes = layer_sizes(layer, hidden, rows, sequence, features, whole, *split)
            operators = with_layer_kernels(operators, software.layer_kernels, sizes)
        if plan.ep > 1 and self.shape.moe is not None and software.kernels == "fused":
            moves = dispatcher(s.communication.kernels)
            if moves.pads_rows:
                software = software.model_copy(update={"pad_expert_rows": False})
            operators = moves.operators(operators, self.call)
            if s.communication.permutes_on_stream:
                operators = on_stream(operators)
        dense, expert = self.block_parameters(kind)
        shards, whole = self.layout.shards, software.keeps_whole_gradients(plan.pp)
        sharded = dense * (shards[1] > 1) + expert * (shards[0] > 1)
        adapted = apply_framework(
            operators, software, s.recipe, plan.zero_stage, dense + expert, sharded, whole_gradients=whole,
            microbatches=self.microbatches if _adds_up(plan, s) else 1,
            own_kernels=plan.ep > 1 and not dispatcher(s.communication.kernels).by_library,
            choices=self.shape.moe.top_k if self.shape.moe else 0,
        )  # fmt: skip
        stashed = stashed_bytes(
            self.shape, kind, s.recipe, s.recompute, plan, s.batch.sequence_length, s.software
        )
        return {ph: _PHASES.get(ops, partial(tuple, ops)) for ph, ops in with_stash(adapted, stashed).items()}

    # -- prices ----------------------------------------------------------------------------------------

    def context(self, mode: Mode) -> SmContext:
        """SMs of a phase in a mode: all SMs, or all but the communication SMs, which are idle or busy.

        With `communication.gemm_margin`, GEMMs leave that many SMs free in every mode (eq. C40).
        """
        sms, margin = self.scenario.communication.sms, self.scenario.communication.gemm_margin
        if margin is None:
            return SmContext(0 if mode == "alone" else sms, mode == "overlapped")
        busy = mode == "overlapped"
        return SmContext(max(sms, margin) if busy else margin, busy, margin > 0)

    def operator_costs(self, kind: BlockKind, phase: Phase, mode: Mode) -> tuple[OperatorCost, ...]:
        """Price of each operator of a phase, in order; empty where the block lacks the phase."""
        key = (kind, phase, mode)
        memo = self._memo(mode).costs
        costs = memo.get(key)
        if costs is None:
            operators = self.operators(kind).get(phase, ())
            costs = self._priced(operators, mode)
            if phase in EP_PHASES and mode != "alone":
                costs = beside_compute(operators, costs, self.profile, self.scenario.communication.sms)
            memo[key] = costs
        return costs

    def phase(self, kind: BlockKind, phase: Phase, mode: Mode) -> PhaseCost:
        """Price of one phase of a block without the collectives inside it."""
        key = (kind, phase, mode)
        memo = self._memo(mode).phases
        price = memo.get(key)
        if price is None:
            sums, add = (_SHIFTED_SUMS, _bare_sum) if self.shifted else (_SUMS, phase_cost)
            price = memo[key] = self._unshifted(key) or self._once(sums, key, add)
        return price

    def _once(
        self,
        known: BoundedCache[V],
        key: PhaseKey,
        make: Callable[[tuple[Operator, ...], tuple[OperatorCost, ...]], V],
    ) -> V:
        """What `make` makes of a phase's operators and prices, once for all phases with the same ones."""
        operators, costs = self.operators(key[0]).get(key[1], ()), self.operator_costs(*key)
        return known.get((Same(operators), Same(costs)), lambda: make(operators, costs))

    def _unshifted(self, key: PhaseKey) -> PhaseCost | None:
        """A phase's price before an entry was shifted on which it does not depend."""
        if self._before is None:
            return None
        pricer, shifted = self._before
        memo = pricer._memo(key[2])
        price, entries = memo.phases.get(key), memo.dependencies.get(key)
        if price is not None and entries is None:
            depends = (cost.depends_on for cost in pricer.operator_costs(*key))
            entries = memo.dependencies[key] = frozenset().union(*depends)
        return price if entries is not None and unaffected(entries, shifted) else None

    def loads(
        self,
        key: PhaseKey,
        read: Callable[[tuple[Operator, ...], tuple[OperatorCost, ...]], Mapping[L, tuple[float, float]]],
    ) -> Mapping[L, tuple[float, float]]:
        """Seconds of a phase by the load that they put on the board.

        `read` sums them, once for operators and prices; prices of another profile are others.
        """
        memo: Any = self._memo(key[2]).loads
        loads: Mapping[L, tuple[float, float]] | None = memo.get(key)
        if loads is None:
            loads = memo[key] = self._once(_BOARD_LOADS, key, read)
        return loads

    def compute(self, operators: tuple[Operator, ...], mode: Mode) -> PhaseCost:
        """Price of operators that belong to no block, such as those of the optimizer."""
        return phase_cost(operators, self._priced(operators, mode))

    def operator_prices(self, operators: tuple[Operator, ...]) -> tuple[OperatorCost, ...]:
        """Price of each of some operators that belong to no block, alone on all SMs."""
        return self._priced(operators, "alone")

    def _priced(self, operators: tuple[Operator, ...], mode: Mode) -> tuple[OperatorCost, ...]:
        accelerator, context = self.cluster.accelerator, self.context(mode)
        return operators_seconds(operators, accelerator, self.profile, context)
