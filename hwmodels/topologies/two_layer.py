"""Leaves, spines and cables of one or several equal two-layer trees."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.description import ScaleOutFabric
from moesim.hwmodels.topologies.part import ScaleOutPart, absent_where, link
from moesim.hwmodels.topologies.wiring import Wiring


@dataclass(slots=True)
class Trees:
    """`count` equal trees side by side, each of `leaves` switches with `spines` over them.

    A leaf and a spine are joined by `bundle` parallel cables; `first` is the number of the first trunk, which
    `wire` sets. Trunks are numbered tree, leaf, spine, bundle. The spines are the fewest that take every
    uplink and divide a leaf's uplinks evenly. A full tree of P-port switches without oversubscription has P
    leaves, P/2 spines and P^2/2 endpoints (arXiv 2505.09343, Table 3: 2,048 for P = 64; eq. N3).
    """

    count: int
    leaves: int
    spines: int
    bundle: int
    first: int = 0

    @classmethod
    def for_leaves(cls, count: int, leaves: int, switch_ports: int, uplinks: int | None = None) -> Trees:
        """The smallest trees with this many leaves of `uplinks` (half the ports where not given) each.

        Raises InputError above `switch_ports` leaves, which would need a further layer.
        """
        up = switch_ports // 2 if uplinks is None else uplinks
        if leaves > switch_ports:
            raise InputError(
                f"a two-layer fat-tree of {switch_ports}-port switches has at most {switch_ports} leaves "
                f"({switch_ports * (switch_ports - up)} endpoints), but {leaves} are needed: use fewer "
                f"nodes, a network with more planes or layers, or switches with more ports"
            )
        if leaves == 1:
            return cls(count, 1, 0, 0)
        bundle = max(b for b in range(1, up + 1) if up % b == 0 and leaves * b <= switch_ports)
        return cls(count, leaves, up // bundle, bundle)

    @property
    def choices(self) -> int:
        """Number of paths between two leaves, which is that of a leaf's cables to the spines."""
        return max(1, self.spines * self.bundle)

    @property
    def cables(self) -> int:
        """Trunk cables of all trees."""
        return self.count * self.leaves * self.spines * self.bundle

    def wire(
        self, wiring: Wiring, kind: str, ends: tuple[IntArray, IntArray], fabric: ScaleOutFabric
    ) -> None:
        """Add cables between the vertices of leaves [count, leaves] and spines [count, spines].

        Links between switches have the line rate; the NIC links hold the losses to the payload rate.
        """
        leaves, spines = ends
        shape = (self.count, self.leaves, self.spines, self.bundle)
        rate = fabric.link_bandwidth.value
        self.first = wiring.add_cables(
            kind,
            np.broadcast_to(leaves[:, :, None, None], shape).ravel(),
            np.broadcast_to(spines[:, None, :, None], shape).ravel(),
            (rate, rate),
            fabric.hop_latency_s,
            copies=np.broadcast_to(np.arange(self.bundle), shape).ravel(),
            optical=True,
        )

    def trunk(self, tree: IntArray | int, leaf: IntArray, choice: IntArray) -> IntArray:
        """The cable of a leaf for each choice, which counts spines first and then cables of the bundle."""
        spines, bundle = max(1, self.spines), max(1, self.bundle)
        row = (tree * self.leaves + leaf) * spines + choice % spines
        return self.first + row * bundle + choice // spines % bundle


class TwoLayerPart(ScaleOutPart):
    """Trees of leaves and spines with a GPU's NICs on one leaf; subclasses choose the leaf and the tree."""

    trees: Trees

    @abstractmethod
    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU's NIC in its tree."""

    @abstractmethod
    def number(self, gpu: IntArray) -> IntArray:
        """The number of a destination that destination-modulo routing uses."""

    def plane(self, gpu: IntArray) -> IntArray:
        """The tree of a GPU's NIC, the first by default."""
        return np.zeros_like(gpu)

    def prefixes(self) -> list[str]:
        """Prefix of the switch names of each tree."""
        return [""]

    def wire(self, wiring: Wiring) -> None:
        """Add switches and trunks, then a cable for every GPU's NICs."""
        trees, prefixes, ends = self.trees, self.prefixes(), []
        for kind, number in (("leaf", trees.leaves), ("spine", trees.spines)):

            def name(index: int, kind: str = kind, number: int = number) -> str:
                return f"{prefixes[index // number]}{kind}:{index % number}"

            # Several trees are the planes of the network.
            planes = np.repeat(np.arange(trees.count), number) if trees.count > 1 else None
            first = wiring.add_vertices(kind, trees.count * number, name, planes=planes)
            ends.append(first + np.arange(trees.count * number).reshape(trees.count, number))
        trees.wire(wiring, "leaf-spine", (ends[0], ends[1]), self.fabric)
        gpus = np.arange(self.n_gpus)
        self.nics = self.wire_nics(wiring, ends[0][self.plane(gpus), self.leaf(gpus)])

    def size(self) -> tuple[int, int]:
        """(leaves and spines, trunks and NIC cables)."""
        switches = self.trees.count * (self.trees.leaves + self.trees.spines)
        return switches, self.trees.cables + self.n_gpus

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """One path on a leaf, one per uplink of the leaf across leaves."""
        return np.where(self.leaf(src) == self.leaf(dst), 1, self.trees.choices)

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The destination's number modulo the number of paths."""
        return self.number(dst) % self.fanout(src, dst)

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of each path over NIC, leaf, (spine, leaf,) and NIC of one tree."""
        here, there, tree = self.leaf(src), self.leaf(dst), self.plane(dst)
        same = here == there
        return self.between_nics(
            src,
            dst,
            absent_where(same, link(self.trees.trunk(tree, here, choice))),
            absent_where(same, link(self.trees.trunk(tree, there, choice), back=True)),
        )
