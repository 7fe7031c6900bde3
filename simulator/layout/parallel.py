"""Maps ranks to coordinates and communication groups, with expert parallelism folded into the others."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.description import SWITCHED, ScaleUpShares
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.stages import MOST_WITHOUT_LAYERS
from moesim.simulator.model.recompute import Recompute, modules_of
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.spec import SCHEDULES


class Coordinates(Struct, frozen=True, order=True):
    """Position of a rank in every dimension; `ep`, `expert_tp` and `expert_dp` divide tp x cp x dp anew."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    expert_tp: int
    expert_dp: int


class Layout(Struct, frozen=True):
    """A parallel plan on a number of GPUs: converts ranks to coordinates and back, and lists the groups.

    Rank numbers vary fastest in tp, then cp, then dp, and slowest in pp; for experts the tp x cp x dp GPUs of
    one pipeline rank vary fastest in expert_tp, then ep, then expert_dp. Raises InputError for a plan that
    does not divide, with the nearest degrees that do.
    """

    plan: ParallelPlan
    n_gpus: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        """Check that every dimension divides."""
        p, n = self.plan, self.n_gpus
        if n < 1 or self.gpus_per_node < 1:
            raise InputError(f"n_gpus={n} and gpus_per_node={self.gpus_per_node} must both be at least 1")
        if n > self.gpus_per_node and n % self.gpus_per_node:
            below = n // self.gpus_per_node * self.gpus_per_node
            raise InputError(
                f"n_gpus={n} does not fill nodes of {self.gpus_per_node} GPUs; nearest: {below}, "
                f"{below + self.gpus_per_node}"
            )
        left = n
        for key, degree in (("pp", p.pp), ("tp", p.tp), ("cp", p.cp)):
            check_divides(f"parallel.{key}", degree, left, f"the {left} GPUs left of n_gpus={n}")
            left //= degree
        inner = self.gpus_per_pipeline_rank
        what = f"tp x cp x dp = {p.tp} x {p.cp} x {self.dp} = {inner}"
        check_divides("parallel.ep", p.ep, inner, what)
        check_divides("parallel.expert_tp", p.expert_tp, inner // p.ep, f"({what}) / ep = {inner // p.ep}")
        self._check_shard_group(inner, what)

    def _check_shard_group(self, inner: int, what: str) -> None:
        p, group = self.plan, self.plan.shard_group
        if group is None:
            return
        if p.zero_stage != 3:
            raise InputError(
                f"parallel.shard_group={group} needs parallel.zero_stage=3, and it is {p.zero_stage}",
                key="parallel.zero_stage",
                nearest=(3,),
            )
        check_divides("parallel.shard_group", group, inner, what)
        for key, part in (("tp", p.tp), ("ep x expert_tp", p.ep * p.expert_tp)):
            if (group % part and part % group) or group < p.tp:
                raise InputError(
                    f"parallel.shard_group={group} does not hold whole groups of {key}={part}; "
                    f"nearest: {part}",
                    key="parallel.shard_group",
                    nearest=(part,),
                )

    @property
    def dp(self) -> int:
        """Data-parallel replicas of non-expert parameters, in one direction of a pipeline."""
        return self.n_gpus // (self.plan.tp * self.plan.cp * self.plan.pp)

    @property
    def gpus_per_pipeline_rank(self) -> int:
        """GPUs that hold the same pipeline rank: tp x cp x dp."""
        return self.n_gpus // self.plan.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of one expert, in one direction of a pipeline."""
        return self.gpus_per_pipeline_rank // (self.plan.ep * self.plan.expert_tp)

    @property
    def shards(self) -> tuple[int, int]:
        """Shards of the experts' and of all other parameters with ZeRO-3, by group where one is given."""
        group = self.plan.shard_group
        if group is None:
            return self.expert_dp, self.dp * self.plan.cp
        return max(1, group // (self.plan.ep * self.plan.expert_tp)), group // self.plan.tp

    @property
    def optimizer_shards(self) -> tuple[int, int]:
        """Shards of the optimizer states of the experts and of all other parameters, from ZeRO-1 on."""
        if self.plan.shard_group is None or self.plan.shard_optimizer_over_groups:
            return self.expert_dp, self.dp * self.plan.cp
        return self.shards

    def coordinates(self, rank: int) -> Coordinates:
        """Position of a rank in every dimension."""
        self._check_rank(rank)
        p = self.plan
        pp, inner = divmod(rank, self.gpus_per_pipeline_rank)
        rest, tp = divmod(inner, p.tp)
        dp, cp = divmod(rest, p.cp)
        rest, expert_tp = divmod(inner, p.expert_tp)
        expert_dp, ep = divmod(rest, p.ep)
        return Coordinates(pp, dp, cp, tp, ep, expert_tp, expert_dp)

    def rank(self, pp: int, dp: int, cp: int, tp: int) -> int:
        """The rank at these coordinates."""
        p = self.plan
        for key, value, size in (("pp", pp, p.pp), ("dp", dp, self.dp), ("cp", cp, p.cp), ("tp", tp, p.tp)):
            if not 0 <= value < size:
                raise InputError(f"coordinate {key}={value} is outside 0 to {size - 1}")
        return ((pp * self.dp + dp) * p.cp + cp) * p.tp + tp

    def dp_group(self, rank: int) -> tuple[int, ...]:
        """Ranks with the same parameters and other micro-batches."""
        return self._strided(rank, self.plan.tp * self.plan.cp, self.dp)

    def ep_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that exchange tokens and together hold every expert once."""
        return self._strided(rank, self.plan.expert_tp, self.plan.ep)

    def pp_group(self, rank: int) -> tuple[int, ...]:
        """Ranks of one pipeline, first to last."""
        return self._strided(rank, self.gpus_per_pipeline_rank, self.plan.pp)

    def node(self, rank: int) -> int:
        """Number of the node that a rank is on."""
        self._check_rank(rank)
        return rank // self.gpus_per_node

    def nodes_spanned(self, group: tuple[int, ...]) -> int:
        """Number of nodes that the ranks of a group are on."""
        for rank in (min(group), max(group)):
            self._check_rank(rank)
        return len({rank // self.gpus_per_node for rank in group})

    def _strided(self, rank: int, stride: int, size: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` only in the dimension with this stride and size."""
        self._check_rank(rank)
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + stride * size, stride))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.n_gpus:
            raise InputError(f"rank {rank} is outside 0 to {self.n_gpus - 1}")


def check_against_model(plan: ParallelPlan, shape: ModelShape, sequence: int, n_stages: int) -> None:
    """Raise InputError where the plan does not divide the model or the sequence.

    `n_stages` is the number of pipeline stages of the schedule (pp, pp x vpp, or 2 pp for the V shapes) that
    layers, embedding and head must fill.
    """
    moe = shape.moe
    for attention in shape.attention_by_name.values():
        for size, what in attention.tp_limits(plan.tp):
            check_divides("parallel.tp", plan.tp, size, what)
    for half in shape.feed_forward_by_name.values():
        for size, what in half.tp_limits():
            check_divides("parallel.tp", plan.tp, size, what)
    if plan.sequence_parallel and plan.tp == 1:
        raise InputError(
            "parallel.sequence_parallel=true needs parallel.tp of at least 2; tp is 1",
            key="parallel.sequence_parallel",
            nearest=(False,),
        )
    if moe is None:
        for key, degree in (("ep", plan.ep), ("expert_tp", plan.expert_tp)):
            if degree > 1:
                raise InputError(
                    f"parallel.{key}={degree} but {shape.name} has no experts; use {key}: 1",
                    key=f"parallel.{key}",
                    nearest=(1,),
                )
    else:
        check_divides("parallel.ep", plan.ep, moe.experts, f"experts={moe.experts}")
        check_divides("parallel.expert_tp", plan.expert_tp, moe.expert_ffn, f"expert_ffn={moe.expert_ffn}")
        if plan.tp > 1 and not plan.sequence_parallel:
            raise InputError(
                f"parallel.tp={plan.tp} with experts needs parallel.sequence_parallel: true; otherwise every "
                "rank of a TP group would dispatch the same tokens",
                key="parallel.sequence_parallel",
                nearest=(True,),
            )
    # To balance causal attention, every context-parallel rank has one early and one late slice.
    slices = 2 * plan.cp if plan.cp > 1 else 1
    if sequence % slices:
        near = nearest_divisors(plan.cp, sequence // 2) if sequence % 2 == 0 else [1]
        raise InputError(
            f"parallel.cp={plan.cp} does not cut sequence={sequence} into {slices} equal slices; "
            f"nearest: {_listed(near)}",
            key="parallel.cp",
            nearest=near,
        )
    if plan.sequence_parallel:
        check_divides("parallel.tp", plan.tp, sequence // plan.cp, f"sequence / cp = {sequence // plan.cp}")
    most = shape.n_layers + MOST_WITHOUT_LAYERS
    if n_stages > most:
        raise InputError(
            f"{n_stages} pipeline stages (parallel.pp={plan.pp}, vpp={plan.vpp}) are more than the "
            f"{shape.n_layers} layers of {shape.name} fill with embedding and head alone on two; use at most "
            f"{most} stages, or give stages.layers with zeros"
        )


def tokens_per_gpu(plan: ParallelPlan, sequence: int) -> float:
    """Tokens of a micro-batch that one GPU dispatches to its expert-parallel group; CP and TP split them."""
    return plan.microbatch * sequence / (plan.cp * plan.tp)


def microbatches(layout: Layout, global_batch: int) -> int:
    """Micro-batches that each data-parallel rank runs in one step; `global_batch` counts sequences.

    Raises InputError where the batch does not divide, with the nearest batches that do.
    """
    unit = layout.dp * layout.plan.microbatch
    if global_batch < 1 or global_batch % unit:
        below = global_batch // unit * unit
        near = [n for n in (below, below + unit) if n > 0]
        raise InputError(
            f"batch of {global_batch} sequences is not a multiple of dp x microbatch = {layout.dp} x "
            f"{layout.plan.microbatch} = {unit}; nearest: {_listed(near)}",
            key="batch.sequences",
            nearest=near,
        )
    return global_batch // unit


def check_divides(key: str, value: int, whole: int, what: str) -> None:
    """Raise InputError naming the nearest divisors where `value` does not divide `whole`."""
    if whole % value:
        near = nearest_divisors(value, whole)
        raise InputError(
            f"{key}={value} does not divide {what}; nearest: {_listed(near)}", key=key, nearest=near
        )


def nearest_divisors(value: int, whole: int) -> list[int]:
    """Largest divisor of `whole` up to `value` and smallest one from `value` on, without repeats."""
    divisors = [d for d in range(1, int(whole**0.5) + 1) if whole % d == 0]
    divisors += [whole // d for d in divisors]
    below = max(d for d in divisors if d <= max(value, 1))
    above = min((d for d in divisors if d >= value), default=below)
    return sorted({below, above})


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# -- groups ------------------------------------------------------------------------------------------
# Lists the GPUs in each group of a pipeline rank, and counts its sends that share a torus link (pure).

MOST_MEMBERS = 256
"""Most GPUs that one program simulates where there is no expert-parallel group to set the number."""


def members_per_program(layout: Layout) -> int:
    """GPUs that a program simulates for each pipeline rank: one expert-parallel group, or replicas."""
    return layout.plan.ep if layout.plan.ep > 1 else min(layout.dp, MOST_MEMBERS)


def gpus_in_step(layout: Layout, sync: GradientSync) -> int:
    """GPUs that one member of a program represents, because they meet inside every layer (eq. E1a).

    Tensor and context parallelism make a member's GPUs wait for each other in every layer. Without expert
    parallelism a member is a replica, which has all of them; where collectives inside the step join all
    replicas (ZeRO-3, sharded gradients), the simulated ones represent all. With it a member is a GPU of the
    group, and represents more only where tensor and context parallelism span several groups.
    """
    plan = layout.plan
    together = plan.tp * plan.cp
    if plan.ep > 1:
        return max(together, plan.ep * plan.expert_tp) // plan.ep
    return together * (-(-layout.dp // MOST_MEMBERS) if sync.inside_step else 1)


def independent_groups(layout: Layout, sync: GradientSync) -> int:
    """Groups of a pipeline rank that meet only at the end of the step; folded resolution simulates one.

    Without expert parallelism every member is a replica of its own, and one program holds them all.
    """
    if layout.plan.ep == 1:
        return 1
    return max(1, layout.gpus_per_pipeline_rank // (layout.plan.ep * gpus_in_step(layout, sync)))


def grouped_gpus(layout: Layout, wiring: ScaleUpShares = SWITCHED) -> IntArray:
    """Global GPU numbers [pipeline rank, group, member] of expert-parallel groups, or of consecutive GPUs.

    On a torus a group is the block of chips for which its exchange is priced (docs/model.md, eq. H3).
    """
    plan, inner = layout.plan, layout.gpus_per_pipeline_rank
    numbers = np.arange(layout.n_gpus, dtype=np.int64).reshape(plan.pp, inner)
    if 1 < plan.ep <= layout.gpus_per_node:
        blocks = wiring.groups(plan.ep, layout.n_gpus)
        if blocks is not None:
            return blocks.reshape(plan.pp, -1, plan.ep)
    if plan.ep > 1:
        folded = numbers.reshape(plan.pp, layout.expert_dp, plan.ep, plan.expert_tp)
        return folded.transpose(0, 1, 3, 2).reshape(plan.pp, -1, plan.ep)
    members = max(m for m in range(1, min(inner, MOST_MEMBERS) + 1) if inner % m == 0)
    return numbers.reshape(plan.pp, -1, members)


def sends_on_a_link(layout: Layout, wiring: ScaleUpShares) -> int:
    """Number of sends on the busiest link when all GPUs of a pipeline rank send to the next rank at once.

    It is 1 where every GPU has a link of its own; on a torus the next rank is several chips away (eq. X4).
    """
    if not wiring.links_are_shared:
        return 1
    gpus = grouped_gpus(layout, wiring).reshape(layout.plan.pp, -1)
    pairs = [(gpus[rank], gpus[rank + 1]) for rank in range(layout.plan.pp - 1)]
    return max((wiring.busiest_link(*way) for a, b in pairs for way in ((a, b), (b, a))), default=1)


# -- expert overlap ----------------------------------------------------------------------------------
# Limits of schedules that hide the transfers of experts, as Megatron core checks them (pure).


def hides_experts(schedule: str) -> bool:
    """Whether the pairs of a named schedule are Megatron core's expert overlap; no schedule of a file is."""
    spec = SCHEDULES.get(schedule)
    return spec is not None and spec.hides_expert_transfers


def repeats_experts(recompute: Recompute) -> bool:
    """Whether a policy runs the transfers of experts again in the backward."""
    return recompute == "full" or "moe" in modules_of(recompute)


def check_expert_overlap(schedule: str, plan: ParallelPlan, *, routed: bool) -> None:
    """Raise InputError for a plan without transfers to hide, or without another virtual stage to hide them.

    `routed`: whether the model has routed experts. Source: NVIDIA/Megatron-LM@core_v0.15.0
    megatron/core/transformer/transformer_config.py, checks of `overlap_moe_expert_parallel_comm`.
    """
    if not hides_experts(schedule):
        return
    what = f"schedule={schedule} hides the transfers of experts"
    if not routed or plan.ep == 1:
        raise InputError(
            f"{what}, and this plan has none (parallel.ep={plan.ep}); use 1f1b or interleaved-1f1b",
            key="schedule",
            nearest=("interleaved-1f1b" if plan.vpp > 1 else "1f1b",),
        )
    if plan.pp > 1 and plan.vpp == 1:
        raise InputError(
            f"{what} behind another virtual stage, and parallel.vpp is 1 with pp={plan.pp}; use a vpp of 2",
            key="parallel.vpp",
            nearest=(2,),
        )
