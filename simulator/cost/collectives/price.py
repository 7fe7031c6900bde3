"""Seconds of a collective on a topology: every algorithm and protocol that fits, the fastest one chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import Topology
from moesim.simulator.cost.collectives import exchange, nvls, ring, tree
from moesim.simulator.cost.collectives.library import Library
from moesim.simulator.cost.collectives.network import LinkLoads, Shares, largest_by_gpu, link_loads
from moesim.simulator.cost.collectives.plan import (
    PROTOCOLS,
    Group,
    Operation,
    Plan,
    Protocol,
    group_by_node,
    size_of,
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one way to run a collective, and what they consist of."""

    algorithm: str
    protocol: Protocol
    latency_s: float
    payload_s: float
    own_s: float
    bottleneck: str
    """The busiest link, or the kernel where its rate is the limit."""

    @property
    def seconds(self) -> float:
        """All three one after the other."""
        return self.latency_s + self.payload_s + self.own_s


def collective(
    operation: Operation,
    total_bytes: float,
    ranks: Sequence[int],
    topology: Topology,
    library: Library,
    *,
    in_switch: bool = False,
) -> Estimate:
    """The fastest way, as a library chooses it: by its own estimate of each (eq. X13).

    `total_bytes`: the whole buffer (input of an all-reduce, reduce-scatter or all-to-all on one rank, output
    of an all-gather). `in_switch`: an all-reduce may also be reduced in the switch. Raises InputError for
    negative bytes, groups of fewer than two ranks, and in-switch reduction where there is none.
    """
    if not total_bytes >= 0.0:
        raise InputError(f"a collective of {total_bytes} bytes: bytes must be 0 or more")
    group = group_by_node(ranks, topology.gpus_per_node)
    if operation == "all_to_all":
        return _exchange(total_bytes, group, topology, library)
    plans = [ring.plan(operation, total_bytes, group)]
    if operation == "all_reduce":
        plans.append(tree.plan(total_bytes, group))
    loads = [[link_loads(phase.flows, topology) for phase in plan.phases] for plan in plans]
    ways = [
        estimate(plan, each, protocol, len(group), topology, library)
        for plan, each in zip(plans, loads, strict=True)
        for protocol in PROTOCOLS
    ]
    if in_switch:
        ways.append(_in_switch(operation, total_bytes, group, topology, library))
    return min(ways, key=lambda way: way.seconds)


def neighbour_sends(
    total_bytes: float, pairs: Sequence[tuple[int, int]], topology: Topology, library: Library
) -> Estimate:
    """Sends between pairs of GPUs, all at the same time (pipeline neighbours; eq. X13)."""
    across = any(topology.node_of(a) != topology.node_of(b) for a, b in pairs)
    plan = exchange.sends(total_bytes, pairs, across_nodes=across)
    loads = [link_loads(phase.flows, topology) for phase in plan.phases]
    protocol: Protocol = "LL" if total_bytes <= library.small_message.value else "Simple"
    return estimate(plan, loads, protocol, 2 if across else 1, topology, library)


def estimate(
    plan: Plan,
    loads: Sequence[LinkLoads],
    protocol: Protocol,
    nodes: int,
    topology: Topology,
    library: Library,
    scale_up_share: float | None = None,
) -> Estimate:
    """Latency, busiest link and own copies of a plan under one protocol, phases added up (eq. X13)."""
    architecture = topology.node.accelerator.architecture
    share = scale_up_share or library.generation(architecture).scale_up_share.value
    wire = library.wire_shares[protocol].value * (
        library.tree_share.value if plan.algorithm == "tree" else 1.0
    )
    limit = library.rate_limit(architecture, protocol, nodes)
    family: Literal["ring", "tree"] = "tree" if plan.algorithm == "tree" else "ring"
    latency = payload = own = 0.0
    bottleneck = "latency"
    for phase, load in zip(plan.phases, loads, strict=True):
        link, link_s = load.busiest(Shares(share, library.nic_share.value))
        kernel_s = largest_by_gpu(phase.flows) / limit
        link_s /= wire
        if max(link_s, kernel_s) > 0.0:
            bottleneck = f"kernel ({protocol})" if kernel_s > link_s else link
        latency += library.latency_s(family, protocol, phase.hops, nodes=nodes)
        payload += max(link_s, kernel_s)
        own += phase.own_bytes / library.local_copy_bytes_per_s
    return Estimate(plan.algorithm, protocol, latency, payload, own, bottleneck)


def _exchange(total_bytes: float, group: Group, topology: Topology, library: Library) -> Estimate:
    plan = exchange.all_to_all(total_bytes, group)
    loads = [link_loads(phase.flows, topology) for phase in plan.phases]
    small = total_bytes / size_of(group) <= library.small_message.value
    return estimate(
        plan, loads, "LL" if small else "Simple", len(group), topology, library, library.exchange_share.value
    )


def _in_switch(
    operation: Operation, total_bytes: float, group: Group, topology: Topology, library: Library
) -> Estimate:
    architecture = topology.node.accelerator.architecture
    figures = library.generation(architecture)
    if operation != "all_reduce" or figures.nvls_share is None:
        raise InputError(
            f"no in-switch {operation} for architecture {architecture!r} in library {library.name!r}"
        )
    plan = nvls.plan(total_bytes, group)
    loads = [link_loads(phase.flows, topology) for phase in plan.phases]
    share = figures.scale_up_share.value * figures.nvls_share.value
    found = estimate(plan, loads, "Simple", len(group), topology, library, share)
    return replace(found, latency_s=library.nvls_latency.value)
