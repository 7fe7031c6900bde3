"""Ring all-reduce, reduce-scatter and all-gather."""

from __future__ import annotations

from math import inf

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.collectives.flows import (
    PROTOCOLS,
    Group,
    Hops,
    Operation,
    Phase,
    Plan,
    flows_of,
    rails_of,
    size_of,
)
from moesim.simulator.cost.collectives.library import CollectiveSpec, Library

PASSES: dict[Operation, int] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Rounds through the ring; an all-reduce is a reduce-scatter and an all-gather in one kernel."""


def plan(operation: Operation, total_bytes: float, group: Group) -> Plan:
    """Rings through all NICs of the nodes; every edge carries (n-1)/n of the buffer a round (eq. X8).

    `total_bytes`: the whole buffer (output of an all-gather, input of a reduce-scatter on one rank). One node
    has a single ring; several nodes have one ring a rail, each with its share of the bytes. A ring enters a
    node at its rail's GPU, visits all GPUs and leaves to the GPU with the same place on the next node. It
    visits every second node backwards, so that with an even number of nodes all crossings stay on their rail.
    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md for the bytes; NVIDIA/nccl src/graph/search.cc for the rails.
    """
    if operation not in PASSES:
        raise InputError(f"there is no ring for {operation!r}; there is one for {', '.join(PASSES)}")
    n, nodes = size_of(group), len(group)
    rails = rails_of(group) if nodes > 1 else 1
    each = PASSES[operation] * total_bytes * (n - 1) / n / rails
    edges = []
    for rail in range(rails):
        order = ring_order(group, rail)
        edges += [(a, b, each) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    phase = Phase(flows_of(edges), hops(operation, n, nodes), own_bytes=own_bytes(total_bytes, n))
    return Plan(operation, "ring", (phase,))


def hops(operation: Operation, ranks: int, nodes: int) -> Hops:
    """Dependent steps: n-1 a round, of which nodes-1 cross the network (eq. X12)."""
    between = PASSES[operation] * (nodes - 1)
    return Hops(PASSES[operation] * (ranks - 1) - between, between)


def ring_order(group: Group, rail: int) -> tuple[int, ...]:
    """The ranks in the order in which the ring of one rail visits them."""
    order: list[int] = []
    for index, members in enumerate(group):
        turned = members[rail:] + members[:rail]
        order += turned if index % 2 == 0 else reversed(turned)
    return tuple(order)


def busiest_bytes(
    operation: Operation, total_bytes: float, ranks: int, ranks_per_node: int
) -> tuple[float, float]:
    """(NIC, scale-up) bytes that one GPU sends, the closed form of `plan` for full nodes (eq. X8).

    Inside a node every GPU sends to the next one. Across nodes one of a GPU's `ranks_per_node` rings leaves
    through its NIC; the others continue over the scale-up link.
    """
    if ranks <= 1:
        return 0.0, 0.0
    moved = PASSES[operation] * total_bytes * (ranks - 1) / ranks
    if ranks <= ranks_per_node:
        return 0.0, moved
    return moved / ranks_per_node, moved * (ranks_per_node - 1) / ranks_per_node


def closed_form_seconds(
    operation: Operation,
    total_bytes: float,
    ranks: int,
    ranks_per_node: int,
    library: Library,
    *,
    scale_up_bytes_per_s: float,
    nic_bytes_per_s: float,
    ll_limit_bytes_per_s: float = inf,
    own_bytes_per_s: float = inf,
) -> float:
    """Seconds of a ring on full nodes under its fastest protocol, without a topology (eq. X5).

    All rates, also that of the own copy, are payload rates per GPU and direction; the NIC's rate matters only
    across nodes.
    """
    if ranks <= 1 or total_bytes <= 0.0:
        return 0.0
    nic, scale_up = busiest_bytes(operation, total_bytes, ranks, ranks_per_node)
    nodes = -(-ranks // ranks_per_node)
    steps = hops(operation, ranks, nodes)
    links_s = max(scale_up / scale_up_bytes_per_s, nic / nic_bytes_per_s if nodes > 1 else 0.0)
    return own_bytes(total_bytes, ranks) / own_bytes_per_s + min(
        library.latency_s("ring", protocol, steps, nodes=nodes)
        + max(
            links_s / library.wire_shares[protocol].value,
            (nic + scale_up) / (ll_limit_bytes_per_s if protocol == "LL" else inf),
        )
        for protocol in PROTOCOLS
    )


def own_bytes(total_bytes: float, ranks: int) -> float:
    """Bytes of a rank's own part, which its kernel stores in addition to sending it."""
    return total_bytes / ranks


RING = CollectiveSpec("ring", tuple(PASSES), plan)
