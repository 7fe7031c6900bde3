"""A rail-optimised network: units of leaves, one for each rail, under spines that may be oversubscribed."""

from __future__ import annotations

import numpy as np

from moesim.hwmodels.network import RailFabric
from moesim.hwmodels.node import Node
from moesim.hwmodels.topologies.part import (
    ScaleOutPart,
    absent_where,
    columns,
    endpoints_of_leaf,
    link,
)
from moesim.hwmodels.topologies.two_layer import Trees, TreeShape, wire_two_layers
from moesim.hwmodels.topologies.wiring import IntArray, Wiring


class RailOptimised(ScaleOutPart):
    """GPUs of one rail and unit reach each other over their leaf alone; only other units need a spine.

    With `cross_rail: forward`, traffic to another rail moves over NVLink to the GPU of its node on that rail
    first, so that it stays on the rail (NCCL calls it PXN).
    """

    def __init__(self, node: Node, nodes: int, fabric: RailFabric) -> None:
        """Raises InputError where the switches have too few ports for the units."""
        super().__init__(node, nodes, fabric)
        self.forwards = fabric.cross_rail == "forward"
        down, up = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        units = -(-nodes // self.down)
        self.trees = Trees(1, TreeShape.for_leaves(units * self.per_node, fabric.switch_ports.n, up))

    def leaf(self, gpu: IntArray) -> IntArray:
        """Unit by unit, a leaf for each rail."""
        return gpu // self.per_node // self.down * self.per_node + gpu % self.per_node

    def wire(self, wiring: Wiring) -> None:
        """Switches and trunks, then a cable for every GPU's NIC."""
        leaves = wire_two_layers(wiring, self.trees, [""], self.base)
        self.nics = self.wire_nics(wiring, leaves[0, self.leaf(np.arange(self.n_gpus))])

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """One on a leaf, every cable of the leaf across."""
        return np.where(self.leaf(src) == self.leaf(dst), 1, self.trees.shape.choices)

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The destination's number on its leaf, modulo the cables."""
        return dst // self.per_node % self.fanout(src, dst)

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """NIC, leaf, (spine, leaf,) NIC."""
        here, there = self.leaf(src), self.leaf(dst)
        same = here == there
        return columns(
            absent_where(src == dst, link(self.nics + src)),
            absent_where(same, link(self.trees.trunk(0, here, choice))),
            absent_where(same, link(self.trees.trunk(0, there, choice), back=True)),
            absent_where(src == dst, link(self.nics + dst, back=True)),
        )
