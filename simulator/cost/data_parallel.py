"""Prices collectives over a job's data-parallel groups: rings, seconds alone, slow-down beside compute."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from moesim.simulator.cost.library_collectives import RingOperation, overlap_delay, ring_price
from moesim.simulator.cost.price_evidence import NO_EVIDENCE, PricedSeconds, PriceEvidence, combined
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.model.operator import BlockKind


class Ring(NamedTuple):
    """Number of ranks of a ring, in total and on one node."""

    ranks: int
    ranks_per_node: int


def rings(pricer: Pricer, copies: int) -> tuple[Ring, Ring]:
    """Rings of the dense parameters and of the experts.

    `copies`: number of pipeline ranks that hold the same parameters (2 for a bidirectional pipeline), which
    multiplies the replicas of dense and expert parameters (eq. X7).
    """
    plan, layout = pricer.scenario.parallel, pricer.layout
    node = pricer.links.gpus_per_node
    dense_ranks = layout.dp * plan.cp
    per_node = max(1, min(node // min(plan.tp, node), dense_ranks))
    expert_per_node = max(1, min(node // min(plan.ep * plan.expert_tp, node), layout.expert_dp))
    if pricer.cluster.nodes == 1:  # every copy is on the one node
        per_node, expert_per_node = dense_ranks * copies, layout.expert_dp * copies
    return Ring(dense_ranks * copies, per_node), Ring(layout.expert_dp * copies, expert_per_node)


def shard_rings(pricer: Pricer) -> tuple[Ring, Ring]:
    """Rings over which parameters or gradients are sharded inside a step, by group where one is given."""
    plan, node = pricer.scenario.parallel, pricer.links.gpus_per_node
    if plan.shard_group is None:
        return rings(pricer, 1)
    expert, dense = pricer.layout.shards
    return _ring(dense, plan.tp, node), _ring(expert, plan.ep * plan.expert_tp, node)


def group_rings(pricer: Pricer) -> tuple[Ring, Ring]:
    """Rings over the groups of `parallel.shard_group`: GPUs that hold the same shards (eq. X24)."""
    group, node = pricer.scenario.parallel.shard_group, pricer.links.gpus_per_node
    assert group is not None
    (dense, expert), (expert_shards, shards) = rings(pricer, 1), pricer.layout.shards
    return _ring(dense.ranks // shards, group, node), _ring(expert.ranks // expert_shards, group, node)


def _ring(ranks: int, apart: int, node: int) -> Ring:
    """A ring of ranks that are `apart` GPUs from each other."""
    return Ring(ranks, max(1, min(node // min(apart, node), ranks)))


class Pieces(NamedTuple):
    """Collectives, one after the other, in which dense and expert parameters travel."""

    dense: int = 1
    expert: int = 1


WHOLE = Pieces()


def pieces_of(pricer: Pricer, kinds: Sequence[BlockKind], dense: float, expert: float, copies: int) -> Pieces:
    """Pieces in which a rank's (dense, expert) parameters travel (docs/model.md, eq. X26).

    Collectives that are not overlapped travel whole.
    """
    if not pricer.gradient_sync.hidden:
        return WHOLE
    bucket = pricer.scenario.software.bucket_size(rings(pricer, copies)[0].ranks)
    if bucket is not None:
        return Pieces(max(1, int(dense // bucket)), max(1, int(expert // bucket)))
    held = [pricer.block_parameters(kind) for kind in kinds]
    return Pieces(max(1, sum(d > 0 for d, _ in held)), max(1, sum(e > 0 for _, e in held)))


def data_parallel(
    pricer: Pricer,
    operation: RingOperation,
    dense_bytes: float,
    expert_bytes: float,
    copies: int,
    pieces: Pieces = WHOLE,
    over: tuple[Ring, Ring] | None = None,
) -> PricedSeconds:
    """A collective over the dense and then the expert data-parallel group, alone.

    `copies`: see `rings`. Every piece pays the latency of its ring (eq. X26). `over`: other rings than those.
    """
    seconds, evidence = 0.0, NO_EVIDENCE
    nic = scale_up = 0.0
    sizes = (dense_bytes, expert_bytes)
    for size, ring, count in zip(sizes, over or rings(pricer, copies), pieces, strict=True):
        each = ring_price(operation, size / count, *ring, pricer.links, pricer.profile)
        seconds += count * each.seconds
        nic += count * each.nic_bytes
        scale_up += count * each.scale_up_bytes
        evidence |= each.evidence
    return PricedSeconds(seconds, evidence, nic, scale_up)


def slow_down_by_compute(
    pricer: Pricer,
    names: Sequence[RingOperation],
    kinds: Sequence[BlockKind],
    element_bytes: float,
    copies: int,
) -> tuple[float, PriceEvidence]:
    """Factor by which data-parallel collectives, block by block, take longer beside compute (eq. O8).

    The factor is 1 where the profile has not measured it; only rings of dense parameters were measured.
    """
    ring = rings(pricer, copies)[0]
    of_kind: dict[BlockKind, tuple[tuple[PricedSeconds, ...], PricedSeconds]] = {}
    for kind in dict.fromkeys(kinds):
        dense, expert = (held * element_bytes for held in pricer.block_parameters(kind))
        delays = [overlap_delay(name, dense, *ring, pricer.links, pricer.profile) for name in names]
        delay = PricedSeconds(fsum(d.seconds for d in delays), combined((d.evidence, 1.0) for d in delays))
        own = tuple(data_parallel(pricer, name, dense, expert, copies) for name in names)
        of_kind[kind] = own, delay
    alone = longer = 0.0
    for kind in kinds:
        collectives, delay = of_kind[kind]
        alone += fsum(collective.seconds for collective in collectives)
        longer += delay.seconds
    evidence = combined((priced.evidence, 1.0) for own, delay in of_kind.values() for priced in (*own, delay))
    return 1.0 + longer / alone if alone else 1.0, evidence
