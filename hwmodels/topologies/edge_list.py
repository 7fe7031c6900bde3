"""A topology given as a list of edges, with shortest-path routes and ECMP among equal ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.ranges import BY_DIMENSION
from moesim.hwmodels.topologies.base import Topology, require_no_unrouted_pair
from moesim.hwmodels.topologies.description import NodeFigures, ScaleOutFabric
from moesim.hwmodels.topologies.faults import check_connected
from moesim.hwmodels.topologies.part import ScaleOutSpec
from moesim.hwmodels.topologies.wiring import Wiring, gpu_name
from moesim.hwmodels.units import parse_quantity

MAX_EDGES = 50_000
MAX_PATHS = 64
"""Most equally short paths of a pair that are used."""

_GPU = re.compile(r"gpu:(0|[1-9]\d{0,6})")


class EdgeListFabric(ScaleOutFabric):
    """Any graph, inside of the nodes included: `edges` of the form "a b 50GB/s [1us]".

    GPUs are called gpu:0, gpu:1, ...; every other name is a switch. A latency that is not given is half
    of `latency_same_leaf`.
    """

    kind: Literal["edge-list"]
    edges: tuple[str, ...]


class Edge(Struct, frozen=True):
    """One cable with its two ends, payload bandwidth per direction, and latency (None: not stated)."""

    a: str
    b: str
    bytes_per_s: float
    latency_s: float | None


def parse_edges(lines: Sequence[str]) -> list[Edge]:
    """Edges from lines "a b 50GB/s [1us]"; blank lines and lines that start with # are skipped.

    Raises InputError with the line's number for a malformed line, a bandwidth of zero or a loop.
    """
    edges = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            edges.append(_edge(words))
        except InputError as error:
            raise InputError(f"edge {number}: {error}") from None
        if len(edges) > MAX_EDGES:
            raise InputError(f"more than {MAX_EDGES:,} edges")
    if not edges:
        raise InputError("there is no edge; write one a line, such as: gpu:0 switch:0 50GB/s 1us")
    return edges


def _edge(words: Sequence[str]) -> Edge:
    if not 3 <= len(words) <= 4:
        raise InputError(f"{' '.join(words)[:60]!r}: write two names, a bandwidth and maybe a latency")
    if words[0] == words[1]:
        raise InputError(f"{words[0]!r} is joined to itself")
    for name in words[:2]:
        if len(name) > 100 or not name.isprintable() or "->" in name or "#" in name:
            raise InputError(
                f"{name[:40]!r} cannot be a name: up to 100 printable characters without -> and #"
            )
    rate = parse_quantity(words[2], "bytes_per_s")
    if rate <= 0:
        raise InputError(f"{words[0]} {words[1]}: bandwidth {words[2]} is zero; leave the link out")
    latency = parse_quantity(words[3], "s") if len(words) == 4 else None
    for value, dimension in ((rate, "bytes_per_s"), (latency or 0.0, "s")):
        problem = BY_DIMENSION[dimension].problem(value, dimension)
        if problem:
            raise InputError(f"{words[0]} {words[1]}: {problem}")
    return Edge(words[0], words[1], rate, latency)


class EdgeList(Topology):
    """A graph whose routes use the fewest links, through switches and GPUs alike.

    Routes are searched destination by destination, which suits clusters of a few thousand GPUs at most.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: EdgeListFabric) -> None:
        """Raises InputError where the graph's GPUs are not those of the nodes, or are not all joined."""
        super().__init__(node, nodes)
        self.fabric = fabric
        self.edges = parse_edges(fabric.edges)
        names = {name for edge in self.edges for name in (edge.a, edge.b)}
        gpus = {int(match[1]) for match in map(_GPU.fullmatch, names) if match}
        wanted = set(range(self.n_gpus))
        if gpus != wanted:
            missing, extra = sorted(wanted - gpus), sorted(gpus - wanted)
            what = (
                f"{gpu_name(missing[0])} has no edge" if missing else f"{gpu_name(extra[0])} is one too many"
            )
            raise InputError(
                f"the edge list has {len(gpus)} GPUs, but {nodes} nodes of {node.n_gpus} have {self.n_gpus}: "
                f"{what}; GPUs are called gpu:0 to {gpu_name(self.n_gpus - 1)}"
            )
        self.switches = sorted(name for name in names if not _GPU.fullmatch(name))
        self._next: dict[int, tuple[IntArray, list[list[int]]]] = {}
        try:
            check_connected(self.wiring, None)
        except InfeasibleError as error:
            raise InputError(f"the graph is not connected: {error}") from None

    def wire(self, wiring: Wiring) -> None:
        """Add the vertices and cables of the graph."""
        wiring.add_vertices("switch", len(self.switches), lambda i: self.switches[i])
        number = wiring.vertex_by_name
        seen: dict[tuple[str, str], int] = {}
        copies = []
        for edge in self.edges:
            pair = (min(edge.a, edge.b), max(edge.a, edge.b))
            copies.append(seen.get(pair, 0))
            seen[pair] = copies[-1] + 1
        default = self.fabric.latency_same_leaf.value / 2
        rate = np.array([edge.bytes_per_s for edge in self.edges])
        wiring.add_cables(
            "edge",
            np.array([number[edge.a] for edge in self.edges]),
            np.array([number[edge.b] for edge in self.edges]),
            (rate, rate),
            np.array([default if edge.latency_s is None else edge.latency_s for edge in self.edges]),
            copies=np.array(copies) if max(copies) else None,
        )

    def size(self) -> tuple[int, int]:
        """(switches, edges)."""
        return len(self.switches), len(self.edges)

    def degraded(self, faults: Sequence[object]) -> Topology:
        """A copy with faults, as for every topology; the search leaves dead links out."""
        other = super().degraded(faults)  # type: ignore[arg-type]
        assert isinstance(other, EdgeList)
        other._next = {}
        return other

    def _toward(self, dst: int) -> tuple[IntArray, list[list[int]]]:
        """([vertices] links to dst, or -1 where there is no way; links of each vertex that lead nearer)."""
        if dst not in self._next:
            wiring = self.wiring
            tails = np.stack([wiring.tails, wiring.heads], axis=1).ravel()
            heads = np.stack([wiring.heads, wiring.tails], axis=1).ravel()
            live = np.ones(len(tails), bool) if self.left is None else self.left > 0
            away = np.full(wiring.n_vertices, -1)
            away[dst] = 0
            frontier, step = np.array([dst]), 0
            while len(frontier):
                step += 1
                reached = tails[live & np.isin(heads, frontier)]
                frontier = np.unique(reached[away[reached] < 0])
                away[frontier] = step
            ahead = live & (away[heads] >= 0) & (away[tails] == away[heads] + 1)
            onward: list[list[int]] = [[] for _ in range(wiring.n_vertices)]
            for number in np.flatnonzero(ahead).tolist():
                onward[int(tails[number])].append(number)
            self._next[dst] = (away, onward)
        return self._next[dst]

    def _shortest(self, src: int, dst: int) -> list[list[int]]:
        """Up to MAX_PATHS shortest paths, ordered by the numbers of their links."""
        away, onward = self._toward(dst)
        if away[src] < 0:
            require_no_unrouted_pair(np.array([src]), np.array([dst]))
        paths: list[list[int]] = [[]]
        while len(paths[0]) < away[src]:
            longer = []
            for path in paths:
                for number in onward[self._end(path, src)]:
                    longer.append([*path, number])
                    if len(longer) == MAX_PATHS:
                        break
                if len(longer) == MAX_PATHS:
                    break
            paths = longer
        return paths

    def _end(self, path: Sequence[int], src: int) -> int:
        if not path:
            return src
        cable, back = divmod(path[-1], 2)
        return int((self.wiring.tails if back else self.wiring.heads)[cable])

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """Number of equally good paths of each pair."""
        counts = [len(self._shortest(s, d)) for s, d in zip(src.tolist(), dst.tolist(), strict=True)]
        return np.array(counts, np.int64)

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The path that destination-modulo routing takes."""
        return dst % self.fanout(src, dst)

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of the chosen path of each pair, padded with -1."""
        rows = [
            self._shortest(s, d)[c]
            for s, d, c in zip(src.tolist(), dst.tolist(), choice.tolist(), strict=True)
        ]
        width = max((len(row) for row in rows), default=0)
        return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64).reshape(len(rows), width)


EDGE_LIST = ScaleOutSpec("edge-list", EdgeListFabric, EdgeList, "")
