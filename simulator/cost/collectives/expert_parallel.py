"""Hierarchical dispatch and combine, which cross the network once per node and continue inside the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import Topology
from moesim.simulator.cost.collectives.network import LinkLoads, link_loads
from moesim.simulator.cost.collectives.plan import Flows, flows_of
from moesim.simulator.dispatchers.protocol import TargetStatistics
from moesim.simulator.layout.loads import SampledTraffic


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
