"""A topology: its links and routes, counts, cost and picture."""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.price import load_fabric_prices
from moesim.hwmodels.topologies.description import NetworkTier, NodeFigures
from moesim.hwmodels.topologies.faults import LinkFault, check_connected, link_factors
from moesim.hwmodels.topologies.tables import (
    IDEAL_CHUNK,
    Link,
    LinkTable,
    Route,
    RouteSet,
    Spreading,
    in_order,
    joined,
    pair_hash,
    placed,
    single_paths,
    spread_paths,
    widened,
)
from moesim.hwmodels.topologies.wiring import Inventory, Wiring, count_inventory, gpu_name
from moesim.hwmodels.units import format_quantity
from moesim.hwmodels.validation import nearest

if TYPE_CHECKING:
    import networkx


# -- topologies ------------------------------------------------------------------------------------

MOST_PARTS = 20_000_000
"""Most GPUs, switches and cables of a topology; at about 140 bytes each they take 3 GB."""


class Paths(ABC):
    """Paths between the GPUs of `nodes` equal servers; GPU g is local GPU g % n of server g // n.

    Arrays `src`, `dst` and `choice` are [n], one of each for a pair.
    """

    def __init__(self, node: NodeFigures, nodes: int) -> None:
        """Raises InputError where the nodes do not fit the network (in subclasses)."""
        self.node = node
        self.nodes = nodes
        self.per_node = self.gpus_per_node = node.n_gpus
        self.n_gpus = nodes * node.n_gpus

    @abstractmethod
    def wire(self, wiring: Wiring) -> None:
        """Add the vertices and cables, and store the numbers of the first ones."""

    @abstractmethod
    def size(self) -> tuple[int, int]:
        """(switches, cables) that `wire` adds, from the figures of the description alone."""

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] number of equally good paths of each pair, at least one, which is the default."""
        return np.ones(len(src), np.int64)

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] the path that destination-modulo routing takes, below the fan-out."""
        return np.zeros(len(src), np.int64)

    @abstractmethod
    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """[n, hops] links of the chosen path in order, padded with -1 anywhere; all -1 where src is dst."""


class Topology(Paths):
    """Servers and the network between them.

    A subclass defines the wiring, the paths and the detours for when all paths of a pair are broken
    (`detours`, `detour_paths`). This class derives spreading, faults, tables and counts from them.
    """

    kind: str = ""
    """Kind of the network; set when the topology is built."""
    prices: str | None = None
    """Name or path of the price list of its parts."""
    left: FloatArray | None = None
    """[links] part of each link's bandwidth that faults leave; None on a healthy topology."""

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
        self.wire(wiring)
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
        if spreading not in get_args(Spreading):
            known = list(get_args(Spreading))
            raise InputError(
                f"spreading {spreading!r} is not one of {', '.join(known)}{nearest(str(spreading), known)}"
            )
        fanout = self.fanout(src, dst)
        if spreading == "ideal":
            return self._spread_routes(src, dst, fanout)
        by_hash = pair_hash(src, dst, seed)
        choice = by_hash % fanout if spreading == "ecmp" else self.preferred(src, dst)
        paths = self.paths(src, dst, choice)
        if self.left is not None:
            # Destination-modulo tables know the destination only, and so does their way around a fault.
            mixed = by_hash if spreading == "ecmp" else pair_hash(dst, dst, seed)
            paths = self._around_faults(src, dst, paths, (choice, fanout), mixed)
        return single_paths(paths, self.wiring.latency_s)

    def _around_faults(
        self,
        src: IntArray,
        dst: IntArray,
        paths: IntArray,
        choices: tuple[IntArray, IntArray],
        mixed: IntArray,
    ) -> IntArray:
        """The paths, with those over dead links replaced by the next live one in an order mixed by hash."""
        broken = np.flatnonzero(self.live(paths) <= 0)
        choice, fanout = choices
        hopeless = self.live(self.unavoidable(src[broken], dst[broken])) <= 0
        detour_only, broken = broken[hopeless], broken[~hopeless]
        # A stride coprime to the number of paths visits all of them; the hash spreads the load.
        stride = np.ones(len(broken), np.int64)
        for value in np.unique(fanout[broken]).tolist():
            steps = np.array([s for s in range(1, value) if math.gcd(s, value) == 1] or [1])
            rows = fanout[broken] == value
            stride[rows] = steps[mixed[broken][rows] % len(steps)]
        for step in range(1, int(fanout[broken].max(initial=1))):
            if not len(broken):
                break
            ask = (choice[broken] + step * stride) % fanout[broken]
            tried = self.paths(src[broken], dst[broken], ask)
            good = self.live(tried) > 0
            paths[broken[good]] = tried[good]
            broken, stride = broken[~good], stride[~good]
        broken = np.sort(np.concatenate([detour_only, broken]))
        ways, turns = self.detours()
        for turn, way in itertools.product(range(turns), range(ways)):
            if not len(broken):
                return paths
            have, tried = self.detour_paths(src[broken], dst[broken], way, turn)
            good = self.live(tried) > 0
            paths = placed(paths, broken[have[good]], tried[good])
            broken = np.delete(broken, have[good])
        require_no_unrouted_pair(src[broken], dst[broken])
        return paths

    def _spread_routes(self, src: IntArray, dst: IntArray, fanout: IntArray) -> RouteSet:
        """Routes over all equally good live paths, in proportion to the bandwidth that faults leave."""
        latency_s = self.wiring.latency_s
        hops = self.paths(src[:1], dst[:1], np.zeros(min(1, len(src)), np.int64)).shape[1]
        step = max(1, IDEAL_CHUNK // max(1, int(fanout.max(initial=1)) * hops))
        parts: list[RouteSet] = []
        for start in range(0, max(1, len(src)), step):
            s, d, n = (x[start : start + step] for x in (src, dst, fanout))
            choices = [self.paths(s, d, np.minimum(c, n - 1)) for c in range(int(n.max(initial=1)))]
            paths = np.stack(choices, axis=1)
            weight = np.stack([self.live(path) * (c < n) for c, path in enumerate(choices)], axis=1)
            broken = np.flatnonzero(weight.sum(axis=1) <= 0)
            if len(broken):
                healthy = np.delete(np.arange(len(s)), broken)
                detours = self._spread_detours(s[broken], d[broken])
                direct = spread_paths(paths[healthy], weight[healthy], latency_s)
                parts.append(in_order([direct, detours], [healthy, broken]))
            else:
                parts.append(spread_paths(paths, weight, latency_s))
        return joined(parts)

    def _spread_detours(self, src: IntArray, dst: IntArray) -> RouteSet:
        """Routes over all live paths of the first way that has one, in proportion to their bandwidth."""
        rows: list[IntArray] = []
        parts: list[RouteSet] = []
        left = np.arange(len(src))
        ways, turns = self.detours()
        for way in range(ways):
            if not len(left):
                break
            weight = np.zeros((len(left), turns))
            by_turn: list[IntArray] = []
            for turn in range(turns):
                have, tried = self.detour_paths(src[left], dst[left], way, turn)
                path = np.full((len(left), tried.shape[1]), -1, np.int64)
                path[have] = tried
                weight[have, turn] = self.live(tried)
                by_turn.append(path)
                if not len(have):  # in that case no pair has a further path either
                    by_turn += [path] * (turns - 1 - turn)
                    break
            good = weight.sum(axis=1) > 0
            if good.any():
                width = max(path.shape[1] for path in by_turn)
                stacked = np.stack([widened(path, width) for path in by_turn], axis=1)
                rows.append(left[good])
                parts.append(spread_paths(stacked[good], weight[good], self.wiring.latency_s))
                left = left[~good]
        require_no_unrouted_pair(src[left], dst[left])
        return in_order(parts, rows)

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

    def tiers(self) -> tuple[NetworkTier, ...]:
        """Levels at which links limit what NICs can send, for prices that see no single link; none here."""
        return ()

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


# -- picture ---------------------------------------------------------------------------------------


def require_no_unrouted_pair(src: IntArray, dst: IntArray) -> None:
    """Raise InfeasibleError, which names the first pair, where any pair is given: none has a route."""
    if len(src):
        raise InfeasibleError(
            f"no route is left from rank {gpu_name(int(src[0]))} to rank {gpu_name(int(dst[0]))}"
            + (f" (and for {len(src) - 1} more pairs)" if len(src) > 1 else "")
            + ": every path and detour crosses a link that is down; take the rank out or repair a link"
        )


MOST_PER_LAYER = 32
"""Most vertices of one kind that are drawn side by side."""


class PictureLayer(Struct, frozen=True):
    """All vertices of one kind, with their number and the names of those shown."""

    kind: str
    count: int
    shown: tuple[str, ...]

    @property
    def left_out(self) -> int:
        """Vertices that are not shown."""
        return self.count - len(self.shown)


class Cable(Struct, frozen=True):
    """One cable between two shown vertices; `rate` is the nominal rate of one direction, as text."""

    kind: str
    tail: str
    head: str
    rate: str


class Picture(Struct, frozen=True):
    """Layers from top to bottom, cables, and the place of each vertex (0 to 1 across, layer number down)."""

    layers: tuple[PictureLayer, ...]
    cables: tuple[Cable, ...]
    places: dict[str, tuple[float, float]]
    scale_up_kinds: tuple[str, ...]


def picture(topology: Topology, nodes: int = 3) -> Picture:
    """A picture of the first nodes and the last one, with the switches that their cables reach."""
    wiring = topology.wiring
    names = wiring.names
    tails, heads = np.asarray(wiring.tails), np.asarray(wiring.heads)
    per_node = topology.gpus_per_node
    fits = max(1, MOST_PER_LAYER // per_node)
    wanted = sorted({*range(min(nodes, topology.nodes, fits) - 1), topology.nodes - 1})
    gpus = [node * per_node + gpu for node in wanted for gpu in range(per_node)][:MOST_PER_LAYER]
    shown = set(gpus)
    layers, below = [("gpu", topology.n_gpus, gpus)], set()
    for vertices in wiring.vertices[1:]:  # in the order of wiring: from the GPUs outwards
        ids = range(vertices.first, vertices.first + vertices.count)
        touching = {
            int(end)
            for one, other in ((tails, heads), (heads, tails))
            for end in one[np.isin(other, sorted(shown))].tolist()
        }
        drawn = [v for v in ids if v in touching][:MOST_PER_LAYER]
        layers.append((vertices.kind, vertices.count, drawn))
        shown |= set(drawn)
    cables: list[Cable] = []
    kinds: defaultdict[str, set[int]] = defaultdict(set)
    scale_up = {block.kind for block in wiring.cables if block.scale_up}
    index = 0
    for block in wiring.cables:
        for tail, head in zip(block.tails.tolist(), block.heads.tolist(), strict=True):
            if tail in shown and head in shown:
                link = topology.link(2 * index)
                rate = format_quantity(link.nominal_bytes_per_s, "bytes_per_s")
                cables.append(Cable(block.kind, names[tail], names[head], rate))
                kinds[block.kind] |= {tail, head}
            index += 1
    for kind, _, drawn in layers[1:]:
        if any(set(drawn) & ends for cable, ends in kinds.items() if cable in scale_up):
            below.add(kind)
    order = [layer for layer in layers[:0:-1] if layer[0] not in below]
    order += [layers[0], *(layer for layer in layers[1:] if layer[0] in below)]
    order = [layer for layer in order if layer[2]]
    places = {
        names[v]: ((n + 0.5) / len(drawn), float(len(order) - row))
        for row, (_, _, drawn) in enumerate(order)
        for n, v in enumerate(drawn)
    }
    return Picture(
        tuple(PictureLayer(kind, count, tuple(names[v] for v in drawn)) for kind, count, drawn in order),
        tuple(cables),
        places,
        tuple(sorted(scale_up)),
    )
