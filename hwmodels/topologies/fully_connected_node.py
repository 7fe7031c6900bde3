"""Servers in which every pair of GPUs has a link of its own (Infinity Fabric of MI300X)."""

from __future__ import annotations

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.node import Node
from moesim.hwmodels.scale_up import MeshSection
from moesim.hwmodels.topologies.part import ScaleUpPart, absent_where, columns, link
from moesim.hwmodels.topologies.wiring import Wiring


class FullyConnectedNode(ScaleUpPart):
    """One link from GPU to GPU; where it is down, two over a third GPU."""

    def __init__(self, node: Node, nodes: int, section: MeshSection) -> None:
        """The node and the figures of one pair."""
        super().__init__(node, nodes)
        self.section = section
        self.pairs = self.per_node * (self.per_node - 1) // 2

    def wire(self, wiring: Wiring) -> None:
        """A cable for every pair i < j of every node, ordered by i, then j."""
        i, j = np.triu_indices(self.per_node, 1)
        node = np.repeat(np.arange(self.nodes), self.pairs) * self.per_node
        rates = (self.section.link_bandwidth_effective.value, self.section.link_bandwidth.value)
        self.first = wiring.add_cables(
            "mesh",
            node + np.tile(i, self.nodes),
            node + np.tile(j, self.nodes),
            rates,
            self.node.scale_up_latency_s,
        )

    def size(self) -> tuple[int, int]:
        """No switch, a cable a pair."""
        return 0, self.nodes * self.pairs

    def _direct(self, src: IntArray, dst: IntArray) -> IntArray:
        n = self.per_node
        i, j = np.minimum(src % n, dst % n), np.maximum(src % n, dst % n)
        pair = i * (2 * n - i - 1) // 2 + j - i - 1
        cable = self.first + src // n * self.pairs + pair
        return absent_where(src == dst, np.where(src > dst, link(cable, back=True), link(cable)))

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """The pair's own link."""
        return columns(self._direct(src, dst))

    def detours(self) -> int:
        """One over every other GPU of the node (and two that lead nowhere new)."""
        return self.per_node

    def detour_paths(self, src: IntArray, dst: IntArray, number: int) -> IntArray:
        """Over a third GPU; each pair starts with another one."""
        n = self.per_node
        via = src // n * n + (src + dst + number) % n
        return columns(self._direct(src, via), self._direct(via, dst))
