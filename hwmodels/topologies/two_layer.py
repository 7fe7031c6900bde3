"""Leaves and spines of one or several equal two-layer trees: how many there are, and their cables."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.description import ScaleOutFabric
from moesim.hwmodels.topologies.part import ScaleOutPart, absent_where, columns, link
from moesim.hwmodels.topologies.wiring import Wiring


@dataclass(frozen=True, slots=True)
class TreeShape:
    """One tree of `leaves` switches with `spines` over them and `bundle` parallel cables between each two.

    The spines are the fewest that take every uplink and divide a leaf's uplinks evenly. A full tree of
    P-port switches without oversubscription has P leaves, P/2 spines and P^2/2 endpoints
    (arXiv 2505.09343, Table 3: 2,048 for P = 64; docs/model.md, eq. N3).
    """

    leaves: int
    spines: int
    bundle: int

    @classmethod
    def for_leaves(cls, leaves: int, switch_ports: int, uplinks: int | None = None) -> TreeShape:
        """The smallest tree with this many leaves of `uplinks` (half the ports where not given) each.

        Raises InputError above `switch_ports` leaves: a further layer would be needed.
        """
        up = switch_ports // 2 if uplinks is None else uplinks
        if leaves > switch_ports:
            raise InputError(
                f"a two-layer fat-tree of {switch_ports}-port switches has at most {switch_ports} leaves "
                f"({switch_ports * (switch_ports - up)} endpoints), but {leaves} are needed: use fewer "
                f"nodes, a network with more planes or layers, or switches with more ports"
            )
        if leaves == 1:
            return cls(1, 0, 0)
        bundle = max(b for b in range(1, up + 1) if up % b == 0 and leaves * b <= switch_ports)
        return cls(leaves, up // bundle, bundle)

    @property
    def choices(self) -> int:
        """Paths between two leaves: cables of a leaf to its spines."""
        return max(1, self.spines * self.bundle)


class Trees:
    """`count` equal trees side by side; trunk cables are numbered tree, leaf, spine, bundle."""

    def __init__(self, count: int, shape: TreeShape) -> None:
        """The trees; `wire` adds their cables."""
        self.count = count
        self.shape = shape

    @property
    def cables(self) -> int:
        """Trunk cables of all trees."""
        return self.count * self.shape.leaves * self.shape.spines * self.shape.bundle

    def wire(
        self, wiring: Wiring, kind: str, ends: tuple[IntArray, IntArray], fabric: ScaleOutFabric
    ) -> None:
        """Cables between the vertices of leaves [count, leaves] and spines [count, spines].

        Between switches the line rate holds; what a NIC cannot fill is lost at the NIC links already.
        """
        leaves, spines = ends
        shape = (self.count, self.shape.leaves, self.shape.spines, self.shape.bundle)
        rate = fabric.link_bandwidth.value
        self.first = wiring.add_cables(
            kind,
            np.broadcast_to(leaves[:, :, None, None], shape).ravel(),
            np.broadcast_to(spines[:, None, :, None], shape).ravel(),
            (rate, rate),
            fabric.hop_latency_s,
            copies=np.broadcast_to(np.arange(self.shape.bundle), shape).ravel(),
            optical=True,
        )

    def trunk(self, tree: IntArray | int, leaf: IntArray, choice: IntArray) -> IntArray:
        """The cable of a leaf for each choice: spines first, then cables of the bundle."""
        spines, bundle = max(1, self.shape.spines), max(1, self.shape.bundle)
        row = (tree * self.shape.leaves + leaf) * spines + choice % spines
        return self.first + row * bundle + choice // spines % bundle


def wire_two_layers(wiring: Wiring, trees: Trees, prefixes: list[str], fabric: ScaleOutFabric) -> IntArray:
    """Leaves, spines and trunks of trees called by `prefixes`; the leaves' vertices [count, leaves].

    More than one tree are the planes of the network.
    """
    ends = []
    for kind, number in (("leaf", trees.shape.leaves), ("spine", trees.shape.spines)):
        planes = np.repeat(np.arange(trees.count), number) if trees.count > 1 else None

        def name(index: int, kind: str = kind, number: int = number) -> str:
            return f"{prefixes[index // number]}{kind}:{index % number}"

        first = wiring.add_vertices(kind, trees.count * number, name, planes=planes)
        ends.append(first + np.arange(trees.count * number).reshape(trees.count, number))
    trees.wire(wiring, "leaf-spine", (ends[0], ends[1]), fabric)
    return ends[0]


class TwoLayerPart(ScaleOutPart):
    """Trees of leaves and spines with a GPU's NICs on one leaf; subclasses say which leaf and which tree."""

    trees: Trees

    @abstractmethod
    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU's NIC in its tree."""

    @abstractmethod
    def number(self, gpu: IntArray) -> IntArray:
        """What destination-modulo routing takes modulo the cables."""

    def plane(self, gpu: IntArray) -> IntArray:
        """The tree of a GPU's NIC: the only one, unless a part says otherwise."""
        return np.zeros_like(gpu)

    def prefixes(self) -> list[str]:
        """What the names of each tree's switches begin with."""
        return [""]

    def wire(self, wiring: Wiring) -> None:
        """Switches and trunks tree by tree, then a cable for every GPU's NIC."""
        leaves = wire_two_layers(wiring, self.trees, self.prefixes(), self.fabric)
        gpus = np.arange(self.n_gpus)
        self.nics = self.wire_nics(wiring, leaves[self.plane(gpus), self.leaf(gpus)])

    def size(self) -> tuple[int, int]:
        """Leaves and spines; trunks and NICs."""
        switches = self.trees.count * (self.trees.shape.leaves + self.trees.shape.spines)
        return switches, self.trees.cables + self.n_gpus

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """One on a leaf, every cable of the leaf across."""
        return np.where(self.leaf(src) == self.leaf(dst), 1, self.trees.shape.choices)

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The destination's number, modulo the cables."""
        return self.number(dst) % self.fanout(src, dst)

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """NIC, leaf, (spine, leaf,) NIC of one tree."""
        here, there, tree = self.leaf(src), self.leaf(dst), self.plane(dst)
        same = here == there
        return columns(
            absent_where(src == dst, link(self.nics + src)),
            absent_where(same, link(self.trees.trunk(tree, here, choice))),
            absent_where(same, link(self.trees.trunk(tree, there, choice), back=True)),
            absent_where(src == dst, link(self.nics + dst, back=True)),
        )
