"""Prices of the plans of a space; each cost table is computed once and shared by all plans that need it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from typing import Any, TypeVar

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.simulator.common.bounded_cache import BoundedCache
from moesim.simulator.cost.end_of_step import rank_step_end
from moesim.simulator.cost.load_clock import at_clock
from moesim.simulator.cost.price_table import (
    BarePrices,
    bare_prices,
    inside_step,
    pipeline_send,
    with_collectives,
)
from moesim.simulator.cost.pricing import Operators, PhaseMemo, Pricer
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost, PhaseKey, SyncCost, TransferCost
from moesim.simulator.cost.transfers import REPEATED, block_transfers
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.memory.gpu import RankChunks, chunks_by_rank
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.repeated import repeated_communication
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.closed_form import NOT_ROUTED, PHASES_OF, ROUTED, PricedPlan
from moesim.simulator.planner.expert_loads import MemberLag
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.replay import Pattern
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan

# -- step end prices ---------------------------------------------------------------------------------
# Costs of the end of a step, computed once for all plans of a search that share them.

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StepEndPrices:
    """The ends of steps by what a plan shares with others, its pattern and its stages."""

    _syncs: dict[Key, tuple[SyncCost, ...]] = field(default_factory=dict)
    _by_rank: dict[Key, dict[RankChunks, SyncCost]] = field(default_factory=dict)
    _held: dict[Key, list[RankChunks]] = field(default_factory=dict)
    _by_id: dict[Key, tuple[Pattern, StageAssignment, tuple[SyncCost, ...]]] = field(default_factory=dict)
    """Ends of the step by the ids of pattern and stages, which the entries keep alive."""

    def of(
        self,
        shared: Key,
        shape: Pattern,
        stages: StageAssignment,
        pricer_of: Callable[[], Pricer],
    ) -> tuple[SyncCost, ...]:
        """Costs on every pipeline rank; `shared`: all that decides them but schedule and stages."""
        by_id = (shared, id(shape), id(stages))
        known_by_id = self._by_id.get(by_id)
        if known_by_id is not None:
            return known_by_id[2]
        schedule = shape.samples[0]
        place = schedule.routes, stages.layers_per_stage
        key = (shared, *place)
        found = self._syncs.get(key)
        if found is None:
            held = self._held.get(place)
            pricer: Pricer | None = None
            if held is None:
                pricer = pricer_of()
                by_place = pricer.scenario.software.buckets_by_chunk
                held = self._held[place] = chunks_by_rank(schedule, stages, by_place=by_place)
            known = self._by_rank.setdefault(shared, {})
            missing = [kinds for kinds in dict.fromkeys(held) if kinds not in known]
            if missing:
                pricer = pricer or pricer_of()
                known |= {kinds: rank_step_end(pricer, kinds, schedule) for kinds in missing}
            found = self._syncs[key] = tuple(known[kinds] for kinds in held)
        self._by_id[by_id] = shape, stages, found
        return found


# -- recipe numbers ----------------------------------------------------------------------------------
# Numbers of precision recipes: short keys of prices, where the fields of a recipe take long to hash.


class RecipeNumbers:
    """A number for each recipe, in the order in which they are first asked for."""

    def __init__(self, recipes: Iterable[Precision] = ()) -> None:
        """`recipes`: those that get the first numbers, so that keys are those of another process."""
        self._numbers: dict[Precision, int] = {}
        self._known: dict[int, tuple[Precision, int]] = {}
        for recipe in recipes:
            self.of(recipe)

    def of(self, recipe: Precision) -> int:
        """The number of a recipe; equal recipes have the same."""
        known = self._known.get(id(recipe))  # the entry keeps the recipe alive, and so its id
        if known is None:
            number = self._numbers.setdefault(recipe, len(self._numbers))
            known = self._known[id(recipe)] = recipe, number
        return known[1]

    @property
    def recipes(self) -> tuple[Precision, ...]:
        """The recipes in the order of their numbers."""
        return tuple(self._numbers)


# -- shared operators --------------------------------------------------------------------------------
# Operators and their prices, kept for the plans of a search that split and compute a layer alike.

T = TypeVar("T")

MOST_KEPT = 512
"""Most ways to split and compute a layer that are kept; each takes some tens of kilobytes."""


@dataclass(frozen=True, slots=True)
class _Kept:
    operators: dict[BlockKind, Operators] = field(default_factory=dict)
    alone: PhaseMemo = field(default_factory=PhaseMemo)
    beside: dict[int, PhaseMemo] = field(default_factory=dict)
    """Prices beside communication SMs, by their number."""


@dataclass(frozen=True, slots=True)
class SharedOperators:
    """What the pricers of one model, cluster and profile share, by a key of all else that they depend on."""

    _kept: BoundedCache[_Kept] = field(default_factory=lambda: BoundedCache(MOST_KEPT))
    _made: dict[tuple[object, ...], tuple[list[PhaseCost], Any]] = field(default_factory=dict)
    """Values by the ids of the prices that they were made from, which the entries keep alive."""

    def pricer(self, job: ResolvedJob, key: Hashable) -> Pricer:
        """The pricer of a job with what is kept for its key; `key` need not name the communication SMs."""
        kept = self._kept.get(key, _Kept)
        sms = job.scenario.communication.sms
        return Pricer(job, kept.operators, kept.alone, kept.beside.setdefault(sms, PhaseMemo()))

    def once(
        self, kind: BlockKind, compute: Mapping[PhaseKey, PhaseCost], about: object, make: Callable[[], T]
    ) -> T:
        """What `make` makes of one block's prices, the same for all plans that share the prices themselves.

        `about`: what else it depends on.
        """
        own = [cost for (k, _, _), cost in compute.items() if k == kind]
        key = (about, *map(id, own))
        if key not in self._made:
            self._made[key] = own, make()
        found: T = self._made[key][1]
        return found


_ALONE: tuple[Mode, ...] = ("alone",)


@dataclass(slots=True)
class PriceBook:
    """Cost tables, stored by the parts of a plan that they depend on."""

    scenario: Scenario
    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile
    evidence: bool = False
    """Whether prices carry the evidence of the collectives inside a layer, which a search does not read."""
    numbers: RecipeNumbers = field(default_factory=RecipeNumbers)
    """Numbers of the recipes in the keys of prices."""
    elsewhere: set[tuple[object, ...]] = field(default_factory=set)
    """Keys of the cost tables that other processes computed."""
    kinds: tuple[BlockKind, ...] = field(init=False)
    """Block kinds of the model."""
    routed: tuple[BlockKind, ...] = field(init=False)
    """Block kinds with routed experts."""
    _bare: dict[tuple[object, ...], BarePrices] = field(default_factory=dict)
    _compute: dict[tuple[object, ...], dict[PhaseKey, PhaseCost]] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], CostTable] = field(default_factory=dict)
    _transfers: dict[tuple[object, ...], dict[PhaseKey, TransferCost]] = field(default_factory=dict)
    _sends: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _parameters: dict[tuple[int, int, int], dict[BlockKind, tuple[float, float]]] = field(
        default_factory=dict
    )
    """Parameters of the blocks on one GPU, by the degrees that divide them."""
    _shared: SharedOperators = field(default_factory=SharedOperators)
    _ports: tuple[float, float] | None = None
    _ends: StepEndPrices = field(default_factory=StepEndPrices)

    def __post_init__(self) -> None:
        """Read the block kinds from the model."""
        self.kinds = self.shape.block_kinds
        self.routed = tuple(kind for kind in self.kinds if self.shape.block(kind).routed)

    @property
    def keys(self) -> frozenset[tuple[object, ...]]:
        """Keys of the cost tables that were computed, here or in another process."""
        return frozenset(self._bare.keys() | self.elsewhere)

    @property
    def priced(self) -> int:
        """Number of cost tables that were computed."""
        return len(self.keys)

    @property
    def ports(self) -> tuple[float, float]:
        """Bytes/s of a GPU's ports, scale-out (1 where a single node has none) and scale-up."""
        if self._ports is None:
            pricer = self.pricer(self.scenario.parallel, self.scenario.recipe, "none")
            self._ports = pricer.nic_bytes_per_s or 1.0, self.cluster.node.scale_up_bytes_per_s
        return self._ports

    def priced_plan(
        self,
        frame: Frame,
        plan: ParallelPlan,
        choice: tuple[Precision, Recompute, int],
        spread: MemberLag,
        stages: StageAssignment,
    ) -> PricedPlan:
        """All that the closed form reads of one plan.

        `plan`: the frame's, with its ZeRO stage. `choice`: precision recipe, recompute and communication SMs.
        """
        recipe, recompute, sms = choice
        return PricedPlan(
            frame.microbatches,
            stages,
            self.table(plan, recipe, recompute, sms, frame.pattern.paired),
            spread,
            self.send_s(plan, frame.pattern),
            self.sync(plan, recipe, recompute, frame.pattern, stages, sms),
            self.ports,
        )

    def arithmetic(self, policy: Recompute) -> Recompute:
        """The one policy that is priced for all policies with the same compute.

        deepseek-v3 differs from selective only in the bytes that it keeps. Flash attention keeps no scores
        in memory, so the policy attention recomputes nothing there.
        """
        if policy == "attention" and self.scenario.software.attention != "unfused":
            return "none"
        return "selective" if policy == "deepseek-v3" else policy

    def copied(self, plan: ParallelPlan) -> tuple[object, ...]:
        """Further keys of compute for a framework that copies parameters sharded over replicas."""
        software = self.scenario.software
        if plan.zero_stage < 2 or not software.fsdp:
            return ()
        layout = Layout(plan, self.cluster.n_gpus, self.cluster.node.n_gpus)
        return plan.zero_stage, plan.pp > 1, layout.dp * plan.cp > 1, layout.expert_dp > 1

    def gradient_sync(self, plan: ParallelPlan) -> GradientSync:
        """When the gradients of a plan are reduced over its replicas."""
        return self.pricer(plan, self.scenario.recipe, "none").gradient_sync

    def pricer(
        self, plan: ParallelPlan, recipe: Precision, policy: Recompute, sms: int | None = None
    ) -> Pricer:
        """The pricer of one plan."""
        communication = self.scenario.communication
        if sms is not None:
            communication = communication.model_copy(update={"sms": sms})
        scenario = self.scenario.model_copy(
            update={
                "parallel": plan,
                "precision": recipe,
                "recompute": policy,
                "communication": communication,
            }
        )
        # All that operators and their prices depend on; framework copies are the only ones by ZeRO stage.
        key = (
            plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.microbatch, plan.sequence_parallel,
            plan.shard_group, self.numbers.of(recipe), policy, *self.copied(plan),
        )  # fmt: skip
        pricer = self._shared.pricer(ResolvedJob(scenario, self.shape, self.cluster, self.profile), key)
        pricer.share_parameters(self._parameters.setdefault((plan.tp, plan.ep, plan.expert_tp), {}))
        return pricer

    def compute(
        self,
        plan: ParallelPlan,
        recipe: Precision,
        policy: Recompute,
        modes: tuple[Mode, ...],
        sms: int | None = None,
    ) -> dict[PhaseKey, PhaseCost]:
        """Compute costs of every block kind in some modes.

        Only operators on received rows depend on the expert-parallel degree. The others depend on the number
        of tokens per GPU, not on the sequences that they come from. Each of these parts is priced once and
        shared by all plans that have it.
        """
        policy = self.arithmetic(policy)
        number = self.numbers.of(recipe)
        share = (plan.tp, plan.microbatch / plan.cp, number, policy, modes, sms, *self.copied(plan))
        whole = (share, plan.cp, plan.sequence_parallel, plan.ep, plan.expert_tp)
        found = self._compute.get(whole)
        if found is not None:
            return found
        pricer = self.pricer(plan, recipe, policy, sms)
        again = partial(self._repeated, plan, recipe, sms)
        found = self._compute[whole] = {}
        for kind in self.kinds:
            if kind not in self.routed:
                found |= self._unrouted(pricer, kind, modes, share)
                continue
            # Recomputation beside the experts is that of the attention, so its kind must be the same.
            like = next(k for k in self.routed if self._attention(k) == self._attention(kind))
            key = (share, like, plan.ep, plan.expert_tp)
            routed = self._bare_prices(pricer, key, like, modes, ROUTED)
            rest = self._bare_prices(pricer, (share, kind), kind, modes, NOT_ROUTED)
            bare = BarePrices({**rest.compute, **routed.compute}, {**rest.core_s, **routed.core_s})
            found |= with_collectives(pricer, kind, bare, evidence=self.evidence, repeated=again)
        return found

    def _repeated(self, plan: ParallelPlan, recipe: Precision, sms: int | None) -> list[TransferCost]:
        """Dispatch and combine of the forward, which recompute repeats."""
        sms = self.scenario.communication.sms if sms is None else sms
        moved = self.transfers(plan, recipe, sms, "alone")
        return [moved[self.routed[0], phase, "alone"] for phase in REPEATED] if moved else []

    def _unrouted(
        self, pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...], share: tuple[object, ...]
    ) -> dict[PhaseKey, PhaseCost]:
        """Compute of a block without experts, which plans share that differ in the experts' degrees.

        Only reductions of largest elements depend on these degrees, as the ranks that wait for them do.
        """
        plan = pricer.scenario.parallel
        key: tuple[object, ...] = (share, kind, plan.cp, plan.sequence_parallel)
        if pricer.scenario.software.amax_reduction != "none":
            key = (*key, plan.ep, plan.expert_tp)
        found = self._compute.get(key)
        if found is None:
            bare = self._bare_prices(pricer, (share, kind), kind, modes, None)
            found = self._compute[key] = with_collectives(pricer, kind, bare, evidence=self.evidence)
        return found

    def _attention(self, kind: BlockKind) -> Attention | None:
        layer = self.shape.block(kind).layer
        return None if layer is None else layer.attention

    def _bare_prices(
        self,
        pricer: Pricer,
        key: tuple[object, ...],
        kind: BlockKind,
        modes: tuple[Mode, ...],
        only: frozenset[Phase] | None,
    ) -> BarePrices:
        # Only the collectives of split layers need the seconds of GEMMs and attention.
        plan = pricer.scenario.parallel
        key = (*key, plan.tp * plan.cp > 1, plan.expert_tp > 1)
        found = self._bare.get(key)
        if found is None:
            found = self._bare[key] = bare_prices(pricer, kind, modes, only)
        return found

    def alone(
        self, plan: ParallelPlan, recipe: Precision, policy: Recompute, sms: int | None = None
    ) -> CostTable:
        """Cost table of compute outside overlapped pairs at the highest clock, without transfers.

        `sms`: communication SMs of transfers that recompute repeats; None for the scenario's.
        """
        compute = dict(self.compute(plan, recipe, policy, ("alone",), sms))
        if self.profile.power is not None:  # no load leaves a higher clock
            pricer = self.pricer(plan, recipe, policy, sms)
            for kind in self.kinds:
                clock = partial(at_clock, pricer, kind, compute, _ALONE, self.profile.power.most_clock)
                compute |= (
                    clock() if kind in self.routed else self._shared.once(kind, compute, "most clock", clock)
                )
        return CostTable(compute, {}, 0.0, 0.0, ())

    def repeats_transfers(self, plan: ParallelPlan, policy: Recompute) -> bool:
        """Whether the backward dispatches tokens again, so that compute depends on the communication SMs."""
        keeps = self.scenario.software.op_keeps_transfers
        return plan.ep > 1 and any(
            repeated_communication(self.shape.block(kind), policy, keeps).experts for kind in self.routed
        )

    def table(
        self, plan: ParallelPlan, recipe: Precision, policy: Recompute, sms: int, paired: bool
    ) -> CostTable:
        """Cost table with `sms` communication SMs; `paired` adds the prices inside overlapped pairs.

        Plans with equal prices get the same object.
        """
        # Collectives inside the step run over the replicas, whose number follows from the pipeline ranks.
        sync = self.gradient_sync(plan)
        replicas_meet = sync.inside_step
        inside = (plan.zero_stage, plan.pp, sync) if replicas_meet else ()
        key = (
            plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.microbatch, plan.sequence_parallel,
            self.numbers.of(recipe), self.arithmetic(policy), sms, paired, inside, *self.copied(plan),
        )  # fmt: skip
        table = self._tables.get(key)
        if table is not None:
            return table
        own_sms = sms if self.repeats_transfers(plan, policy) else None
        compute = dict(self.compute(plan, recipe, policy, ("alone",), own_sms))
        transfer = self.transfers(plan, recipe, sms, "alone")
        if paired:
            compute |= self.compute(plan, recipe, policy, ("sms_reserved", "overlapped"), sms)
            transfer |= self.transfers(plan, recipe, sms, "overlapped")
        if replicas_meet or self.scenario.software.host is not None or self.profile.power is not None:
            pricer = self.pricer(plan, recipe, policy, sms)
            modes: tuple[Mode, ...] = ("alone", "sms_reserved", "overlapped") if paired else ("alone",)
            for kind in self.kinds:
                added = self._inside_step(pricer, kind, compute, transfer, modes)
                compute |= added[0]
                transfer |= added[1]
        wait = not sync.hidden
        table = self._tables[key] = CostTable(compute, transfer, 0.0, 0.0, (), scatters_wait=wait)
        return table

    def _inside_step(
        self,
        pricer: Pricer,
        kind: BlockKind,
        compute: dict[PhaseKey, PhaseCost],
        transfer: dict[PhaseKey, TransferCost],
        modes: tuple[Mode, ...],
    ) -> tuple[dict[PhaseKey, PhaseCost], dict[PhaseKey, TransferCost]]:
        """`inside_step`; that of a block which sends nothing depends on its own prices and its tokens."""
        plan = pricer.scenario.parallel
        inside = partial(inside_step, pricer, kind, compute, transfer, modes)
        replicas_meet = pricer.gradient_sync.inside_step
        if kind in self.routed or replicas_meet or self.scenario.software.host is not None:
            return inside()
        about = (modes, plan.tp, plan.cp, plan.microbatch, plan.sequence_parallel)
        return self._shared.once(kind, compute, about, inside)

    def transfers(
        self, plan: ParallelPlan, recipe: Precision, sms: int, mode: Mode
    ) -> dict[PhaseKey, TransferCost]:
        """Costs of the expert-parallel transfers of every routed block kind."""
        if not self.routed or plan.ep == 1:
            return {}
        rows = plan.microbatch / (plan.cp * plan.tp)
        key = (plan.ep, plan.expert_tp, rows, self.numbers.of(recipe), sms, mode)
        found = self._transfers.get(key)
        if found is None:
            pricer = self.pricer(plan, recipe, "none", sms)
            found = self._transfers[key] = block_transfers(pricer, self.routed[0], (mode,))
        return {(kind, phase, mode): cost for kind in self.routed for (_, phase, _), cost in found.items()}

    def transfer_s(
        self, plan: ParallelPlan, recipe: Precision, sms: int, kept: float = 1.0
    ) -> tuple[float, float]:
        """Seconds of the transfers of one MoE block alone, forward and backward, with even payloads.

        The launch is included. `kept`: share of the routed rows that travel.
        """
        moved = self.transfers(plan, recipe, sms, "alone")
        sums = {"F": [0.0], "I": [0.0]}
        for action, values in sums.items():
            for phase in PHASES_OF[action]:
                cost = moved.get((self.routed[0], phase, "alone")) if self.routed else None
                if cost is not None:
                    values.append(cost.launch_s + kept * cost.payload_s)
        return fsum(sums["F"]), fsum(sums["I"])

    def sync(
        self,
        plan: ParallelPlan,
        recipe: Precision,
        policy: Recompute,
        shape: Pattern,
        stages: StageAssignment,
        sms: int,
    ) -> tuple[SyncCost, ...]:
        """Costs of the end of the step on every pipeline rank with `sms` communication SMs.

        ZeRO-2 costs as much as ZeRO-1 where gradients stay whole until the last micro-batch. Context
        parallelism, micro-batch, recompute and SMs matter only if the framework hides collectives.
        """
        sync = self.gradient_sync(plan)
        zero = 1 if plan.zero_stage == 2 and not sync.in_backward else plan.zero_stage
        schedule = shape.samples[0]
        shared: tuple[object, ...] = (
            plan.tp, plan.ep, plan.expert_tp, plan.pp, zero, self.numbers.of(recipe), shape.copies
        )  # fmt: skip
        if sync.hidden:
            passes = min(schedule.pp, schedule.microbatches) if plan.vpp > 1 else 1
            shared = (*shared, plan.cp, plan.microbatch, self.arithmetic(policy), passes, *self.copied(plan))
            shared = (*shared, sms if plan.ep > 1 and self.routed else None)
        pricer_of = partial(self.pricer, plan, recipe, self.arithmetic(policy), sms)
        return self._ends.of(shared, shape, stages, pricer_of)

    def send_s(self, plan: ParallelPlan, shape: Pattern) -> tuple[float, float]:
        """Seconds of one pipeline send alone, and of two that share a port (eq. E7)."""
        # On a torus the expert-parallel degree decides how far away the next rank is.
        key = (plan.pp, plan.tp, plan.ep, plan.microbatch / (plan.cp * plan.tp))
        if key not in self._sends:
            pricer = self.pricer(plan, self.scenario.recipe, "none")
            size, alone_s, across = pipeline_send(pricer, shape.samples[0])
            links = pricer.links
            port = links.nic_bytes_per_s if across else links.scale_up_bytes_per_s
            self._sends[key] = alone_s, max(alone_s, 2.0 * size / port if size else 0.0)
        return self._sends[key]
