"""Several buildings: a network in each of them, and a link between every two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moesim.hwmodels.arrays import BoolArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.description import Buildings, NetworkTier, NodeFigures
from moesim.hwmodels.topologies.part import ScaleOutPart, absent_where, columns, link
from moesim.hwmodels.topologies.tables import widened
from moesim.hwmodels.topologies.wiring import Wiring

LINK_KIND = "building"
"""Kind of the cables between buildings, and from a border to the highest switches inside."""
TIER = "link between buildings"


class SeveralBuildings(ScaleOutPart):
    """Equal networks, one a building, whose highest switches all reach a border that others are joined to.

    A path to another building climbs to a highest switch, crosses both borders, and descends from the switch
    of the same place. A border stands for the equipment of the link, which nobody states: it has the stated
    bandwidth, spread evenly over the highest switches, and neither counts as a switch nor costs anything.
    """

    def __init__(
        self, node: NodeFigures, nodes: int, buildings: Buildings, inside: Callable[[int], ScaleOutPart]
    ) -> None:
        """`inside` builds the network of a number of nodes; InputError where buildings do not divide them."""
        count = buildings.count.n
        if nodes % count:
            near = [n for n in (nodes // count * count, (nodes // count + 1) * count) if n]
            legal = [n for n in range(2, min(nodes, 64) + 1) if nodes % n == 0]
            raise InputError(
                f"buildings.count={count} does not divide {nodes:,} nodes; nearest nodes: "
                f"{', '.join(f'{n:,}' for n in near)}; counts that divide: "
                f"{', '.join(map(str, legal)) or 'none'}"
            )
        self.inner = tuple(inside(nodes // count) for _ in range(count))
        super().__init__(node, nodes, self.inner[0].fabric)
        self.forwards = self.inner[0].forwards
        self.own_gpus, self.count = self.n_gpus // count, count
        self.latency_s = buildings.latency_s
        self.rate = buildings.bytes_per_s(self.own_gpus * self.nic_rates()[1])
        self.n_tops = self.inner[0].n_top_switches()

    def wire(self, wiring: Wiring) -> None:
        """Add each building's network, the borders with their cables inside, and the links of all pairs."""
        tops = []
        for number, part in enumerate(self.inner):
            with wiring.building(f"building{number}.", number * self.own_gpus, self.own_gpus):
                part.wire(wiring)
            tops.append(part.top_switches())
        border = wiring.add_vertices("border", self.count, lambda i: f"border:{i}", chips=0)
        self.first_top = np.array([own.min() for own in tops])
        # The vertices of a layer follow each other, in whatever order a part lists them.
        self.place = np.empty(self.n_tops, np.int64)
        self.place[tops[0] - self.first_top[0]] = np.arange(self.n_tops)
        each = self.rate * (self.count - 1) / self.n_tops
        ends = border + np.repeat(np.arange(self.count), self.n_tops)
        self.rises = wiring.add_cables(LINK_KIND, np.concatenate(tops), ends, (each, each), 0.0, strands=0)
        one, other = np.triu_indices(self.count, 1)
        self.spans = wiring.add_cables(
            LINK_KIND, border + one, border + other, (self.rate, self.rate), self.latency_s, strands=0
        )

    def size(self) -> tuple[int, int]:
        """(switches and borders, cables) of all buildings and of their links."""
        switches, cables = self.inner[0].size()
        between = self.count * (self.count - 1) // 2
        return self.count * (switches + 1), self.count * (cables + self.n_tops) + between

    def tiers(self) -> tuple[NetworkTier, ...]:
        """Those inside a building, and the link between two."""
        own = NetworkTier(TIER, self.own_gpus, self.rate, self.latency_s, to_each=True)
        return (*self.inner[0].tiers(), own)

    def sender(self, src: IntArray, dst: IntArray) -> IntArray:
        """The GPU of src's node whose NIC sends, as inside a building."""
        return self.inner[0].sender(src, dst)

    def joined(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] 1 where the NICs of the two GPUs are on the same plane."""
        return self.inner[0].joined(src, dst)

    def nic_links(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n, 2] the link out of src's NIC and the one into dst's."""
        first = np.array([part.nics for part in self.inner])
        out, into = (first[gpu // self.own_gpus] + gpu % self.own_gpus for gpu in (src, dst))
        return columns(link(out), link(into, back=True))

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """As inside a building; between two, one path for every way up."""
        inside = self.inner[0].fanout(src % self.own_gpus, dst % self.own_gpus)
        return np.where(self._apart(src, dst), self.inner[0].climbs(), inside)

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """As inside a building; between two, the destination's number modulo the ways up."""
        own = dst % self.own_gpus
        inside = self.inner[0].preferred(src % self.own_gpus, own)
        return np.where(self._apart(src, dst), own % self.inner[0].climbs(), inside)

    def _apart(self, src: IntArray, dst: IntArray) -> BoolArray:
        return np.asarray(src // self.own_gpus != dst // self.own_gpus)

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of each path: inside a building, or up, over both borders, and down."""
        return self._paths(src, dst, choice, lambda part, s, d, c: part.paths(s, d, c))

    def detours(self) -> int:
        """Most detours of a pair inside a building; a pair between two has its other ways up."""
        return self.inner[0].detours()

    def detour_paths(self, src: IntArray, dst: IntArray, number: int) -> IntArray:
        """Those inside a building."""
        choice = np.full(len(src), number % self.inner[0].climbs())
        return self._paths(src, dst, choice, lambda part, s, d, _: part.detour_paths(s, d, number))

    def _paths(
        self,
        src: IntArray,
        dst: IntArray,
        choice: IntArray,
        inside: Callable[[ScaleOutPart, IntArray, IntArray, IntArray], IntArray],
    ) -> IntArray:
        here, there, own = src // self.own_gpus, dst // self.own_gpus, self.own_gpus
        pieces = []
        for number in np.unique(here[here == there]).tolist():
            rows = np.flatnonzero((here == number) & (there == number))
            pieces.append((rows, inside(self.inner[number], src[rows] % own, dst[rows] % own, choice[rows])))
        apart = np.flatnonzero(here != there)
        if len(apart):
            pieces.append((apart, self._between(src[apart], dst[apart], choice[apart])))
        return _gathered(pieces, len(src))

    def _between(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links up to the border of src's building, across, and down to dst, which mirrors a climb."""
        one, other = src // self.own_gpus, dst // self.own_gpus
        up, down = self._climb(src, choice), self._climb(dst, choice)
        low, high = np.minimum(one, other), np.maximum(one, other)
        pair = low * (2 * self.count - low - 1) // 2 + high - low - 1
        across = 2 * (self.spans + pair) + (one > other)
        return np.hstack([up, across[:, None], absent_where(down < 0, down ^ 1)[:, ::-1]])

    def _climb(self, gpu: IntArray, choice: IntArray) -> IntArray:
        """Links from each GPU to the border of its building."""
        building, pieces = gpu // self.own_gpus, []
        for number in np.unique(building).tolist():
            rows = np.flatnonzero(building == number)
            links, top = self.inner[number].climb(gpu[rows] % self.own_gpus, choice[rows])
            rise = self.rises + number * self.n_tops + self.place[top - self.first_top[number]]
            pieces.append((rows, columns(*links.T, link(rise))))
        return _gathered(pieces, len(gpu))


def _gathered(pieces: list[tuple[IntArray, IntArray]], count: int) -> IntArray:
    """Paths [count, hops] from pieces of (rows, paths), padded with -1."""
    width = max((links.shape[1] for _, links in pieces), default=1)
    paths = np.full((count, width), -1, np.int64)
    for rows, links in pieces:
        paths[rows] = widened(links, width)
    return paths
