"""The link map of full resolution, with the bytes of transfers on every NIC, scale-up port and switch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.frozen import SameObject
from moesim.hwmodels.topologies import RouteSet, Spreading, Topology
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.engine.full_resolution.statistics import link_ends
from moesim.simulator.engine.link_map import TO_EXPERTS, Demand, LinkMap
from moesim.simulator.model.operator import Phase

LINKS_OF_A_PAIR = 6
"""Usual number of entries of a pair: links of its routes."""
BYTES_OF_AN_ENTRY = 32


class ExchangePattern(Struct, frozen=True):
    """Sender-receiver pairs of one transfer of a group, as entries (pair, link, share of the pair's bytes).

    Pairs of the scale-out hop come first. `loaded[p]`: the member whose received rows scale pair p.
    """

    links: IntArray
    """Links in use, by number in the cluster."""
    entry_link: IntArray
    """Position of an entry's link in `links`."""
    entry_pair: IntArray
    entry_share: FloatArray
    loaded: IntArray
    outer_pairs: int
    """Number of pairs of the scale-out hop."""
    peers: tuple[int, int]
    """(other nodes, other members on the node); a GPU's bytes split evenly among them."""

    def demand(
        self, nic_bytes: float, scale_up_bytes: float, load: FloatArray, node_load: FloatArray
    ) -> Demand:
        """Bytes on each link, from a GPU's bytes and the members' relative rows (docs/model.md, eq. G1)."""
        return Demand(self.links, self._on_links(nic_bytes, scale_up_bytes, load, node_load))

    def bytes_per_peer(self, nic_bytes: float, scale_up_bytes: float) -> tuple[float, float]:
        """Bytes of a GPU for each other node and for each other member of its own node."""
        return nic_bytes / max(1, self.peers[0]), scale_up_bytes / max(1, self.peers[1])

    def _on_links(
        self, nic_bytes: float, scale_up_bytes: float, load: FloatArray, node_load: FloatArray
    ) -> FloatArray:
        """Bytes on each of `links`."""
        pair_bytes = np.empty(len(self.loaded))
        outer, inner = self.loaded[: self.outer_pairs], self.loaded[self.outer_pairs :]
        per_node, per_member = self.bytes_per_peer(nic_bytes, scale_up_bytes)
        pair_bytes[: self.outer_pairs] = per_node * node_load[outer]
        pair_bytes[self.outer_pairs :] = per_member * load[inner]
        weights = self.entry_share * pair_bytes[self.entry_pair]
        return np.asarray(np.bincount(self.entry_link, weights, len(self.links)), dtype=np.float64)

    def member_times(self, capacity: FloatArray, members: int) -> tuple[FloatArray, FloatArray]:
        """(scale-out, scale-up) time of the busiest link on each member's routes (docs/model.md, eq. G2).

        Every GPU sends one byte. On the scale-out hop all members of a node wait for every route into the
        node, because a member passes on to the others what it receives.
        """
        even = np.ones(members)
        result = []
        for nic, up, pairs in (
            (1.0, 0.0, slice(0, self.outer_pairs)),
            (0.0, 1.0, slice(self.outer_pairs, None)),
        ):
            time = self._on_links(nic, up, even, even) / capacity[self.links]
            chosen = np.zeros(len(self.loaded), bool)
            chosen[pairs] = True
            entries = chosen[self.entry_pair]
            worst = np.zeros(members)
            np.maximum.at(worst, self.loaded[self.entry_pair[entries]], time[self.entry_link[entries]])
            result.append(worst)
        per_node = self.peers[1] + 1
        outer = result[0].reshape(-1, per_node).max(axis=1).repeat(per_node)
        return outer, result[1]


def _split(routes: RouteSet, parts: int) -> Iterator[RouteSet]:
    """The routes in so many parts with as many pairs each."""
    pairs = (len(routes.indptr) - 1) // parts
    for first in range(0, parts * pairs, pairs) if pairs else [0] * parts:
        bounds = routes.indptr[first : first + pairs + 1]
        entries = slice(bounds[0], bounds[-1])
        links, share = routes.links[entries], routes.share[entries]
        yield replace(routes, indptr=bounds - bounds[0], links=links, share=share)


def _pattern(routes: RouteSet, loaded: IntArray, outer_pairs: int, peers: tuple[int, int]) -> ExchangePattern:
    links, entry_link = np.unique(routes.links, return_inverse=True)
    pair = np.repeat(np.arange(len(loaded)), np.diff(routes.indptr))
    return ExchangePattern(
        links.astype(np.int64), entry_link.astype(np.int64), pair, routes.share, loaded, outer_pairs, peers
    )


class ClusterLinkMap(LinkMap):
    """Links of one group of GPUs in a cluster that may have slow and dead links.

    `gpus[rank, member]` are global numbers.
    """

    def __init__(
        self,
        topology: Topology,
        healthy: Topology,
        gpus: IntArray,
        per_node: int,
        spreading: Spreading,
        seed: int,
        exchanges: bool,
        latencies: tuple[tuple[tuple[int, int], float], ...] = (),
    ) -> None:
        """`exchanges`: whether the members of a rank form an expert-parallel group.

        `latencies`: time of a send between two pipeline ranks over that inside a domain, by latency alone.
        """
        self._latencies = dict(latencies)
        self.topology, self.healthy = topology, healthy
        self.gpus, self.per_node = gpus, per_node
        self.spreading, self.seed, self.exchanges = spreading, seed, exchanges
        self._capacity = topology.remaining_bytes_per_s() / 1e9
        self._patterns: dict[tuple[int, bool], ExchangePattern] = {}
        self._slow: dict[tuple[int, bool], tuple[FloatArray | float, FloatArray | float]] = {}
        self._sends: dict[tuple[int, int, float], Demand] = {}
        self._send_slow: dict[tuple[int, int], FloatArray | float] = {}

    @property
    def gpus_per_rank(self) -> int:
        """Members of the group."""
        return int(self.gpus.shape[1])

    def bytes_at_most(self) -> int:
        """Estimate of the bytes that the map takes once all of its patterns are in use."""
        ranks, members = self.gpus.shape
        pairs = members * (self.per_node + members // self.per_node + 2)
        return int(ranks * 2 * pairs * LINKS_OF_A_PAIR * BYTES_OF_AN_ENTRY)

    def pattern(self, rank: int, outward: bool) -> ExchangePattern:
        """The exchange between the members of a pipeline rank."""
        key = (rank, outward)
        if key not in self._patterns:
            # With faults one by one, as the error of a pair without a route is that of the first rank.
            ranks = [rank] if self.topology is not self.healthy else list(range(len(self.gpus)))
            for one, made in zip(ranks, self._exchanges(self.topology, ranks, outward), strict=True):
                self._patterns[one, outward] = made
        return self._patterns[key]

    def _exchanges(self, topology: Topology, ranks: list[int], outward: bool) -> list[ExchangePattern]:
        """The exchanges between the members of pipeline ranks, in order `per_node` of them a node.

        `outward`: rows go to the member with the sender's place on every other node, which passes them on
        inside that node. Otherwise the same pairs send in the opposite direction (DeepSeek-V3 report, section
        3.2.2).
        """
        per_node, members = self.per_node, self.gpus.shape[1]
        place = np.arange(members)
        src, dst = (grid.ravel() for grid in np.meshgrid(place, place, indexing="ij"))
        same_node = src // per_node == dst // per_node
        outer = np.flatnonzero(~same_node & (src % per_node == dst % per_node))
        pairs = np.concatenate([outer, np.flatnonzero(same_node & (src != dst))])
        a, b = (self.gpus[ranks][:, end[pairs]].ravel() for end in (src, dst))
        routes = topology.routes(*((a, b) if outward else (b, a)), self.spreading, self.seed)
        peers = members // per_node - 1, per_node - 1
        return [_pattern(own, dst[pairs], len(outer), peers) for own in _split(routes, len(ranks))]

    def uniform(self, rank: int, phase: Phase, cost: TransferCost) -> Demand | None:
        """Demand of a parameter collective, a ring over all working ports; None for routed rows."""
        if phase in TO_EXPERTS or phase in ("combine F", "dispatch B"):
            return None
        ports = [links[self._capacity[links] > 0.0] for links in self.ports(rank)]
        used = [
            (links, np.full(len(links), amount * self.gpus_per_rank / len(links)))
            for links, amount in zip(ports, (cost.nic_bytes, cost.scale_up_bytes), strict=True)
            if len(links) and amount > 0.0
        ]
        if not used:
            return Demand.of([])
        return Demand(np.concatenate([u[0] for u in used]), np.concatenate([u[1] for u in used]))

    def transfer(
        self, rank: int, phase: Phase, cost: TransferCost, load: FloatArray, node_load: FloatArray
    ) -> Demand:
        """Demand of a dispatch or combine of all members of a rank, as one fluid over all its links."""
        return self.pattern(rank, phase in TO_EXPERTS).demand(
            cost.nic_bytes, cost.scale_up_bytes, load, node_load
        )

    def _pairs(self, topology: Topology, src: IntArray, dst: IntArray) -> ExchangePattern:
        """Pattern in which `src[i]` sends to `dst[i]`."""
        routes = topology.routes(src, dst, spreading=self.spreading, seed=self.seed)
        return _pattern(routes, np.arange(len(src)), len(src), (1, 0))

    def send(self, source: int, target: int, size: float) -> Demand:
        """Demand of a send from every member to the same member of the other pipeline rank."""
        key = (source, target, size)
        if key not in self._sends:
            count, members = self.gpus.shape
            hops, even = [(source, target)], np.ones(members)
            if self.topology is self.healthy and (target - source) % count in (1, count - 1):
                hops = [(one, (one + target - source) % count) for one in range(count)]  # of a pipeline
            sources, targets = (self.gpus[ranks].ravel() for ranks in np.array(hops).T)
            routes = self.topology.routes(sources, targets, self.spreading, self.seed)
            for hop, own in zip(hops, _split(routes, len(hops)), strict=True):
                pattern = _pattern(own, np.arange(members), members, (1, 0))
                self._sends[*hop, size] = pattern.demand(size, 0.0, even, even)
        return self._sends[key]

    def slowness(self, rank: int, phase: Phase) -> tuple[FloatArray | float, FloatArray | float]:
        """Time of each member's busiest link with the faults over its time without them (eq. G2)."""
        if self.topology is self.healthy or not self.exchanges:
            return 1.0, 1.0
        key = (rank, phase in TO_EXPERTS)
        if key not in self._slow:
            now = self._times(self.topology, self.pattern(*key))
            before = self._times(self.healthy, self._exchanges(self.healthy, [rank], key[1])[0])
            self._slow[key] = (_ratio(now[0], before[0]), _ratio(now[1], before[1]))
        return self._slow[key]

    def _times(self, topology: Topology, pattern: ExchangePattern) -> tuple[FloatArray, FloatArray]:
        return pattern.member_times(topology.remaining_bytes_per_s(), self.gpus.shape[1])

    def send_slowness(self, source: int, target: int) -> FloatArray | float:
        """Slow-down of each member's send between two pipeline ranks by the faults."""
        longer = self._latencies.get((source, target), 1.0)
        if self.topology is self.healthy:
            return longer
        key = (source, target)
        if key not in self._send_slow:
            now, before = (
                self._times(t, self._pairs(t, self.gpus[source], self.gpus[target]))[0]
                for t in (self.topology, self.healthy)
            )
            slow = _ratio(now, before)
            self._send_slow[key] = slow if longer == 1.0 else slow * longer
        return self._send_slow[key]

    def sync_slowness(self, rank: int) -> float:
        """Slow-down by the faults of a ring through all members of a rank, which its slowest hop decides."""
        if self.topology is self.healthy:
            return 1.0
        gpus = self.gpus[rank]
        step = self.per_node if len(gpus) > self.per_node else 1
        now, before = (
            self._times(t, self._pairs(t, gpus, np.roll(gpus, -step)))[0]
            for t in (self.topology, self.healthy)
        )
        return float(np.max(_ratio(now, before)))

    def ports(self, rank: int) -> tuple[IntArray, IntArray]:
        """Outgoing links of the members: (NICs, scale-up ports)."""
        scale_up = link_ends(self.topology).scale_up
        by_tail, first = _links_by_tail(SameObject(self.topology))
        links = np.concatenate([by_tail[first[gpu] : first[gpu + 1]] for gpu in self.gpus[rank].tolist()])
        links.sort()
        return links[~scale_up[links]], links[scale_up[links]]


@lru_cache(maxsize=2)
def _links_by_tail(topology: SameObject[Topology]) -> tuple[IntArray, IntArray]:
    """(links in the order of their tails, place of the first link of every vertex)."""
    tails = link_ends(topology.value).tails
    first = np.append(0, np.cumsum(np.bincount(tails, minlength=topology.value.n_gpus)))
    return np.argsort(tails, kind="stable"), first


def _ratio(now: FloatArray, before: FloatArray) -> FloatArray | float:
    """Elementwise ratio, 1 where nothing is sent; the number 1.0 where no element slowed down."""
    ratio = np.maximum(1.0, np.divide(now, before, out=np.ones_like(now), where=before > 0.0))
    return 1.0 if bool((ratio <= 1.0).all()) else ratio
