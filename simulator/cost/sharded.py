"""Prices ZeRO-3 inside the step: collectives by block, and compute beside them (docs/model.md, eq. O5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import fsum

from moesim.simulator.cost.collectives.ring import busiest_bytes
from moesim.simulator.cost.data_parallel import data_parallel, shard_rings
from moesim.simulator.cost.library_collectives import RingOperation, overlap_delay
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT


def sharded_phases(pricer: Pricer, kind: BlockKind) -> tuple[dict[Phase, TransferCost], dict[Phase, float]]:
    """ZeRO-3's all-gathers and reduce-scatter of a block, beside its compute, and their seconds alone."""
    recipe, links, profile = pricer.scenario.recipe, pricer.links, pricer.profile
    dense, expert = pricer.block_parameters(kind)
    dense_ring, expert_ring = over = shard_rings(pricer)
    costs: dict[Phase, TransferCost] = {}
    alone: dict[Phase, float] = {}
    phases: tuple[Phase, ...] = ("gather F", "gather B", "scatter W")
    for phase in phases:
        scatter = phase == "scatter W"
        size = BYTES_PER_ELEMENT[recipe.gradient_reduce if scatter else recipe.parameter_gather]
        held = ((dense, dense_ring), (expert, expert_ring))
        moved = [busiest_bytes("all_gather", count * size, *ring) for count, ring in held]
        nic, scale_up = (fsum(bytes_[i] for bytes_ in moved) for i in (0, 1))
        name: RingOperation = "reduce_scatter" if scatter else "all_gather"
        delay = overlap_delay(name, dense * size, *dense_ring, links, profile)
        collective = data_parallel(pricer, name, dense * size, expert * size, 1, over=over)
        alone[phase] = collective.seconds
        both = collective.seconds + delay.seconds
        evidence = collective.evidence | delay.evidence
        costs[phase] = TransferCost(0.0, both, both, nic, scale_up, 0.0, both, evidence)
    return costs, alone


def slowed_by_overlap(
    kind: BlockKind,
    compute: Mapping[tuple[BlockKind, Phase, Mode], PhaseCost],
    alone_s: Mapping[Phase, float],
    lost: float,
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block with ZeRO-3's collectives beside it, spread evenly over its phases (eq. O5).

    `alone_s`: seconds that each collective takes alone. `lost`: seconds that compute loses for each of these
    seconds.
    """
    out: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    passes: tuple[tuple[bool, tuple[Phase, ...]], ...] = (
        (True, ("gather F",)), (False, ("gather B", "scatter W"))
    )  # fmt: skip
    for forward, collectives in passes:
        own = {
            key: cost for key, cost in compute.items() if key[0] == kind and key[1].endswith(" F") == forward
        }
        total = fsum(cost.fixed_s + cost.row_s for cost in own.values())
        hidden = min(total, fsum(alone_s[phase] for phase in collectives))
        factor = 1.0 + lost * hidden / total if total else 1.0
        for key, cost in own.items():
            out[key] = replace(cost, fixed_s=cost.fixed_s * factor, row_s=cost.row_s * factor,
                               worst_s=max(cost.worst_s, (cost.fixed_s + cost.row_s) * factor))  # fmt: skip
    return out
