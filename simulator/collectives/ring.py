"""Ring all-reduce, reduce-scatter and all-gather."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.collectives.plan import Group, Hops, Operation, Phase, Plan, flows_of, rails_of, size_of

PASSES: dict[Operation, int] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Rounds through the ring: an all-reduce is a reduce-scatter and an all-gather in one kernel."""


def plan(operation: Operation, total_bytes: float, group: Group) -> Plan:
    """Rings through all NICs of the nodes; every edge carries (n-1)/n of the buffer a round (eq. X8).

    `total_bytes`: the whole buffer (what an all-gather leaves on each rank, a reduce-scatter takes from it).
    Inside one node one ring; across nodes one a rail, each with its share of the bytes. A ring enters a node
    at its rail's GPU, visits all and leaves to the GPU with the same place on the next node; every second
    node is walked backwards, so that with an even number of nodes all crossings stay on their rail.
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
    between = 0 if nodes == 1 else PASSES[operation] * (nodes - 1)
    hops = Hops(PASSES[operation] * (n - 1) - between, between)
    return Plan(operation, "ring", (Phase(flows_of(edges), hops, own_bytes=total_bytes / n),))


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
    """(NIC, scale-up) bytes that one GPU sends; the closed form of `plan` for full nodes (eq. X8).

    Inside a node every GPU sends to the next. Across nodes one of a GPU's `ranks_per_node` rings leaves by
    its NIC and the rest go on over the scale-up link.
    """
    if ranks <= 1:
        return 0.0, 0.0
    moved = PASSES[operation] * total_bytes * (ranks - 1) / ranks
    if ranks <= ranks_per_node:
        return 0.0, moved
    return moved / ranks_per_node, moved * (ranks_per_node - 1) / ranks_per_node
