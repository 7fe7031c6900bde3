"""Draws the rows and tokens that every rank receives, from the popularity of experts (pure, seeded).

Rows above an expert's or a rank's capacity are dropped; ranks with fewer rows wait for the fullest one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, digest, read_only
from moesim.simulator.layout.eplb import ExpertPlacement, check_placement, plan_placement
from moesim.simulator.layout.parallel import Layout, nearest_divisors
from moesim.simulator.layout.popularity import (
    bias_dynamics,
    capped_shares,
    check_gate,
    max_vio_shares,
    read_counts,
    shares_of_counts,
    zipf_shares,
)
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.scenario import Scenario
from moesim.simulator.scenario.sections import Eplb, HistogramLoad, MaxVioLoad, Routing, UniformLoad, ZipfLoad

SMALLEST_CV = 1e-6
"""Least coefficient of variation that is drawn; below it experts count as equally popular."""


def sampled_loads(
    seed: int | Sequence[int],
    n_samples: int,
    ep: int,
    experts: int,
    expert_cv: float,
    rows_per_rank: float,
) -> FloatArray:
    """Draw the expert rows of each rank over their mean [n_samples, ep]; each sample averages 1 (eq. R3).

    Every sample draws a popularity for each expert (gamma with mean 1 and coefficient of variation
    `expert_cv`; 0 makes all equal), sums it over the experts/ep experts of a rank, and distributes
    ep x `rows_per_rank` rows accordingly, with the noise of a multinomial approximated by a normal with its
    covariance (0 rows: no such noise). A seed gives the same loads with every NumPy version, because only
    distributions with a stable stream are used. Raises InputError for an `ep` that does not divide and for
    negative numbers.
    """
    if ep < 1 or experts % ep:
        raise InputError(f"parallel.ep={ep} does not divide experts={experts}")
    if not (0 <= expert_cv < inf and 0 <= rows_per_rank < inf and n_samples >= 0):
        raise InputError(
            f"expert_cv={expert_cv}, rows_per_rank={rows_per_rank} and n_samples={n_samples} must be finite "
            "and 0 or more"
        )
    rng = np.random.default_rng(seed)
    if expert_cv > SMALLEST_CV:
        shape = 1.0 / expert_cv**2
        # A sum of independent gammas is a gamma with the sum of their shapes, so one draw per rank is enough.
        popularity = rng.gamma(shape * (experts // ep), size=(n_samples, ep))
        popularity = np.maximum(popularity, np.finfo(np.float64).tiny)
    else:
        popularity = np.ones((n_samples, ep))
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    rows = round(rows_per_rank * ep)
    if rows == 0:
        return np.asarray(shares * ep)
    dealt = distribute_rows(rng, shares, rows)
    return np.asarray(dealt * (ep / dealt.sum(axis=1, keepdims=True)))


def distribute_rows(rng: np.random.Generator, shares: FloatArray, rows: int) -> FloatArray:
    """Shares of `rows` rows after each row picked a receiver by `shares` [samples, receivers] (eq. R3).

    The multinomial is approximated by the normal with its mean and covariance, cut off at 0, so that the
    shares of a sample sum to about 1.
    """
    noise = np.sqrt(shares / rows) * rng.standard_normal(shares.shape)
    return np.asarray(np.maximum(shares + noise - shares * noise.sum(axis=1, keepdims=True), 0.0))


LOAD_STREAM = 2
"""Part of the seed for every expert-parallel group other than the first."""

ROUNDING = 1e-12
"""Fractions of dropped rows up to this one are rounding and count as none."""


class LoadSpec(Struct, frozen=True):
    """The distribution that expert load is drawn from.

    `expert_cv` is the coefficient of variation of an expert's popularity between micro-batches and groups.
    `popularity` [steps, layers or 1, experts] holds the lasting shares of the rows, each row summing to 1, of
    the drawn step first; None makes all experts equal. `placement` says which rank holds each expert and
    replica; None places experts in order, experts/ep on each rank. Rows above `capacity_factor` times the
    mean are dropped, counted per expert or per rank.
    """

    expert_cv: float
    popularity: FloatArray | None = None
    placement: ExpertPlacement | None = None
    capacity_factor: float | None = None
    capacity_per: Literal["expert", "rank"] = "expert"
    notes: tuple[str, ...] = ()
    """Assumptions, as sentences for the result."""

    @property
    def plain(self) -> bool:
        """Whether experts are in order and equally popular, and no rows are dropped."""
        return self.popularity is None and self.placement is None and self.capacity_factor is None

    @property
    def key(self) -> Hashable:
        """All that loads drawn from the distribution depend on, by value."""
        place = self.placement
        return (
            self.expert_cv,
            None if self.popularity is None else digest(self.popularity),
            None if place is None else (place.ranks, digest(place.expert_of_slot), digest(place.replicas)),
            self.capacity_factor,
            self.capacity_per,
        )

    @property
    def even(self) -> bool:
        """Whether every rank always receives the same number of rows."""
        return self.plain and self.expert_cv == 0.0


class RankLoads(Struct, frozen=True):
    """Load of every rank of one expert-parallel group, by sample = layer x microbatches + microbatch.

    `rows` [samples, ep] are the received expert rows over their mean before dropping, and `node_rows` their
    average over the ranks of each node, repeated per rank. `tokens_in` are the distinct tokens received over
    those of even routing, which is what the links carry; it equals `rows` where only the rows of a rank are
    drawn. `dropped` is the fraction of the rows that capacity dropped.
    """

    rows: FloatArray
    node_rows: FloatArray
    tokens_in: FloatArray
    dropped: float


def draw_rank_loads(
    spec: LoadSpec,
    *,
    seed: int,
    group: int,
    layers: int,
    microbatches: int,
    ep: int,
    gpus_per_node: int,
    experts: int,
    top_k: int,
    rows_per_rank: float,
) -> RankLoads:
    """Draw the loads of the ranks of expert-parallel group `group` in a training step (eqs. R3, R4, R8).

    All groups and micro-batches share the popularity of a layer; its variation per micro-batch and the
    rows that each expert gets are drawn for every group and micro-batch. A plain spec in group 0 gives
    `sampled_loads(seed, ...)`. Raises InputError for sizes that do not divide.
    """
    _check(spec, layers, ep, gpus_per_node, experts, top_k, rows_per_rank)
    stream = seed if group == 0 else [seed, LOAD_STREAM, group, 0]
    sizes = (layers, microbatches, ep, gpus_per_node, experts, top_k, rows_per_rank)
    return _LOADS.get((spec.key, seed, group, *sizes), lambda: _drawn(spec, stream, *sizes))


_LOADS: BoundedCache[RankLoads] = BoundedCache(48_000_000, lambda loads: loads.rows.nbytes * 3)
"""Loads drawn before, of at most 48 MB."""


def _drawn(
    spec: LoadSpec,
    stream: int | list[int],
    layers: int,
    microbatches: int,
    ep: int,
    gpus_per_node: int,
    experts: int,
    top_k: int,
    rows_per_rank: float,
) -> RankLoads:
    """The loads of one group, with arrays that nobody can write."""
    samples = layers * microbatches
    if spec.plain:
        rows = (
            np.ones((samples, ep))
            if spec.even
            else sampled_loads(stream, samples, ep, experts, spec.expert_cv, rows_per_rank)
        )
        return RankLoads(read_only(rows), _node_mean(rows, gpus_per_node), rows, 0.0)
    shares = _expert_shares(spec, stream, layers, microbatches, experts, top_k, round(rows_per_rank * ep))
    dropped = 0.0
    if spec.capacity_factor is not None and spec.capacity_per == "expert":
        shares = np.minimum(shares, spec.capacity_factor / experts)
    if spec.placement is not None:  # an expert's rows are split evenly over its replicas
        by_layer = shares.reshape(layers, -1, experts) / spec.placement.replicas[:, None, :]
        shares = np.take_along_axis(by_layer, spec.placement.expert_of_slot[:, None, :], axis=2)
    slots = shares.reshape(samples, ep, -1)
    rows = slots.sum(axis=2) * ep
    missed = np.prod(1.0 - np.minimum(slots * top_k, 1.0), axis=2)
    tokens = (1.0 - missed) / (1.0 - (1.0 - top_k / experts) ** (experts // ep))
    if spec.capacity_factor is not None:
        if spec.capacity_per == "rank":
            accepted = np.minimum(rows, spec.capacity_factor)
            tokens = tokens * (accepted / np.maximum(rows, np.finfo(np.float64).tiny))
            rows = accepted
        lost = 1.0 - float(rows.mean())
        dropped = lost if lost > ROUNDING else 0.0
    return RankLoads(read_only(rows), _node_mean(rows, gpus_per_node), read_only(tokens), dropped)


def barrier_wait_s(loads: RankLoads, row_s: float) -> FloatArray:
    """Seconds that each rank waits for the fullest one if all start together [samples, ep] (eq. R9).

    `row_s` is the time of the row-proportional part of a phase at mean load. For several phases without a
    barrier between them, pass the sum of their times.
    """
    return np.asarray((loads.rows.max(axis=1, keepdims=True) - loads.rows) * row_s)


def expected_barrier_wait_s(loads: RankLoads, row_s: float) -> FloatArray:
    """Mean of `barrier_wait_s` over the samples, for each rank [ep]."""
    return np.asarray(barrier_wait_s(loads, row_s).mean(axis=0))


def _expert_shares(
    spec: LoadSpec,
    stream: int | list[int],
    layers: int,
    microbatches: int,
    experts: int,
    top_k: int,
    rows: int,
) -> FloatArray:
    """Drawn shares of the group's rows [layers x microbatches, experts], each row summing to 1 (eq. R4)."""
    rng = np.random.default_rng(stream)
    even = np.full((1, experts), 1.0 / experts)
    popularity = even if spec.popularity is None else spec.popularity[0]
    shares = np.broadcast_to(popularity[:, None, :], (len(popularity), microbatches, experts))
    shares = np.broadcast_to(shares, (layers, microbatches, experts)).reshape(-1, experts)
    if spec.expert_cv > SMALLEST_CV:
        draws = rng.gamma(1.0 / spec.expert_cv**2, size=shares.shape)
        weights = shares * np.maximum(draws, np.finfo(np.float64).tiny)
        shares = capped_shares(weights / weights.sum(axis=1, keepdims=True), top_k)
    if rows:
        dealt = distribute_rows(rng, shares, rows)
        shares = capped_shares(dealt / dealt.sum(axis=1, keepdims=True), top_k)
    return np.asarray(shares)


def _node_mean(rows: FloatArray, gpus_per_node: int) -> FloatArray:
    samples, ep = rows.shape
    per_node = min(ep, gpus_per_node)
    means = rows.reshape(samples, ep // per_node, per_node).mean(axis=2)
    return read_only(np.asarray(means.repeat(per_node, axis=1)))


def _check(
    spec: LoadSpec, layers: int, ep: int, gpus_per_node: int, experts: int, top_k: int, rows_per_rank: float
) -> None:
    if ep < 1 or experts % ep:
        raise InputError(f"parallel.ep={ep} does not divide experts={experts}")
    if ep % min(ep, gpus_per_node):
        raise InputError(f"parallel.ep={ep} does not fill nodes of {gpus_per_node} GPUs")
    if not (0 <= spec.expert_cv < inf and 0 <= rows_per_rank < inf and 1 <= top_k <= experts):
        raise InputError(
            f"expert_cv={spec.expert_cv} and rows_per_rank={rows_per_rank} must be finite and 0 or more, "
            f"top_k={top_k} 1 to {experts}"
        )
    if spec.capacity_factor is not None and not 0 < spec.capacity_factor < inf:
        raise InputError(
            f"routing.capacity.factor={spec.capacity_factor} must be above 0; V2 used 1.0 a device"
        )
    shape = None if spec.popularity is None else spec.popularity.shape
    if shape is not None and (len(shape) != 3 or shape[1] not in (1, layers) or shape[2] != experts):
        raise InputError(f"popularity has shape {shape}, not [steps, {layers} or 1, {experts}]")
    p = spec.placement
    if p is not None and (p.ranks != ep or p.replicas.shape not in ((layers, experts), (1, experts))):
        raise InputError(
            f"the expert placement is for {p.ranks} ranks and {p.replicas.shape} layers and experts, "
            f"not {ep} and ({layers}, {experts})"
        )


# -- expert load spec --------------------------------------------------------------------------------
# Builds the `LoadSpec` of a scenario for its model and plan.

Popularity = tuple[FloatArray, tuple[str, ...]]
"""Shares [steps, layers or 1, experts], and the assumptions behind them as sentences."""


def load_spec(
    scenario: Scenario, shape: ModelShape, layout: Layout, layers: int, popularity: Popularity | None = None
) -> LoadSpec:
    """Return the distribution of the expert load of `layers` routed layers; reads files, places replicas.

    `popularity`: the result of `popularity_of`, if it was computed already. Raises InputError for keys that
    do not go with the model or the plan, and for files in the wrong format.
    """
    routing, moe = scenario.routing, shape.moe
    stated = stated_load_keys(routing)
    if not stated:
        return LoadSpec(routing.expert_load_cv.value)
    if moe is None:
        raise InputError(f"routing.{stated[0]} is given, but {shape.name} has no experts; leave it out")
    check_load_has_ep(stated, scenario.parallel.ep)
    if layers == 0:
        raise InputError(f"routing.{stated[0]} is given, but no stage holds a layer with routed experts")
    shares, notes = popularity or popularity_of(scenario, moe, layers)
    capacity = routing.capacity
    return LoadSpec(
        expert_cv=routing.expert_load_cv.value,
        popularity=shares,
        placement=_placement(scenario, moe, layout, layers, shares),
        capacity_factor=None if capacity is None else capacity.factor.value,
        capacity_per="expert" if capacity is None else capacity.per,
        notes=notes,
    )


def stated_load_keys(routing: Routing) -> list[str]:
    """Keys of `routing` that describe expert load and that the scenario states."""
    return [key for key in ("load", "capacity", "eplb") if getattr(routing, key) is not None]


def check_load_has_ep(stated: list[str], ep: int) -> None:
    """Raise InputError where the scenario states an expert load without expert parallelism."""
    if stated and ep == 1:
        raise InputError(
            f"routing.{stated[0]} is given, but parallel.ep=1: every GPU holds all experts, so their load "
            "cannot differ between ranks; raise parallel.ep or leave it out"
        )


def popularity_of(scenario: Scenario, moe: MoE, layers: int) -> Popularity:
    """Return the lasting shares of the rows of every expert, and the assumptions; reads files."""
    load, seed = scenario.routing.load, scenario.seed
    even = np.full((1, 1, moe.experts), 1.0 / moe.experts)
    if load is None or isinstance(load, UniformLoad):
        return even, ()
    if isinstance(load, ZipfLoad):
        shares = zipf_shares(
            load.exponent.value,
            layers,
            moe.experts,
            moe.top_k,
            seed,
            shuffle_per_layer=load.shuffle_per_layer,
        )
        return shares[None], ("routing.load: Zipf popularity, a what-if, not a measured load",)
    if moe.zero_experts:
        raise InputError(
            f"routing.load.kind={load.kind}: the model has {moe.zero_experts} experts without computation, "
            "whose share of the choices these loads do not describe; use uniform or zipf"
        )
    if isinstance(load, MaxVioLoad):
        shares = max_vio_shares(load.now, layers, moe.experts, moe.top_k, seed)
        return shares[None], (f"routing.load: MaxVio {load.now:.3g} on every layer (docs/model.md, eq. R10)",)
    if isinstance(load, HistogramLoad):
        counts = read_counts(Path(scenario.path(load.file)))
        place = f"routing.load.file {load.file}"
        table = shares_of_counts(counts, layers=layers, experts=moe.experts, top_k=moe.top_k, place=place)
        if load.step >= len(table):
            raise InputError(f"routing.load.step={load.step}: {load.file} holds steps 0 to {len(table) - 1}")
        return np.roll(table, -load.step, axis=0), ()
    check_gate(moe)
    run = bias_dynamics(
        layers=layers,
        experts=moe.experts,
        top_k=moe.top_k,
        affinity_spread=load.affinity_spread.value,
        drift_steps=load.drift_steps.value,
        gamma=load.gamma.value,
        steps=load.step,
        seed=seed,
    )
    worst = float(run.max_vio[-1].max())
    return run.popularity, (
        f"routing.load: bias dynamics from a model of the scores (docs/model.md, eq. R5); MaxVio after "
        f"{load.step} steps {float(run.max_vio[-1].mean()):.3f} on the mean layer, {worst:.3f} on the worst",
    )


def _placement(
    scenario: Scenario, moe: MoE, layout: Layout, layers: int, popularity: FloatArray
) -> ExpertPlacement | None:
    """Place the replicas for the mean load of the recorded steps; None without `routing.eplb`."""
    eplb = scenario.routing.eplb
    if eplb is None:
        return None
    groups, nodes = check_eplb(eplb, moe, layout)
    mean = np.broadcast_to(popularity.mean(axis=0), (layers, moe.experts))
    return plan_placement(
        mean,
        ranks=layout.plan.ep,
        redundant_experts=eplb.redundant_experts,
        policy=eplb.policy,
        groups=groups,
        nodes=nodes,
    )


def check_eplb(eplb: Eplb, moe: MoE, layout: Layout) -> tuple[int, int]:
    """Return the number of expert groups and of nodes that they spread over.

    Raises InputError for a placement that the plan does not allow.
    """
    ep = layout.plan.ep
    if eplb.redundant_experts % ep:
        below = eplb.redundant_experts // ep * ep
        raise InputError(
            f"routing.eplb.redundant_experts={eplb.redundant_experts} is not a multiple of parallel.ep={ep}, "
            f"so ranks would hold unequal numbers; nearest: {below}, {below + ep}"
        )
    groups = eplb.groups if eplb.groups is not None else (moe.groups if moe.group_limited else 1)
    nodes = layout.nodes_spanned(layout.ep_group(0)) if eplb.policy == "hierarchical" else 1
    if eplb.policy == "hierarchical":
        if moe.experts % groups:
            near = ", ".join(map(str, nearest_divisors(groups, moe.experts)))
            raise InputError(
                f"routing.eplb.groups={groups} does not divide experts={moe.experts}; nearest: {near}"
            )
        if groups % nodes:
            raise InputError(
                f"routing.eplb.policy=hierarchical cannot spread {groups} groups of experts evenly over the "
                f"{nodes} nodes of an expert-parallel group; use policy: global, or a multiple of {nodes} "
                "groups"
            )
    try:
        check_placement(
            moe.experts,
            ranks=ep,
            redundant_experts=eplb.redundant_experts,
            policy=eplb.policy,
            groups=groups,
            nodes=nodes,
        )
    except InputError as error:
        raise InputError(f"routing.eplb: {error}") from None
    return groups, nodes
