"""The rail-optimised network: units of one leaf per rail, under spines that may be oversubscribed."""

from __future__ import annotations

from typing import Literal

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.topologies.description import NodeFigures, SwitchedFabric
from moesim.hwmodels.topologies.part import endpoints_of_leaf
from moesim.hwmodels.topologies.spec import ScaleOutSpec
from moesim.hwmodels.topologies.two_layer import Trees, TreeShape, TwoLayerPart


class RailFabric(SwitchedFabric):
    """Leaves of one rail each, in units of as many nodes as a leaf has ports down, under shared spines.

    `cross_rail` says how traffic to another rail goes: `forward` over NVLink to the GPU of its own node
    on that rail, then inside the rail; `spine` straight through the spines.
    """

    kind: Literal["rail-optimised"]
    cross_rail: Literal["forward", "spine"] = "forward"


class RailOptimised(TwoLayerPart):
    """GPUs of one rail and unit reach each other over their leaf alone; only other units need a spine.

    With `cross_rail: forward`, traffic to another rail moves over NVLink to the GPU of its node on that rail
    first, so that it stays on the rail (NCCL calls it PXN).
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: RailFabric) -> None:
        """Raises InputError where the switches have too few ports for the units."""
        super().__init__(node, nodes, fabric)
        self.forwards = fabric.cross_rail == "forward"
        down, up = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        units = -(-nodes // self.down)
        self.trees = Trees(1, TreeShape.for_leaves(units * self.per_node, fabric.switch_ports.n, up))

    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU; a unit has one leaf for each rail."""
        return gpu // self.per_node // self.down * self.per_node + gpu % self.per_node

    def number(self, gpu: IntArray) -> IntArray:
        """The GPU's number on its rail."""
        return gpu // self.per_node


RAIL_OPTIMISED = ScaleOutSpec("rail-optimised", RailFabric, RailOptimised, "rail-roce-400g")
