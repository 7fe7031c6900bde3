"""Costs of many plans of one job; what several plans have in common is computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from typing import Any, TypeVar

from msgspec.structs import replace

from moesim.simulator.cost.cost_table import (
    BareCosts,
    bare_costs,
    inside_step,
    pipeline_send,
    with_collectives,
)
from moesim.simulator.cost.end_of_step import Known, rank_step_ends, update_s
from moesim.simulator.cost.launches import least_host_s, polled_share, stalls_key
from moesim.simulator.cost.load_clock import at_clock
from moesim.simulator.cost.pricing import Pricer, framework_copies
from moesim.simulator.cost.table import (
    PHASES_OF,
    CostTable,
    Mode,
    PhaseCost,
    PhaseKey,
    SyncCost,
    TransferCost,
)
from moesim.simulator.cost.transfers import REPEATED, block_transfers
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.job import OfJob, ResolvedJob
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.memory.gpu import RankChunks, chunks_by_rank
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.repeated import repeated_communication
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import Schedule

T = TypeVar("T")
Key = tuple[object, ...]

ROUTED: frozenset[Phase] = frozenset(
    {"mlp F", "mlp I", "mlp W", "dispatch F", "combine F", "combine B", "dispatch B"}
)
NOT_ROUTED: frozenset[Phase] = frozenset({"attn F", "attn I", "attn W"})
"""Phases of a MoE block that do, and do not, depend on the expert-parallel degree."""

ALL_MODES: tuple[Mode, ...] = ("alone", "sms_reserved", "overlapped")


@dataclass(slots=True)
class PlanCosts(OfJob):
    """Costs of the plans of a job's model, cluster and profile, kept by the parts of a plan that decide them.

    Plans with equal costs get the same objects.
    """

    job: ResolvedJob
    evidence: bool = False
    """Whether costs carry the evidence of the collectives inside a layer, which a search does not read."""
    recipes: dict[Precision, int] = field(default_factory=dict)
    """Numbers of the recipes, which stand for them in keys: the fields of a recipe take long to hash."""
    elsewhere: set[Key] = field(default_factory=set)
    """Keys of the parts that other processes computed."""
    kinds: tuple[BlockKind, ...] = field(init=False)
    """Block kinds of the model."""
    routed: tuple[BlockKind, ...] = field(init=False)
    """Block kinds with routed experts."""
    _bare: dict[Key, BareCosts] = field(default_factory=dict)
    _known: dict[Key, Any] = field(default_factory=dict)
    """Costs made of these parts, under the name of what they are and all that decides them."""
    _numbered: dict[int, tuple[Precision, int]] = field(default_factory=dict)
    """Recipes and their numbers by id of the recipe, which the entry keeps alive."""

    def __post_init__(self) -> None:
        """Read the block kinds from the model."""
        self.kinds = self.shape.block_kinds
        self.routed = tuple(kind for kind in self.kinds if self.shape.block(kind).routed)

    def _once(self, key: Key, make: Callable[[], T]) -> T:
        """The value under a key, made the first time."""
        if key not in self._known:
            self._known[key] = make()
        value: T = self._known[key]
        return value

    def _once_for(
        self, kind: BlockKind, compute: Mapping[PhaseKey, PhaseCost], about: object, make: Callable[[], T]
    ) -> T:
        """What `make` makes of one block's compute, once for all plans that share these objects.

        `about`: what else it depends on. The entry keeps the objects alive, and so their ids.
        """
        own = [cost for (k, _, _), cost in compute.items() if k == kind]
        return self._once(("made of", about, *map(id, own)), lambda: (own, make()))[1]

    def number(self, recipe: Precision) -> int:
        """The number of a recipe in keys, in the order in which they are first asked for."""
        known = self._numbered.get(id(recipe))
        if known is None:
            number = self.recipes.setdefault(recipe, len(self.recipes))
            known = self._numbered[id(recipe)] = recipe, number
        return known[1]

    @property
    def keys(self) -> frozenset[Key]:
        """Keys of the parts that were computed, here or in another process."""
        return frozenset(self._bare.keys() | self.elsewhere)

    @property
    def ports(self) -> tuple[float, float]:
        """Bytes/s of a GPU's ports, scale-out (1 where a single node has none) and scale-up."""
        nic = self._once(("nic",), lambda: Pricer(self.job).cluster.nic_bytes_per_s)
        return nic or 1.0, self.cluster.node.scale_up_bytes_per_s

    def arithmetic(self, policy: Recompute) -> Recompute:
        """The one policy whose costs all policies with the same compute share.

        deepseek-v3 differs from selective only in the bytes that it keeps. Flash attention keeps no scores
        in memory, so the policy attention recomputes nothing there.
        """
        if policy == "attention" and self.scenario.software.attention != "unfused":
            return "none"
        return "selective" if policy == "deepseek-v3" else policy

    def repeats_transfers(self, plan: ParallelPlan, policy: Recompute) -> bool:
        """Whether the backward dispatches tokens again, so that compute depends on the communication SMs."""
        keeps = self.scenario.software.op_keeps_transfers
        return plan.ep > 1 and any(
            repeated_communication(self.shape.block(kind), policy, keeps).experts for kind in self.routed
        )

    def gradient_sync(self, plan: ParallelPlan) -> GradientSync:
        """When the gradients of a plan are reduced over its replicas."""
        replicas = self.cluster.n_gpus // (plan.tp * plan.cp * plan.pp)
        microbatches = self.scenario.batch.sequences // (replicas * plan.microbatch)
        return GradientSync.of(plan, self.scenario.software, microbatches)

    def pricer(
        self,
        plan: ParallelPlan,
        recipe: Precision,
        policy: Recompute,
        sms: int | None = None,
        schedule: str | None = None,
    ) -> Pricer:
        """The pricer of one plan, with the operators of the plans that split and compute a layer alike.

        It shares transfers and collectives with the plans that differ from it in recompute, ZeRO stage or
        schedule, and the host's calls with all plans that have the same operators. `schedule`: None for that
        of the scenario.
        """
        communication = self.scenario.communication
        if sms is not None:
            communication = communication.model_copy(update={"sms": sms})
        update = {
            "parallel": plan,
            "precision": recipe,
            "recompute": policy,
            "communication": communication,
            "schedule": schedule or self.scenario.schedule,
        }
        split = plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.pp, plan.microbatch, plan.sequence_parallel
        moves = self._once(("moves", split, self.number(recipe), communication.sms), dict[Hashable, Any])
        own = Pricer.shared(replace(self.job, scenario=self.scenario.model_copy(update=update)))
        return dataclasses.replace(
            own, _moves=moves, _host_calls=self._once(("host calls",), dict[Hashable, Any])
        )

    # -- compute ---------------------------------------------------------------------------------------

    def compute(
        self,
        plan: ParallelPlan,
        recipe: Precision,
        policy: Recompute,
        modes: tuple[Mode, ...],
        sms: int | None = None,
    ) -> dict[PhaseKey, PhaseCost]:
        """Compute costs of every block kind in some modes.

        Only operators on received rows depend on the expert-parallel degree, and only attention on the
        sequences that the tokens of a GPU come from. Each of these parts is computed once and shared by all
        plans that have it.
        """
        policy = self.arithmetic(policy)
        share = (
            plan.tp, plan.microbatch, plan.cp, self.number(recipe), policy, modes, sms,
            *framework_copies(plan, self.job),
        )  # fmt: skip
        split = (plan.sequence_parallel,)
        experts = (plan.ep, plan.expert_tp)
        # Reductions of largest elements depend on the experts' degrees everywhere, as the ranks that wait do.
        among = experts if self.scenario.software.amax_reduction != "none" else ()

        def repeated() -> list[TransferCost]:  # dispatch and combine of the forward
            own = self.scenario.communication.sms if sms is None else sms
            moved = self.transfers(plan, recipe, own, "alone")
            return [moved[self.routed[0], phase, "alone"] for phase in REPEATED] if moved else []

        def made() -> dict[PhaseKey, PhaseCost]:
            pricer = self.pricer(plan, recipe, policy, sms)
            out: dict[PhaseKey, PhaseCost] = {}
            for kind in self.kinds:
                if kind not in self.routed:
                    # Blocks without a layer recompute nothing.
                    own = share if self.shape.block(kind).layer else (*share[:4], "none", *share[5:])
                    key = ("block", own, kind, split, among)
                    out |= self._once(key, partial(self._unrouted, pricer, kind, modes, own))
                    continue
                # Recompute beside the experts is that of the attention, so its kind must be the same.
                like = next(k for k in self.routed if self._attention(k) == self._attention(kind))
                routed = self._part(pricer, (share, like, *experts), like, modes, ROUTED)
                rest = self._part(pricer, (share, kind), kind, modes, NOT_ROUTED)
                bare = BareCosts({**rest.compute, **routed.compute}, {**rest.core_s, **routed.core_s})
                out |= with_collectives(pricer, kind, bare, evidence=self.evidence, repeated=repeated)
            return out

        return self._once(("compute", share, split, experts), made)

    def _attention(self, kind: BlockKind) -> Attention | None:
        layer = self.shape.block(kind).layer
        return None if layer is None else layer.attention

    def _unrouted(
        self, pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...], share: Key
    ) -> dict[PhaseKey, PhaseCost]:
        """Compute of a block without experts."""
        bare = self._part(pricer, (share, kind), kind, modes, None)
        return with_collectives(pricer, kind, bare, evidence=self.evidence)

    def _part(
        self,
        pricer: Pricer,
        key: Key,
        kind: BlockKind,
        modes: tuple[Mode, ...],
        only: frozenset[Phase] | None,
    ) -> BareCosts:
        # Only the collectives of split layers need the seconds of GEMMs and attention.
        plan = pricer.scenario.parallel
        key = (*key, plan.tp * plan.cp > 1, plan.expert_tp > 1)
        if key not in self._bare:
            self._bare[key] = bare_costs(pricer, kind, modes, only)
        return self._bare[key]

    def alone(
        self, plan: ParallelPlan, recipe: Precision, policy: Recompute, sms: int | None = None
    ) -> CostTable:
        """Cost table of compute outside overlapped pairs at the highest clock, without transfers.

        `sms`: communication SMs of transfers that recompute repeats; None for the scenario's.
        """
        compute = dict(self.compute(plan, recipe, policy, ("alone",), sms))
        if self.profile.power is not None:  # no load leaves a higher clock
            pricer = self.pricer(plan, recipe, policy, sms)
            most = self.profile.power.most_clock
            for kind in self.kinds:
                clock = partial(at_clock, pricer, kind, compute, ALL_MODES[:1], most, most)
                compute |= (
                    clock() if kind in self.routed else self._once_for(kind, compute, "most clock", clock)
                )
        return CostTable(compute, {}, 0.0, 0.0, ())

    def least_host_s(
        self, plan: ParallelPlan, recipe: Precision, policy: Recompute
    ) -> list[tuple[float, float]]:
        """Least seconds of each block kind's forward and whole backward: those of the host's calls."""
        if self.scenario.software.host is None:
            return [(0.0, 0.0)] * len(self.kinds)
        pricer = self.pricer(plan, recipe, self.arithmetic(policy))
        return [least_host_s(pricer, kind) for kind in self.kinds]

    # -- whole tables ----------------------------------------------------------------------------------

    def table(
        self, plan: ParallelPlan, recipe: Precision, policy: Recompute, sms: int, schedule: Schedule
    ) -> CostTable:
        """Cost table with `sms` communication SMs, with the costs inside the schedule's overlapped pairs.

        Sends and ends of the step are `send_s` and `sync`.
        """
        # Collectives inside the step run over the replicas, whose number follows from the pipeline ranks.
        sync, paired, software = self.gradient_sync(plan), schedule.paired, self.scenario.software
        key = (
            "table", plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.microbatch, plan.sequence_parallel,
            self.number(recipe), self.arithmetic(policy), sms, paired,
            (plan.zero_stage, plan.pp, sync) if sync.inside_step else (), *framework_copies(plan, self.job),
            () if software.host is None else stalls_key(software, plan, schedule.name, self.shape.n_layers),
        )  # fmt: skip
        return self._once(key, partial(self._table, plan, recipe, policy, sms, schedule))

    def _table(
        self, plan: ParallelPlan, recipe: Precision, policy: Recompute, sms: int, schedule: Schedule
    ) -> CostTable:
        sync, software, paired = self.gradient_sync(plan), self.scenario.software, schedule.paired
        own_sms = sms if self.repeats_transfers(plan, policy) else None
        compute = dict(self.compute(plan, recipe, policy, ("alone",), own_sms))
        transfer = self.transfers(plan, recipe, sms, "alone")
        modes = ALL_MODES if paired else ALL_MODES[:1]
        if paired:
            compute |= self.compute(plan, recipe, policy, modes[1:], sms)
            transfer |= self.transfers(plan, recipe, sms, "overlapped")
        changed = software.host is not None or self.scenario.communication.overlap_shared_experts
        if sync.inside_step or changed or self.profile.power is not None:
            pricer = self.pricer(plan, recipe, policy, sms, schedule.name)
            about: Key = (
                modes, plan.tp, plan.cp, plan.microbatch, plan.sequence_parallel,
                (plan.zero_stage, plan.pp, sync) if sync.inside_step else (),
            )  # fmt: skip
            if software.host is not None:
                stalls = stalls_key(software, plan, schedule.name, self.shape.n_layers)
                about = (*about, polled_share(pricer), stalls)
            for kind in self.kinds:
                step = partial(inside_step, pricer, kind, compute, transfer, modes, evidence=self.evidence)
                # A block without experts depends on its own compute, its tokens, its replicas and the host.
                inside = step() if kind in self.routed else self._once_for(kind, compute, about, step)
                compute |= inside[0]
                transfer |= inside[1]
        return CostTable(compute, transfer, 0.0, 0.0, (), True, not sync.hidden, software.gathers_wait)

    def transfers(
        self, plan: ParallelPlan, recipe: Precision, sms: int, mode: Mode
    ) -> dict[PhaseKey, TransferCost]:
        """Costs of the expert-parallel transfers of every routed block kind."""
        if not self.routed or plan.ep == 1:
            return {}
        rows = plan.microbatch / (plan.cp * plan.tp)
        key = ("transfers", plan.ep, plan.expert_tp, rows, self.number(recipe), sms, mode)
        moved = self._once(
            key, lambda: block_transfers(self.pricer(plan, recipe, "none", sms), self.routed[0], (mode,))
        )
        return {(kind, phase, mode): cost for kind in self.routed for (_, phase, _), cost in moved.items()}

    def transfer_s(
        self, plan: ParallelPlan, recipe: Precision, sms: int, kept: float = 1.0
    ) -> tuple[float, float]:
        """Seconds of the transfers of one MoE block alone, forward and backward, with even payloads.

        The launch is included. `kept`: share of the routed rows that travel.
        """
        moved = self.transfers(plan, recipe, sms, "alone")
        forward, backward = (
            fsum(
                cost.launch_s + kept * cost.payload_s
                for phase in PHASES_OF[action]
                if self.routed and (cost := moved.get((self.routed[0], phase, "alone"))) is not None
            )
            for action in ("F", "I")
        )
        return forward, backward

    def sync(
        self,
        plan: ParallelPlan,
        recipe: Precision,
        policy: Recompute,
        schedule: Schedule,
        stages: StageAssignment,
        sms: int,
    ) -> tuple[SyncCost, ...]:
        """Costs of the end of the step on every pipeline rank with `sms` communication SMs.

        ZeRO-2 costs as much as ZeRO-1 where gradients stay whole until the last micro-batch. Context
        parallelism, micro-batch, recompute and SMs matter only if the framework hides collectives.
        """
        sync = self.gradient_sync(plan)
        zero = 1 if plan.zero_stage == 2 and not sync.in_backward else plan.zero_stage
        shared: Key = (
            plan.tp, plan.ep, plan.expert_tp, plan.pp, zero, self.number(recipe), len(schedule.routes)
        )  # fmt: skip
        alike = shared
        if sync.hidden:
            passes = min(schedule.pp, schedule.microbatches) if plan.vpp > 1 else 1
            shared = (*shared, plan.cp, plan.microbatch, self.arithmetic(policy), passes, schedule.paired)
            shared = (*shared, *framework_copies(plan, self.job))
            shared = (*shared, sms if plan.ep > 1 and self.routed else None)
        place = id(schedule), id(stages)

        def made() -> tuple[SyncCost, ...]:
            by_place = self.scenario.software.buckets_by_chunk
            ranks = self._once(
                ("chunks", place),
                lambda: (schedule, stages, chunks_by_rank(schedule, stages, by_place=by_place)),
            )[2]  # the entry keeps both alive, and so their ids
            ends: dict[RankChunks, SyncCost] = self._once(("ends", shared), dict)
            missing = [chunks for chunks in dict.fromkeys(ranks) if chunks not in ends]
            if missing:
                pricer = self.pricer(plan, recipe, self.arithmetic(policy), sms)
                of_plan = self._once(("ends of plan", shared), dict[Hashable, Any])
                known = Known(of_plan, self._once(("ends alike", alike), dict[Hashable, Any]), self.evidence)
                ends |= rank_step_ends(pricer, missing, schedule, known)
            return tuple(ends[chunks] for chunks in ranks)

        return self._once(("sync", shared, place), made)

    def update_s(
        self, plan: ParallelPlan, recipe: Precision, schedule: Schedule, stages: StageAssignment
    ) -> list[float]:
        """Seconds of norm and optimizer on every pipeline rank, which hide behind nothing."""
        shared: Key = (
            "update", plan.tp, plan.ep, plan.expert_tp, plan.pp, plan.zero_stage, self.number(recipe),
            len(schedule.routes),
        )  # fmt: skip

        def made(chunks: RankChunks) -> float:
            return update_s(self.pricer(plan, recipe, "none"), chunks, schedule)

        ranks = chunks_by_rank(schedule, stages, by_place=False)
        return [self._once((*shared, chunks.kinds), partial(made, chunks)) for chunks in ranks]

    def send_s(self, plan: ParallelPlan, schedule: Schedule) -> tuple[float, float]:
        """Seconds of one pipeline send alone, and of two that share a port (eq. E7)."""

        def made() -> tuple[float, float]:
            pricer = self.pricer(plan, self.scenario.recipe, "none")
            size, alone_s, across = pipeline_send(pricer, schedule)
            links = pricer.links
            port = links.nic_bytes_per_s if across else links.scale_up_bytes_per_s
            return alone_s, max(alone_s, 2.0 * size / port if size else 0.0)

        # On a torus the expert-parallel degree decides how far away the next rank is.
        return self._once(("send", plan.pp, plan.tp, plan.ep, plan.microbatch / (plan.cp * plan.tp)), made)
