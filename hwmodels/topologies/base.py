"""The base class of topologies: GPUs by global rank, links between them, and routes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.fabric_prices import load_fabric_prices
from moesim.hwmodels.topologies.description import NodeFigures
from moesim.hwmodels.topologies.faults import LinkFault, check_connected, link_factors
from moesim.hwmodels.topologies.inventory import Inventory, count_inventory
from moesim.hwmodels.topologies.spreading import single_routes, spread_routes
from moesim.hwmodels.topologies.tables import Link, LinkTable, Route, RouteSet, Spreading
from moesim.hwmodels.topologies.wiring import Wiring
from moesim.hwmodels.validation import nearest

if TYPE_CHECKING:
    import networkx


MOST_PARTS = 20_000_000
"""Most GPUs, switches and cables of a topology; at about 140 bytes each they take 3 GB."""


class Topology(ABC):
    """`nodes` equal servers and the network between them; GPU g is local GPU g % n of server g // n.

    A subclass defines the wiring and, for any pair, the equally good paths (`fanout`, `preferred`, `paths`)
    and the detours for when all of those are broken (`detours`, `detour_paths`). This class derives
    spreading, faults, tables and counts from them, in the same way for every kind.
    """

    kind: str = ""
    """Kind of the network; set when the topology is built."""
    prices: str | None = None
    """Name or path of the price list of its parts."""

    def __init__(self, node: NodeFigures, nodes: int) -> None:
        """Raises InputError where the nodes do not fit the network (in subclasses)."""
        self.node = node
        self.nodes = nodes
        self.gpus_per_node = node.n_gpus
        self.n_gpus = nodes * node.n_gpus
        self.left: FloatArray | None = None
        """[links] part of each link's bandwidth that faults leave; None on a healthy topology."""

    # -- defined by a subclass -----------------------------------------------------------------------

    @abstractmethod
    def _wire(self, wiring: Wiring) -> None:
        """Add every vertex and cable."""

    @abstractmethod
    def size(self) -> tuple[int, int]:
        """(switches, cables) from the figures of the description, without building anything."""

    @abstractmethod
    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] number of equally good paths of each pair, at least 1."""

    @abstractmethod
    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] the path that destination-modulo routing takes, below the fan-out."""

    @abstractmethod
    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """[n, hops] links of the chosen path in order, padded with -1 anywhere; all -1 where src is dst."""

    def unavoidable(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n, k] links that all equally good paths of a pair use (-1: none); a dead one rules out all."""
        return np.full((len(src), 1), -1)

    def detours(self) -> tuple[int, int]:
        """(number of ways, paths per way) that `detour_paths` offers for a pair; better ways come first."""
        return 0, 0

    def detour_paths(self, src: IntArray, dst: IntArray, way: int, turn: int) -> tuple[IntArray, IntArray]:
        """The pairs (indices into n) that have path number `turn` of detour `way`, and these paths.

        A pair without path t of a way has no later path of that way either.
        """
        raise NotImplementedError

    # -- links ---------------------------------------------------------------------------------------

    @cached_property
    def wiring(self) -> Wiring:
        """Vertices and cables; raises InputError for more than MOST_PARTS."""
        self.check_size(MOST_PARTS)
        wiring = Wiring(self.n_gpus)
        self._wire(wiring)
        return wiring

    def check_size(self, most_parts: int) -> None:
        """Raise InputError where GPUs, switches and cables together are more than `most_parts`."""
        switches, cables = self.size()
        parts = self.n_gpus + switches + cables
        if parts > most_parts:
            near = max(1, self.nodes * most_parts // parts)
            raise InputError(
                f"cluster.nodes={self.nodes:,}: {self.n_gpus:,} GPUs, {switches:,} switches and {cables:,} "
                f"cables are {parts:,} parts, more than the {most_parts:,} that are built here; use about "
                f"{near:,} nodes at most"
            )

    def links(self) -> LinkTable:
        """Every directed link, in a fixed order; computed once."""
        return self._links

    @cached_property
    def _links(self) -> LinkTable:
        wiring = self.wiring
        names = wiring.names
        ids: list[str] = []
        kinds: list[str] = []
        for block in wiring.cables:
            copies = [""] * len(block.tails) if block.copies is None else [f"#{c}" for c in block.copies]
            for tail, head, suffix in zip(block.tails.tolist(), block.heads.tolist(), copies, strict=True):
                ids += (f"{names[tail]}->{names[head]}{suffix}", f"{names[head]}->{names[tail]}{suffix}")
            kinds += [block.kind] * (2 * len(block.tails))
        return LinkTable(
            tuple(ids),
            tuple(kinds),
            self._payload_bytes_per_s,
            self._nominal_bytes_per_s,
            wiring.latency_s,
            wiring.scale_up_links,
        )

    @cached_property
    def _payload_bytes_per_s(self) -> FloatArray:
        healthy = np.repeat(self.wiring.per_cable(lambda block: block.payload_bytes_per_s), 2)
        return healthy if self.left is None else healthy * self.left

    @cached_property
    def _nominal_bytes_per_s(self) -> FloatArray:
        return np.repeat(self.wiring.per_cable(lambda block: block.nominal_bytes_per_s), 2)

    def remaining_bytes_per_s(self) -> FloatArray:
        """[links] datasheet bandwidth of each link that faults leave."""
        nominal = self._nominal_bytes_per_s
        return nominal if self.left is None else nominal * self.left

    def link(self, number: int) -> Link:
        """One link by its number, for people."""
        cable, back = divmod(number, 2)
        ends = (int(self.wiring.tails[cable]), int(self.wiring.heads[cable]))
        tail, head = (self.wiring.names[end] for end in (reversed(ends) if back else ends))
        return Link(
            id=self.wiring.link_id(number),
            kind=self.wiring.block_of_cable(cable).kind,
            tail=tail,
            head=head,
            bytes_per_s=float(self._payload_bytes_per_s[number]),
            nominal_bytes_per_s=float(self._nominal_bytes_per_s[number]),
            latency_s=float(self.wiring.latency_s[number]),
        )

    # -- routes --------------------------------------------------------------------------------------

    def routes(
        self, src: IntArray, dst: IntArray, spreading: Spreading = "modulo", seed: int = 0
    ) -> RouteSet:
        """Routes of pairs (src[i], dst[i]) of GPUs [n].

        `modulo` takes one path by destination modulo, as InfiniBand subnet managers route fat-trees. `ecmp`
        takes one of the equally good paths by a hash of pair and seed. `ideal` takes all of them in equal
        parts, or in proportion to the bandwidth that faults leave. A pair whose paths are all down takes a
        detour (docs/model.md, eq. N2). Raises InputError for a GPU that does not exist and an unknown
        spreading, InfeasibleError naming the ranks where no detour is left.
        """
        src, dst = self._checked(src), self._checked(dst)
        if src.shape != dst.shape:
            raise InputError(f"routes: {len(src)} sources but {len(dst)} destinations; give one for each")
        _ = self.wiring  # it comes first, since it sets where the cables of each part start
        if spreading == "ideal":
            return spread_routes(self, src, dst)
        if spreading not in get_args(Spreading):
            known = list(get_args(Spreading))
            raise InputError(
                f"spreading {spreading!r} is not one of {', '.join(known)}{nearest(str(spreading), known)}"
            )
        return single_routes(self, src, dst, spreading, seed)

    def route(self, src_gpu: int, dst_gpu: int) -> Route:
        """The links from one GPU to another, in order; empty for a GPU to itself.

        Raises InputError for a GPU that does not exist.
        """
        self.check_gpu(src_gpu)
        self.check_gpu(dst_gpu)
        routes = self.routes(np.array([src_gpu]), np.array([dst_gpu]))
        return tuple(self.link(int(number)) for number in routes.links)

    def live(self, paths: IntArray) -> FloatArray:
        """[n] smallest part of its bandwidth that faults leave any link of a path; 1 where healthy."""
        if self.left is None:
            return np.ones(len(paths))
        part = np.where(paths >= 0, self.left[paths], 1.0)
        least: FloatArray = part.min(axis=1, initial=1.0)
        return least

    # -- faults, counts, pictures --------------------------------------------------------------------

    def degraded(self, faults: Sequence[LinkFault]) -> Topology:
        """A copy with faults, which routes around dead links and gives degraded ones less bandwidth.

        Raises InputError for a target that does not exist, and InfeasibleError, naming ranks, where no live
        link joins them to the others.
        """
        other = copy.copy(self)
        factors = link_factors(self.wiring, faults)
        other.left = factors if self.left is None else self.left * factors
        for name in ("_links", "_payload_bytes_per_s"):  # drop what is cached for the healthy topology
            other.__dict__.pop(name, None)
        if (other.left <= 0).any():
            check_connected(self.wiring, other.left)
        return other

    def inventory(self) -> Inventory:
        """Counts of switches, ports, cables, transceivers and endpoints, and their cost."""
        prices = None if self.prices is None else load_fabric_prices(self.prices)
        return count_inventory(self.wiring, prices)

    def longest_route(self, sources: int = 64) -> int:
        """Links of the longest route from any of `sources` evenly chosen GPUs (all where there are fewer)."""
        src = np.unique(np.linspace(0, self.n_gpus - 1, min(sources, self.n_gpus)).astype(np.int64))
        longest = 0
        for gpu in src.tolist():
            routes = self.routes(np.full(self.n_gpus, gpu), np.arange(self.n_gpus))
            longest = max(longest, int(np.diff(routes.indptr).max()))
        return longest

    def graph(self) -> networkx.Graph:
        """The whole network as a graph, for drawings and checks, without dead cables.

        Edges carry kind, cables and `bytes_per_s` of one cable and direction (the mean where faults differ).
        """
        import networkx  # takes 0.2 s to load, and only drawings and checks need it

        wiring, graph = self.wiring, networkx.Graph()
        for block in wiring.vertices:
            names = [wiring.names[block.first + i] for i in range(block.count)]
            graph.add_nodes_from(names, kind=block.kind, chips=block.chips)
        rates = self._payload_bytes_per_s[::2]
        for run in wiring.cables:
            for offset, (tail, head) in enumerate(zip(run.tails.tolist(), run.heads.tolist(), strict=True)):
                rate = float(rates[run.first + offset])
                if rate <= 0:
                    continue
                ends = wiring.names[tail], wiring.names[head]
                if graph.has_edge(*ends):
                    edge = graph.edges[ends]
                    n = edge["cables"]
                    edge.update(cables=n + 1, bytes_per_s=(edge["bytes_per_s"] * n + rate) / (n + 1))
                else:
                    graph.add_edge(*ends, kind=run.kind, cables=1, bytes_per_s=rate)
        return graph

    # -- GPUs ----------------------------------------------------------------------------------------

    def node_of(self, gpu: int) -> int:
        """The server of a GPU."""
        return gpu // self.gpus_per_node

    def check_gpu(self, gpu: int) -> None:
        """Raise InputError unless this GPU exists."""
        if not 0 <= gpu < self.n_gpus:
            raise InputError(f"there is no GPU {gpu}: the topology has GPUs 0 to {self.n_gpus - 1}")

    def _checked(self, gpus: IntArray) -> IntArray:
        array = np.atleast_1d(np.asarray(gpus))
        if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
            raise InputError("routes: sources and destinations are one-dimensional arrays of GPU numbers")
        for gpu in (array.min(initial=0), array.max(initial=0)):
            self.check_gpu(int(gpu))
        return array.astype(np.int64)
