"""The all-to-all, and sends between pairs of ranks such as pipeline neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import Topology
from moesim.simulator.cost.collectives.flows import (
    Flows,
    Group,
    Hops,
    LinkLoads,
    Operation,
    Phase,
    Plan,
    flows_of,
    link_loads,
    size_of,
)
from moesim.simulator.cost.collectives.library import CollectiveSpec, Library, Request, Terms
from moesim.simulator.dispatchers.protocol import TargetStatistics
from moesim.simulator.layout.expert_load import SampledTraffic, sampled_traffic
from moesim.simulator.layout.routing import Gate, expected_targets


def all_to_all(operation: Operation, total_bytes: float, group: Group) -> Plan:
    """Every rank sends 1/n of its `total_bytes` to each other rank (eq. X11).

    A part for another node first crosses the scale-up link to the local member with the receiver's place,
    then that member's NIC, so that it stays on its rail. Source: NVIDIA/nccl src/transport/net.cc (PXN).
    """
    part = total_bytes / size_of(group)
    edges: list[tuple[int, int, float]] = []
    for home, members in enumerate(group):
        for src in members:
            for there, targets in enumerate(group):
                for place, dst in enumerate(targets):
                    relay = src if there == home or place >= len(members) else members[place]
                    edges += [(src, relay, part), (relay, dst, part)]
    across = len(group) > 1
    hops = Hops(1, 1 if across else 0)
    return Plan(operation, "direct", (Phase(flows_of(edges), hops),))


def all_to_all_bytes(total_bytes: float, ranks: int, ranks_per_node: int) -> tuple[float, float]:
    """(NIC, scale-up) bytes that one GPU sends in `all_to_all` over full nodes, in closed form (eq. X11)."""
    per_node = min(ranks, ranks_per_node)
    return total_bytes * (ranks - per_node) / ranks, total_bytes * (per_node - 1) / per_node


def sends(total_bytes: float, pairs: Sequence[tuple[int, int]], *, across_nodes: bool) -> Plan:
    """Simultaneous sends of `total_bytes` from the first to the second rank of every pair (eq. X4)."""
    edges = [(a, b, total_bytes) for a, b in pairs]
    hops = Hops(0, 1) if across_nodes else Hops(1, 0)
    return Plan("send", "direct", (Phase(flows_of(edges), hops),))


def message_terms(message_bytes: float, library: Library, scale_up_share: float | None = None) -> Terms:
    """Terms of point-to-point messages, which use LL up to the library's limit and Simple above it."""
    small = message_bytes <= library.small_message.value
    return Terms(protocols=("LL" if small else "Simple",), scale_up_share=scale_up_share)


def _terms(request: Request) -> Terms:
    share = request.library.exchange_share.value
    return message_terms(request.total_bytes / size_of(request.group), request.library, share)


DIRECT = CollectiveSpec("direct", ("all_to_all",), all_to_all, _terms)


# -- expert parallel ---------------------------------------------------------------------------------
# Hierarchical dispatch and combine, which cross the network once per node and continue inside the node.


@dataclass(frozen=True, slots=True)
class RowTraffic:
    """Rows that the ranks of one expert-parallel group send in a dispatch, [ep, ep] each.

    `network[s, f]`: rows from rank s to the forwarder f, the rank with the index of s on another node.
    `scale_up[f, d]`: rows from the forwarder (on its own node, the sender) to another rank d of the node.
    """

    network: FloatArray
    scale_up: FloatArray


def uniform_traffic(targets: TargetStatistics, tokens: float) -> RowTraffic:
    """Expected rows for `tokens` tokens a rank when all target ranks are equally likely (eq. X1)."""
    ep, per_node = targets.nodes * targets.gpus_per_node, targets.gpus_per_node
    rank = np.arange(ep)
    same_node = rank[:, None] // per_node == rank[None, :] // per_node
    same_index = rank[:, None] % per_node == rank[None, :] % per_node
    network, scale_up = np.zeros((ep, ep)), np.zeros((ep, ep))
    if targets.nodes > 1:
        network[same_index & ~same_node] = tokens * targets.distinct_remote_nodes / (targets.nodes - 1)
    # A rank forwards for the senders with its index on all nodes: nodes * rows from one sender to one GPU.
    scale_up[same_node & ~same_index] = tokens * targets.distinct_gpus / per_node
    return RowTraffic(network, scale_up)


def sampled(traffic: SampledTraffic) -> RowTraffic:
    """The rows of one seeded sample."""
    return RowTraffic(traffic.ib.astype(np.float64), traffic.nvlink.astype(np.float64))


def dispatch_flows(traffic: RowTraffic, bytes_per_row: float, ranks: Sequence[int]) -> Flows:
    """Network and scale-up hops as flows between the GPUs `ranks[i]` of the group, chunk by chunk."""
    if len(ranks) != len(traffic.network):
        raise InputError(f"{len(ranks)} GPUs given for an expert-parallel group of {len(traffic.network)}")
    rows = traffic.network + traffic.scale_up
    src, dst = np.nonzero(rows)
    return flows_of(
        (ranks[s], ranks[d], float(rows[s, d]) * bytes_per_row)
        for s, d in zip(src.tolist(), dst.tolist(), strict=True)
    )


@dataclass(frozen=True, slots=True)
class KindLoad:
    """Mean and largest bytes over the links of one kind, and the id of the link with the largest."""

    kind: str
    links: int
    mean_bytes: float
    largest_bytes: float
    largest_link: str


def load_by_kind(loads: LinkLoads) -> tuple[KindLoad, ...]:
    """Load of the links by kind; links that carry nothing do not count."""
    kinds = dict.fromkeys(loads.kinds)
    rows = []
    for kind in kinds:
        sizes = loads.of_kind(kind)
        largest = max(sizes, key=sizes.__getitem__)
        rows.append(KindLoad(kind, len(sizes), sum(sizes.values()) / len(sizes), sizes[largest], largest))
    return tuple(rows)


def group_loads(
    traffic: RowTraffic, bytes_per_row: float, ranks: Sequence[int], topology: Topology
) -> LinkLoads:
    """Bytes of one dispatch on every link that the group uses."""
    return link_loads(dispatch_flows(traffic, bytes_per_row, ranks), topology)


# -- how evenly a group loads its links, for even and for sampled routing ---------------------------------

TOKENS_PER_DRAW = 512
"""Tokens of a rank drawn at once, which bounds the memory of their scores."""


@dataclass(frozen=True, slots=True)
class LinkLoadRow:
    """One kind of link under one dispatch."""

    routing: Literal["even", "sampled"]
    load: KindLoad

    @property
    def largest_over_mean(self) -> float:
        """Largest over mean bytes; 1 where every link carries the same."""
        return self.load.largest_bytes / self.load.mean_bytes


def dispatch_loads(
    gate: Gate, tokens: int, bytes_per_row: float, ranks: Sequence[int], topology: Topology, seed: int = 0
) -> list[LinkLoadRow]:
    """Link loads of one dispatch of `tokens` tokens a rank over the GPUs `ranks` (eq. X1), by kind of link.

    Raises InputError for ranks that do not fill nodes or divide the experts.
    """
    ep, per_node = len(ranks), topology.gpus_per_node
    even = uniform_traffic(expected_targets(gate, ep, min(ep, per_node)), tokens)
    drawn = _drawn(gate, tokens, ep, per_node, seed)
    cases: tuple[tuple[Literal["even", "sampled"], RowTraffic], ...] = (("even", even), ("sampled", drawn))
    return [
        LinkLoadRow(name, load)
        for name, traffic in cases
        for load in load_by_kind(group_loads(traffic, bytes_per_row, ranks, topology))
    ]


def _drawn(gate: Gate, tokens: int, ep: int, per_node: int, seed: int) -> RowTraffic:
    """Sampled traffic, drawn in independent parts with consecutive seeds and summed."""
    sizes = [TOKENS_PER_DRAW] * (tokens // TOKENS_PER_DRAW) + (
        [tokens % TOKENS_PER_DRAW] if tokens % TOKENS_PER_DRAW else []
    )
    parts = [sampled(sampled_traffic(gate, ep, per_node, size, seed + i)) for i, size in enumerate(sizes)]
    return RowTraffic(
        np.sum([part.network for part in parts], axis=0), np.sum([part.scale_up for part in parts], axis=0)
    )
