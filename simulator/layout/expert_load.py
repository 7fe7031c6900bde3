"""Draws the rows and tokens that every rank receives, from the popularity of experts (pure, seeded).

Rows above an expert's or a rank's capacity are dropped; ranks with fewer rows wait for the fullest one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, digest, read_only
from moesim.simulator.layout.eplb import ExpertPlacement
from moesim.simulator.layout.loads import SMALLEST_CV, distribute_rows, sampled_loads
from moesim.simulator.layout.popularity import capped_shares

LOAD_STREAM = 2
"""Part of the seed for every expert-parallel group and training step other than the first."""

ROUNDING = 1e-12
"""Fractions of dropped rows up to this one are rounding and count as none."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The distribution that expert load is drawn from.

    `expert_cv` is the coefficient of variation of an expert's popularity between micro-batches and groups.
    `popularity` [steps, layers or 1, experts] holds the lasting shares of the rows, each row summing to 1;
    None makes all experts equal. `placement` says which rank holds each expert and replica; None places
    experts in order, experts/ep on each rank. Rows above `capacity_factor` times the mean are dropped,
    counted per expert or per rank.
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


@dataclass(frozen=True, slots=True)
class RankLoads:
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

    def shared(self) -> RankLoads:
        """The loads with arrays that nobody can write."""
        for array in (self.rows, self.node_rows, self.tokens_in):
            read_only(array)
        return self


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
    step: int = 0,
) -> RankLoads:
    """Draw the loads of the ranks of expert-parallel group `group` in training step `step` (eqs. R3, R4, R8).

    All groups and micro-batches share the popularity of a layer; its variation per micro-batch and the
    rows that each expert gets are drawn for every group and micro-batch. Recorded steps repeat when they run
    out. A plain spec in group 0 of step 0 gives `sampled_loads(seed, ...)`. Raises InputError for sizes that
    do not divide.
    """
    _check(spec, layers, ep, gpus_per_node, experts, top_k, rows_per_rank)
    sizes = _DrawSizes(
        seed, group, step, layers, microbatches, ep, gpus_per_node, experts, top_k, rows_per_rank
    )
    return _LOADS.get((spec.key, sizes), lambda: _drawn(spec, sizes).shared())


class _DrawSizes(NamedTuple):
    seed: int
    group: int
    step: int
    layers: int
    microbatches: int
    ep: int
    gpus_per_node: int
    experts: int
    top_k: int
    rows_per_rank: float


_LOADS: BoundedCache[RankLoads] = BoundedCache(48_000_000, lambda loads: loads.rows.nbytes * 3)
"""Loads drawn before, of at most 48 MB."""


def _drawn(spec: LoadSpec, sizes: _DrawSizes) -> RankLoads:
    seed, group, step, layers, microbatches, ep, gpus_per_node, experts, top_k, rows_per_rank = sizes
    stream = seed if group == 0 and step == 0 else [seed, LOAD_STREAM, group, step]
    samples = layers * microbatches
    if spec.plain:
        rows = (
            np.ones((samples, ep))
            if spec.even
            else sampled_loads(stream, samples, ep, experts, spec.expert_cv, rows_per_rank)
        )
        return RankLoads(rows, _node_mean(rows, gpus_per_node), rows, 0.0)
    shares = _expert_shares(
        spec, stream, layers, microbatches, experts, top_k, round(rows_per_rank * ep), step
    )
    dropped = 0.0
    if spec.capacity_factor is not None and spec.capacity_per == "expert":
        shares = np.minimum(shares, spec.capacity_factor / experts)
    slots = _slot_shares(shares, spec.placement, layers)
    slots = slots.reshape(samples, ep, -1)
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
    return RankLoads(rows, _node_mean(rows, gpus_per_node), tokens, dropped)


def received_bytes(loads: RankLoads, tokens: float, distinct_gpus: float, bytes_per_row: float) -> FloatArray:
    """Bytes that every rank receives in a dispatch of `tokens` tokens a rank [samples, ep] (eq. R8)."""
    return loads.tokens_in * (tokens * distinct_gpus * bytes_per_row)


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
    step: int,
) -> FloatArray:
    """Drawn shares of the group's rows [layers x microbatches, experts], each row summing to 1 (eq. R4)."""
    rng = np.random.default_rng(stream)
    if spec.popularity is None:
        popularity = np.full((1, experts), 1.0 / experts)
    else:
        popularity = spec.popularity[step % len(spec.popularity)]
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


def _slot_shares(shares: FloatArray, placement: ExpertPlacement | None, layers: int) -> FloatArray:
    """Shares of the slots [samples, slots]; an expert's rows are split evenly over its replicas."""
    if placement is None:
        return shares
    by_layer = shares.reshape(layers, -1, shares.shape[1]) / placement.replicas[:, None, :]
    return np.take_along_axis(by_layer, placement.expert_of_slot[:, None, :], axis=2)


def _node_mean(rows: FloatArray, gpus_per_node: int) -> FloatArray:
    samples, ep = rows.shape
    per_node = min(ep, gpus_per_node)
    means = rows.reshape(samples, ep // per_node, per_node).mean(axis=2)
    return np.asarray(means.repeat(per_node, axis=1))


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
