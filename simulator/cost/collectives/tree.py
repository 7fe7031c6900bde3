"""Double-binary-tree all-reduce, with chains inside the nodes and two complementary trees between."""

from __future__ import annotations

from moesim.simulator.cost.collectives.flows import (
    Group,
    Hops,
    Operation,
    Phase,
    Plan,
    flows_of,
    rails_of,
    size_of,
)
from moesim.simulator.cost.collectives.library import CollectiveSpec, Request, Terms


def plan(operation: Operation, total_bytes: float, group: Group) -> Plan:
    """Reduces up and broadcasts down; each tree and rail carries its share of the buffer both ways (eq. X9).

    In a node, a chain of all members ends at the rail's GPU, whose NIC connects to parent and children. An
    inner node of one tree is a leaf of the other, so every NIC sends and receives its rail's share of the
    buffer about twice. Source: Sanders, Speck, Traeff, Two-tree algorithms for full bandwidth
    broadcast, reduction and scan, Parallel Computing 35 (2009).
    """
    n, nodes, rails = size_of(group), len(group), rails_of(group)
    each = total_bytes / (2 * rails)
    edges: list[tuple[int, int, float]] = []
    for parents in double_tree(nodes):
        for rail in range(rails):
            heads = [members[rail] for members in group]
            for members in group:
                chain = members[rail:] + members[:rail]
                edges += _both_ways(chain[1:], chain[:-1], each)
            pairs = [(node, up) for node, up in enumerate(parents) if up is not None]
            edges += _both_ways([heads[a] for a, _ in pairs], [heads[b] for _, b in pairs], each)
    depth = (nodes - 1).bit_length()
    longest = max(len(members) for members in group) - 1
    hops = Hops(2 * longest, 2 * depth)
    return Plan(operation, "tree", (Phase(flows_of(edges), hops, own_bytes=total_bytes / n),))


def _both_ways(
    tails: tuple[int, ...] | list[int], heads: tuple[int, ...] | list[int], size: float
) -> list[tuple[int, int, float]]:
    edges = list(zip(tails, heads, strict=True))
    return [(a, b, size) for a, b in edges] + [(b, a, size) for a, b in edges]


def double_tree(nodes: int) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Parent of every node in two trees whose inner nodes differ; None for a root.

    The first is the in-order binary tree, in which the lowest set bit of 1 + the number is the level. The
    second is its mirror image for an even number of nodes, else the first shifted by one node.
    """
    first: list[int | None] = []
    for number in range(1, nodes + 1):  # the lowest set bit, the level, moves up by one place
        level = number & -number
        parent = (number - level) | (level << 1)
        if parent > nodes:
            parent = number - level
        first.append(parent - 1 if parent else None)
    second: list[int | None] = [None] * nodes
    for node, up in enumerate(first):
        second[_second(node, nodes)] = None if up is None else _second(up, nodes)
    return tuple(first), tuple(second)


def _second(node: int, nodes: int) -> int:
    return nodes - 1 - node if nodes % 2 == 0 else (node + 1) % nodes


def _terms(request: Request) -> Terms:
    return Terms(latencies="tree", wire_share=request.library.tree_share.value)


TREE = CollectiveSpec("tree", ("all_reduce",), plan, _terms)
