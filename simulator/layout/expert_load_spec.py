"""Builds the `LoadSpec` of a scenario for its model and plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.bias import bias_dynamics, check_gate
from moesim.simulator.layout.eplb import ExpertPlacement, check_placement, plan_placement
from moesim.simulator.layout.expert_load import LoadSpec
from moesim.simulator.layout.histogram import read_counts
from moesim.simulator.layout.parallel import Layout, nearest_divisors
from moesim.simulator.layout.popularity import max_vio_shares, shares_of_counts, zipf_shares
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.routing import Eplb, HistogramLoad, MaxVioLoad, UniformLoad, ZipfLoad
from moesim.simulator.scenario.scenario import Scenario
from moesim.simulator.scenario.sections import Routing

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
