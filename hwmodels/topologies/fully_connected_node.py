"""Servers in which every pair of GPUs has a link of its own (Infinity Fabric of MI300X)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.provenance import SourcedBytesPerSecond
from moesim.hwmodels.scale_up_shares import ScaleUpShares
from moesim.hwmodels.topologies.description import NodeFigures, ScaleUpFabric
from moesim.hwmodels.topologies.part import ScaleUpPart, absent_where, columns, link
from moesim.hwmodels.topologies.spec import ScaleUpSpec
from moesim.hwmodels.topologies.wiring import Wiring


class MeshFabric(ScaleUpFabric):
    """Every pair of GPUs has a link of its own (MI300X). Bandwidths are of one pair and direction."""

    kind: Literal["fully-connected"]
    link_bandwidth: SourcedBytesPerSecond
    link_bandwidth_effective: SourcedBytesPerSecond

    def shares(self, node: NodeFigures) -> ScaleUpShares:
        """Shares of the links to the other members of a group."""
        return MeshShares(self.link_bandwidth.value / node.scale_up_bytes_per_s, node.n_gpus)


@dataclass(frozen=True, slots=True)
class MeshShares(ScaleUpShares):
    """Shares in a node of `gpus` with a link for each pair; `link` is a link's nominal rate over a GPU's."""

    link: float
    gpus: int

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` GPUs, which uses the links to the other members."""
        if group <= 1:
            return 1.0
        # The links of a part of a node do not add up to the whole rate of a GPU.
        return min(1.0, (group - 1) * min(self.link, 1.0 / (self.gpus - 1)))

    def pair(self) -> float:
        """Share of two neighbours, which is one link."""
        return self.link

    def ring(self, group: int) -> float:
        """Share of a reduce-scatter or all-gather, with rings over all links between the members."""
        return self.all_to_all(group)


class FullyConnectedNode(ScaleUpPart):
    """Each pair uses its own link or, where that is down, two links over a third GPU."""

    def __init__(self, node: NodeFigures, nodes: int, fabric: MeshFabric) -> None:
        """Takes the node and the figures of one pair."""
        super().__init__(node, nodes)
        self.fabric = fabric
        self.pairs = self.per_node * (self.per_node - 1) // 2

    def wire(self, wiring: Wiring) -> None:
        """Add a cable for every pair i < j of every node, ordered by i, then j."""
        i, j = np.triu_indices(self.per_node, 1)
        node = np.repeat(np.arange(self.nodes), self.pairs) * self.per_node
        rates = (self.fabric.link_bandwidth_effective.value, self.fabric.link_bandwidth.value)
        self.first = wiring.add_cables(
            "mesh",
            node + np.tile(i, self.nodes),
            node + np.tile(j, self.nodes),
            rates,
            self.node.scale_up_latency_s,
        )

    def size(self) -> tuple[int, int]:
        """(0, cables), one cable per pair."""
        return 0, self.nodes * self.pairs

    def _direct(self, src: IntArray, dst: IntArray) -> IntArray:
        n = self.per_node
        i, j = np.minimum(src % n, dst % n), np.maximum(src % n, dst % n)
        pair = i * (2 * n - i - 1) // 2 + j - i - 1
        cable = self.first + src // n * self.pairs + pair
        return absent_where(src == dst, np.where(src > dst, link(cable, back=True), link(cable)))

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """[n, 1] the link of each pair."""
        return columns(self._direct(src, dst))

    def detours(self) -> int:
        """One detour per GPU of the node; those over the pair's own two GPUs bring no new path."""
        return self.per_node

    def detour_paths(self, src: IntArray, dst: IntArray, number: int) -> IntArray:
        """Paths over a third GPU; each pair starts with a different one."""
        n = self.per_node
        via = src // n * n + (src + dst + number) % n
        return columns(self._direct(src, via), self._direct(via, dst))


FULLY_CONNECTED = ScaleUpSpec("fully-connected", MeshFabric, FullyConnectedNode, "mi300x-mesh")
