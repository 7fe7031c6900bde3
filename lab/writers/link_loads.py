"""Dispatch and combine as flows over a topology, for even and for sampled routing (eq. X1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import Topology
from moesim.simulator.cost.collectives.flows import Flows, LinkLoads, flows_of, link_loads
from moesim.simulator.dispatchers.protocol import TargetStatistics
from moesim.simulator.layout.routing import Gate, expected_targets, scores_of


def sample_choices(gate: Gate, n_tokens: int, seed: int) -> IntArray:
    """Draw the experts that each token picks [n_tokens, top_k]; all experts are equally popular.

    Numbers from `gate.experts` on are experts without computation.
    """
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((n_tokens, gate.experts + gate.zero_experts))
    if gate.groups_per_token < gate.groups:
        grouped = logits.reshape(n_tokens, gate.groups, -1)
        if gate.group_score == "best":
            ranking = grouped.max(axis=2)
        else:
            ranking = scores_of(np.sort(grouped, axis=2)[:, :, -2:], gate.scores).sum(axis=2)
        closed = np.argsort(-ranking, axis=1)[:, gate.groups_per_token :]
        np.put_along_axis(grouped, closed[:, :, None], -np.inf, axis=1)
    return np.argpartition(-logits, gate.top_k - 1, axis=1)[:, : gate.top_k].astype(np.int64)


@dataclass(frozen=True, slots=True)
class SampledTraffic:
    """Tokens on the links of one sampled dispatch; a token counts once for each target rank.

    `rows[s, d]` are the tokens of rank s with an expert on rank d, `ib[s, d]` those that the NIC of s sends
    to the NIC of d (same index on another node), and `nvlink[f, d]` those that f forwards to d in its node.
    """

    rows: IntArray
    ib: IntArray
    nvlink: IntArray


def sampled_traffic(gate: Gate, ep: int, gpus_per_node: int, tokens: int, seed: int) -> SampledTraffic:
    """Draw one dispatch of `tokens` tokens from each of `ep` ranks; every table is [ep, ep]."""
    if gate.experts % ep or ep % min(ep, gpus_per_node):
        raise InputError(
            f"parallel.ep={ep} must divide experts={gate.experts} and fill nodes of {gpus_per_node}"
        )
    per_node = min(ep, gpus_per_node)
    choices = np.minimum(sample_choices(gate, ep * tokens, seed) // (gate.experts // ep), ep)
    source = np.repeat(np.arange(ep), tokens)
    anywhere = np.zeros((ep * tokens, ep + 1), dtype=bool)  # the last column is no rank
    np.put_along_axis(anywhere, choices, True, axis=1)
    hit = anywhere[:, :ep]
    rows = hit.reshape(ep, tokens, ep).sum(axis=1)
    node_hit = hit.reshape(ep * tokens, ep // per_node, per_node).any(axis=2)
    to_node = node_hit.reshape(ep, tokens, -1).sum(axis=1)
    ib = np.zeros((ep, ep), dtype=np.int64)
    nvlink = np.zeros((ep, ep), dtype=np.int64)
    for s in range(ep):
        index = s % per_node
        for node in range(ep // per_node):
            forwarder = node * per_node + index
            if forwarder != s:
                ib[s, forwarder] = to_node[s, node] if node != s // per_node else 0
            targets = slice(node * per_node, (node + 1) * per_node)
            nvlink[forwarder, targets] += rows[s, targets]
            nvlink[forwarder, forwarder] = 0
    assert rows.sum() == hit.sum() and source.size == hit.shape[0]
    return SampledTraffic(rows, ib, nvlink)


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
