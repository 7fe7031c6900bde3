"""What a topology is: GPUs by global rank, links between them, and routes that need no search."""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.node import Node
from moesim.hwmodels.topologies.faults import LinkFault, check_connected, link_factors
from moesim.hwmodels.topologies.inventory import Inventory, count_inventory
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
    single_paths,
    spread_paths,
)
from moesim.hwmodels.topologies.wiring import FloatArray, IntArray, Wiring, gpu_name
from moesim.hwmodels.validation import nearest

if TYPE_CHECKING:
    import networkx

    from moesim.hwmodels.network import FabricPrices


class Topology(ABC):
    """`nodes` equal servers and what joins them; GPU g is local GPU g % n of server g // n.

    A subclass says how it is wired and, for any pair, which paths are equally good (`_fanout`,
    `_preferred`, `_paths`) and which it would take if all of those were broken (`_detours`,
    `_detour_paths`). Spreading, faults, tables and counts follow here, for all of them alike.
    """

    kind: str
    prices: FabricPrices | None = None

    def __init__(self, node: Node, nodes: int) -> None:
        """Raises InputError where the nodes do not fit the network (in subclasses)."""
        self.node = node
        self.nodes = nodes
        self.gpus_per_node = node.n_gpus
        self.n_gpus = nodes * node.n_gpus
        self.left: FloatArray | None = None
        """[links] the part of each link's bandwidth that faults left; None on a healthy topology."""

    # -- what a subclass says ------------------------------------------------------------------------

    @abstractmethod
    def _wire(self, wiring: Wiring) -> None:
        """Add every vertex and cable."""

    @abstractmethod
    def _fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] number of equally good paths of each pair, at least 1."""

    @abstractmethod
    def _preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] the path that destination-modulo routing takes, below the fan-out."""

    @abstractmethod
    def _paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """[n, hops] links of the chosen path in order, padded with -1 anywhere; all -1 where src is dst."""

    def _unavoidable(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n, k] links that all equally good paths of a pair use (-1: none): saves trying the others."""
        return np.full((len(src), 1), -1)

    def _detours(self) -> tuple[int, int]:
        """(ways around, paths of each) that `_detour_paths` can name for a pair, the better ways first."""
        return 0, 0

    def _detour_paths(self, src: IntArray, dst: IntArray, way: int, turn: int) -> tuple[IntArray, IntArray]:
        """Path `turn` of a way around: which of the n pairs have it (indices), and their paths.

        A pair without path t of a way has no later one.
        """
        raise NotImplementedError

    # -- links ---------------------------------------------------------------------------------------

    @cached_property
    def wiring(self) -> Wiring:
        """Vertices and cables."""
        wiring = Wiring(self.n_gpus)
        self._wire(wiring)
        return wiring

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
            tuple(ids), tuple(kinds), self._payload_bytes_per_s, self._nominal_bytes_per_s, wiring.latency_s
        )

    @cached_property
    def _payload_bytes_per_s(self) -> FloatArray:
        healthy = np.repeat(self.wiring.per_cable(lambda block: block.payload_bytes_per_s), 2)
        return healthy if self.left is None else healthy * self.left

    @cached_property
    def _nominal_bytes_per_s(self) -> FloatArray:
        return np.repeat(self.wiring.per_cable(lambda block: block.nominal_bytes_per_s), 2)

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

        `modulo`: one path, by destination modulo (as InfiniBand subnet managers route fat-trees); `ecmp`:
        one of the equally good paths by a hash of pair and seed; `ideal`: all equally good paths, in equal
        parts (in proportion to what faults left of them). A pair whose paths are all down takes a
        detour (docs/model.md, eq. N2). Raises InputError for a GPU that does not exist and an unknown
        spreading, InfeasibleError naming the ranks where no detour is left.
        """
        latency_s = self.wiring.latency_s  # the wiring comes first: it says where each part's cables start
        src, dst = self._checked(src), self._checked(dst)
        if src.shape != dst.shape:
            raise InputError(f"routes: {len(src)} sources but {len(dst)} destinations; give one for each")
        if spreading == "ideal":
            return self._ideal(src, dst)
        if spreading not in get_args(Spreading):
            known = list(get_args(Spreading))
            raise InputError(
                f"spreading {spreading!r} is not one of {', '.join(known)}{nearest(str(spreading), known)}"
            )
        fanout = self._fanout(src, dst)
        by_hash = pair_hash(src, dst, seed)
        choice = by_hash % fanout if spreading == "ecmp" else self._preferred(src, dst)
        paths = self._paths(src, dst, choice)
        if self.left is not None:
            # Destination-modulo tables know the destination only: so does the way around a fault.
            mixed = by_hash if spreading == "ecmp" else pair_hash(dst, dst, seed)
            paths = self._around_faults(src, dst, paths, (choice, fanout), mixed)
        return single_paths(paths, latency_s)

    def route(self, src_gpu: int, dst_gpu: int) -> Route:
        """The links from one GPU to another, in order; empty for a GPU to itself.

        Raises InputError for a GPU that does not exist.
        """
        self.check_gpu(src_gpu)
        self.check_gpu(dst_gpu)
        found = self.routes(np.array([src_gpu]), np.array([dst_gpu]))
        return tuple(self.link(int(number)) for number in found.links)

    def _live(self, paths: IntArray) -> FloatArray:
        """[n] the least part that faults left on any link of each path; 1 on a healthy topology."""
        if self.left is None:
            return np.ones(len(paths))
        part = np.where(paths >= 0, self.left[paths], 1.0)
        least: FloatArray = part.min(axis=1, initial=1.0)
        return least

    def _around_faults(
        self,
        src: IntArray,
        dst: IntArray,
        paths: IntArray,
        choices: tuple[IntArray, IntArray],
        mixed: IntArray,
    ) -> IntArray:
        """The same paths, but for those over dead links the next live one in an order mixed by hash."""
        broken = np.flatnonzero(self._live(paths) <= 0)
        choice, fanout = choices
        hopeless = self._live(self._unavoidable(src[broken], dst[broken])) <= 0
        held, broken = broken[hopeless], broken[~hopeless]
        stride = _coprime(fanout[broken], mixed[broken])
        for step in range(1, int(fanout[broken].max(initial=1))):
            if not len(broken):
                break
            ask = (choice[broken] + step * stride) % fanout[broken]
            tried = self._paths(src[broken], dst[broken], ask)
            good = self._live(tried) > 0
            paths[broken[good]] = tried[good]
            broken, stride = broken[~good], stride[~good]
        broken = np.sort(np.concatenate([held, broken]))
        ways, turns = self._detours()
        for turn, way in itertools.product(range(turns), range(ways)):
            if not len(broken):
                return paths
            have, tried = self._detour_paths(src[broken], dst[broken], way, turn)
            good = self._live(tried) > 0
            paths = _put(paths, broken[have[good]], tried[good])
            broken = np.delete(broken, have[good])
        self._check_none_left(src[broken], dst[broken])
        return paths

    def _ideal(self, src: IntArray, dst: IntArray) -> RouteSet:
        fanout = self._fanout(src, dst)
        hops = self._paths(src[:1], dst[:1], np.zeros(min(1, len(src)), np.int64)).shape[1]
        parts: list[RouteSet] = []
        start = 0
        most = int(fanout.max(initial=1))
        step = max(1, IDEAL_CHUNK // max(1, most * hops))
        while start < len(src) or not parts:
            rows = slice(start, start + step)
            parts.append(self._ideal_chunk(src[rows], dst[rows], fanout[rows]))
            start += step
        return joined(parts)

    def _ideal_chunk(self, src: IntArray, dst: IntArray, fanout: IntArray) -> RouteSet:
        most = int(fanout.max(initial=1))
        choices = [self._paths(src, dst, np.minimum(c, fanout - 1)) for c in range(most)]
        paths = np.stack(choices, axis=1)
        weight = np.stack([self._live(path) * (c < fanout) for c, path in enumerate(choices)], axis=1)
        broken = np.flatnonzero(weight.sum(axis=1) <= 0)
        if len(broken):
            healthy = np.delete(np.arange(len(src)), broken)
            detours = self._ideal_detours(src[broken], dst[broken])
            direct = spread_paths(paths[healthy], weight[healthy], self.wiring.latency_s)
            return in_order([direct, detours], [healthy, broken])
        return spread_paths(paths, weight, self.wiring.latency_s)

    def _ideal_detours(self, src: IntArray, dst: IntArray) -> RouteSet:
        """The first way around with a live path, all of whose live paths share in proportion."""
        rows: list[IntArray] = []
        parts: list[RouteSet] = []
        left = np.arange(len(src))
        ways, turns = self._detours()
        for way in range(ways):
            if not len(left):
                break
            stacked, weight = self._all_turns(src[left], dst[left], way, turns)
            good = weight.sum(axis=1) > 0
            if good.any():
                rows.append(left[good])
                parts.append(spread_paths(stacked[good], weight[good], self.wiring.latency_s))
                left = left[~good]
        self._check_none_left(src[left], dst[left])
        return in_order(parts, rows)

    def _all_turns(self, src: IntArray, dst: IntArray, way: int, turns: int) -> tuple[IntArray, FloatArray]:
        """Every path of a way around [n, turns, hops], and what is left of each [n, turns]."""
        weight = np.zeros((len(src), turns))
        found: list[IntArray] = []
        for turn in range(turns):
            have, tried = self._detour_paths(src, dst, way, turn)
            path = np.full((len(src), tried.shape[1]), -1, np.int64)
            path[have] = tried
            weight[have, turn] = self._live(tried)
            found.append(path)
            if not len(have):  # then no pair has a further turn either
                found += [path] * (turns - 1 - turn)
                break
        width = max(path.shape[1] for path in found)
        return np.stack([_widened(path, width) for path in found], axis=1), weight

    def _check_none_left(self, src: IntArray, dst: IntArray) -> None:
        if len(src):
            raise InfeasibleError(
                f"no route is left from rank {gpu_name(int(src[0]))} to rank {gpu_name(int(dst[0]))}"
                + (f" (and for {len(src) - 1} more pairs)" if len(src) > 1 else "")
                + ": every path and detour crosses a link that is down; take the rank out or repair a link"
            )

    # -- faults, counts, pictures --------------------------------------------------------------------

    def degraded(self, faults: Sequence[LinkFault]) -> Topology:
        """The same topology with faults: dead links are routed around, degraded ones carry less.

        Raises InputError for a target that does not exist, InfeasibleError naming ranks that no live link
        joins to the others.
        """
        other = copy.copy(self)
        factors = link_factors(self.wiring, faults)
        other.left = factors if self.left is None else self.left * factors
        for name in ("_links", "_payload_bytes_per_s"):  # cached for the healthy one
            other.__dict__.pop(name, None)
        if (other.left <= 0).any():
            check_connected(self.wiring, other.left)
        return other

    def inventory(self) -> Inventory:
        """Switches, ports, cables, transceivers and endpoints, and what they cost."""
        return count_inventory(self.wiring, self.prices)

    def longest_route(self, sources: int = 64) -> int:
        """Most links on a route from any of `sources` evenly chosen GPUs (all, where there are fewer)."""
        src = np.unique(np.linspace(0, self.n_gpus - 1, min(sources, self.n_gpus)).astype(np.int64))
        longest = 0
        for gpu in src.tolist():
            routes = self.routes(np.full(self.n_gpus, gpu), np.arange(self.n_gpus))
            longest = max(longest, int(np.diff(routes.indptr).max()))
        return longest

    def graph(self) -> networkx.Graph:
        """The whole network for people and checks; edges carry kind, cables and bytes_per_s (a direction).

        Dead cables are left out; `bytes_per_s` is that of one cable (the mean where faults differ).
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

    def local_of(self, gpu: int) -> int:
        """The GPU's number inside its server."""
        return gpu % self.gpus_per_node

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


def _coprime(n: IntArray, mixed: IntArray) -> IntArray:
    """A step for each n that visits all of 0 to n - 1, chosen by hash so that neighbours share the load."""
    step = np.ones(len(n), np.int64)
    for value in np.unique(n):
        steps = np.array([s for s in range(1, int(value)) if math.gcd(s, int(value)) == 1] or [1])
        rows = n == value
        step[rows] = steps[mixed[rows] % len(steps)]
    return step


def _widened(paths: IntArray, width: int) -> IntArray:
    return np.pad(paths, ((0, 0), (0, width - paths.shape[1])), constant_values=-1)


def _put(paths: IntArray, rows: IntArray, new: IntArray) -> IntArray:
    """`paths` with some rows replaced; wider where the new ones are."""
    width = max(paths.shape[1], new.shape[1])
    paths = _widened(paths, width)
    paths[rows] = _widened(new, width)
    return paths
