"""Prices small all-reduces, which are latency and waiting: gradient norm, largest elements of FP8."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, fsum, sqrt

from moesim.simulator.common.order_statistics import expected_maximum
from moesim.simulator.cost.collectives.flows import PROTOCOLS, Hops
from moesim.simulator.cost.collectives.library import Library, load_library
from moesim.simulator.cost.collectives.ring import hops as ring_hops
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import Mode, PhaseCost
from moesim.simulator.layout.parallel import gpus_in_step
from moesim.simulator.model.operator import BlockKind, Phase

PASSES: tuple[tuple[Phase, tuple[Phase, ...]], ...] = (
    ("mlp F", ("attn F", "mlp F")),
    ("attn I", ("mlp I", "mlp W", "attn I", "attn W")),
)
"""Phases of a forward and a backward pass, and the last one of each that hands its output on."""


def small_all_reduce_s(ranks: int, ranks_per_node: int, library: Library | None = None) -> float:
    """Seconds of an all-reduce of a few bytes: the fastest tree or ring (docs/model.md, eq. X27).

    `ranks_per_node`: members on one node.
    """
    if ranks <= 1:
        return 0.0
    library = library or load_library()
    nodes = ceil(ranks / ranks_per_node)
    tree = Hops(2 * (min(ranks, ranks_per_node) - 1), 2 * (nodes - 1).bit_length())
    ways = [library.latency_s("tree", protocol, tree, nodes=nodes) for protocol in PROTOCOLS]
    ring = ring_hops("all_reduce", ranks, nodes)
    ways += [library.latency_s("ring", protocol, ring, nodes=nodes) for protocol in PROTOCOLS]
    return min(ways)


def amax_exposed_s(
    pricer: Pricer, kind: BlockKind, compute: Mapping[tuple[Phase, Mode], PhaseCost]
) -> dict[Phase, float]:
    """Seconds of a layer's share in the reductions of largest elements, by phase (docs/model.md, eq. O14).

    `compute`: the layer's compute, alone on its SMs. Delayed scaling reduces the largest elements of all FP8
    tensors once for every chunk, micro-batch and direction.
    """
    scenario, layout = pricer.scenario, pricer.layout
    reduced, recipe = scenario.software.amax_reduction, scenario.recipe
    delayed = (
        recipe.linear == "fp8" and recipe.scaling == "tensor" and scenario.software.fp8_scales == "delayed"
    )
    if reduced == "none" or not delayed or pricer.shape.block(kind).layer is None:
        return {}
    plan = scenario.parallel
    together = gpus_in_step(layout, pricer.gradient_sync)
    ranks = plan.tp if reduced == "tensor-parallel" else plan.tp * plan.cp * layout.dp
    latency_s = small_all_reduce_s(ranks, min(ranks, pricer.links.gpus_per_node))
    layers = max(1.0, pricer.shape.n_layers / (plan.pp * plan.vpp))
    late = max(0.0, expected_maximum(ranks) - expected_maximum(min(ranks, together)))
    late *= scenario.variation.jitter_cv.value
    found: dict[Phase, float] = {}
    for last, phases in PASSES:
        own = [compute[phase, "alone"] for phase in phases if (phase, "alone") in compute]
        squares = fsum((cost.fixed_s + cost.row_s) ** 2 for cost in own)
        found[last] = (latency_s + late * sqrt(layers * squares)) / layers
    return found
