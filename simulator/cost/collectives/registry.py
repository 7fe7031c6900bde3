"""All algorithms of collectives, and the fastest of them for a request on a topology.

A new algorithm is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import Topology
from moesim.hwmodels.validation import nearest, registry
from moesim.simulator.cost.collectives import exchange
from moesim.simulator.cost.collectives.exchange import DIRECT
from moesim.simulator.cost.collectives.flows import (
    LinkLoads,
    Operation,
    Plan,
    Protocol,
    Shares,
    group_by_node,
    link_loads,
)
from moesim.simulator.cost.collectives.library import CollectiveSpec, Library, Request, Terms
from moesim.simulator.cost.collectives.nvls import NVLS
from moesim.simulator.cost.collectives.ring import RING
from moesim.simulator.cost.collectives.tree import TREE

COLLECTIVES: Mapping[str, CollectiveSpec] = registry(
    RING,
    TREE,
    NVLS,
    DIRECT,
)
"""Algorithms by name; the fastest one that can run an operation is taken, of equally fast ones the first."""


def operations() -> tuple[str, ...]:
    """Every operation that some algorithm can run."""
    return tuple(dict.fromkeys(name for spec in COLLECTIVES.values() for name in spec.operations))


class CollectiveEstimate(Struct, frozen=True):
    """Seconds of a collective under one algorithm and protocol, and their parts."""

    algorithm: str
    protocol: Protocol
    latency_s: float
    payload_s: float
    own_s: float
    bottleneck: str
    """The busiest link, or the kernel where its rate is the limit."""

    @property
    def seconds(self) -> float:
        """The sum of the three parts, which run one after the other."""
        return self.latency_s + self.payload_s + self.own_s


def collective(
    operation: Operation,
    total_bytes: float,
    ranks: Sequence[int],
    topology: Topology,
    library: Library,
    *,
    in_switch: bool = False,
) -> CollectiveEstimate:
    """The fastest algorithm and protocol by the library's own estimates (eq. X13).

    `total_bytes`: the whole buffer (input of an all-reduce, reduce-scatter or all-to-all on one rank, output
    of an all-gather). `in_switch`: switches may also reduce. Raises InputError for negative bytes, groups of
    fewer than two ranks, an operation that no algorithm can run, and in-switch reduction on switches that
    cannot reduce.
    """
    if not total_bytes >= 0.0:
        raise InputError(f"a collective of {total_bytes} bytes: bytes must be 0 or more")
    group = group_by_node(ranks, topology.gpus_per_node)
    request = Request(operation, total_bytes, group, topology.node.accelerator.architecture, library)
    ways: list[CollectiveEstimate] = []
    for spec, terms in _able(request, in_switch):
        plan = spec.plan(operation, total_bytes, group)
        loads = [link_loads(phase.flows, topology) for phase in plan.phases]
        ways += [
            estimate(plan, loads, protocol, len(group), topology, library, terms)
            for protocol in terms.protocols
        ]
    return min(ways, key=lambda way: way.seconds)


def _able(request: Request, in_switch: bool) -> list[tuple[CollectiveSpec, Terms]]:
    """Algorithms that can run a request, with their terms; raises InputError where no algorithm can."""
    if request.operation not in operations():
        known = [*operations()]
        raise InputError(
            f"no algorithm can do the collective {request.operation!r}{nearest(request.operation, known)}; "
            f"they can do {', '.join(known)}"
        )
    runnable = [
        (spec, terms)
        for spec in COLLECTIVES.values()
        if request.operation in spec.operations and (in_switch or not spec.in_switch)
        if (terms := spec.terms(request)) is not None
    ]
    if in_switch and not any(spec.in_switch for spec, _ in runnable):
        raise InputError(
            f"no in-switch {request.operation} for architecture {request.architecture!r} in library "
            f"{request.library.name!r}"
        )
    if not runnable:
        raise InputError(
            f"no algorithm runs {request.operation} for a group of {sum(map(len, request.group))} ranks on "
            f"{len(request.group)} nodes of architecture {request.architecture!r}"
        )
    return runnable


def neighbour_sends(
    total_bytes: float, pairs: Sequence[tuple[int, int]], topology: Topology, library: Library
) -> CollectiveEstimate:
    """Estimate of simultaneous sends between pairs of GPUs such as pipeline neighbours (eq. X13)."""
    across = any(topology.node_of(a) != topology.node_of(b) for a, b in pairs)
    plan = exchange.sends(total_bytes, pairs, across_nodes=across)
    loads = [link_loads(phase.flows, topology) for phase in plan.phases]
    terms = exchange.message_terms(total_bytes, library)
    return estimate(plan, loads, terms.protocols[0], 2 if across else 1, topology, library, terms)


def estimate(
    plan: Plan,
    loads: Sequence[LinkLoads],
    protocol: Protocol,
    nodes: int,
    topology: Topology,
    library: Library,
    terms: Terms,
) -> CollectiveEstimate:
    """Latency, busiest link and own copies of a plan under one protocol, summed over its phases (eq. X13)."""
    architecture = topology.node.accelerator.architecture
    share = terms.scale_up_share or library.generation(architecture).scale_up_share.value
    wire = library.wire_shares[protocol].value * terms.wire_share
    limit = library.rate_limit(architecture, protocol, nodes)
    latency = payload = own = 0.0
    bottleneck = "latency"
    for phase, load in zip(plan.phases, loads, strict=True):
        link, link_s = load.busiest(Shares(share, library.nic_share.value))
        # The communication SMs of a GPU move all that it sends.
        sent = np.bincount(phase.flows.src, phase.flows.bytes)
        kernel_s = float(sent.max()) / limit if len(sent) else 0.0
        link_s /= wire
        if max(link_s, kernel_s) > 0.0:
            bottleneck = f"kernel ({protocol})" if kernel_s > link_s else link
        latency += library.latency_s(terms.latencies, protocol, phase.hops, nodes=nodes)
        payload += max(link_s, kernel_s)
        own += phase.own_bytes / library.local_copy_bytes_per_s
    if terms.latency_s is not None:
        latency = terms.latency_s
    return CollectiveEstimate(plan.algorithm, protocol, latency, payload, own, bottleneck)
