"""The multi-plane fat-tree (MPFT): separate two-layer fat-trees, each with one NIC of every server."""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.topologies.description import NodeFigures, SwitchedFabric
from moesim.hwmodels.topologies.part import endpoints_of_leaf
from moesim.hwmodels.topologies.spec import ScaleOutSpec
from moesim.hwmodels.topologies.two_layer import Trees, TreeShape, TwoLayerPart


class MultiPlaneFabric(SwitchedFabric):
    """Several identical two-layer fat-trees side by side that no switch joins."""

    kind: Literal["multi-plane-fat-tree"]
    planes: SourcedCount


class MultiPlaneFatTree(TwoLayerPart):
    """Planes are not joined by any switch (arXiv 2505.09343, section 5.1).

    Traffic to a GPU on another plane is first forwarded inside the sender's server, over NVLink, to the
    GPU whose NIC is on the receiver's plane.
    """

    forwards = True

    def __init__(self, node: NodeFigures, nodes: int, fabric: MultiPlaneFabric) -> None:
        """Raises InputError where planes do not divide a server's GPUs or switches have too few ports."""
        super().__init__(node, nodes, fabric)
        self.planes = fabric.planes.n
        if self.per_node % self.planes:
            legal = [p for p in range(1, self.per_node + 1) if self.per_node % p == 0]
            raise InputError(
                f"planes={self.planes} does not divide the {self.per_node} GPUs of node {node.name!r}; "
                f"legal: {', '.join(map(str, legal))}"
            )
        down, up = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        leaves = -(-(self.n_gpus // self.planes) // self.down)
        self.trees = Trees(self.planes, TreeShape.for_leaves(leaves, fabric.switch_ports.n, up))

    def plane(self, gpu: IntArray) -> IntArray:
        """The plane of a GPU's NIC."""
        return gpu % self.per_node % self.planes

    def number(self, gpu: IntArray) -> IntArray:
        """The GPU's endpoint number in its plane, counted server by server."""
        in_plane = self.per_node // self.planes
        number: IntArray = gpu // self.per_node * in_plane + gpu % self.per_node // self.planes
        return number

    def sender(self, src: IntArray, dst: IntArray) -> IntArray:
        """The GPU whose NIC sends: `src` where it is on the plane of `dst`, else the counterpart of `dst`."""
        sender: IntArray = np.where(self.plane(src) == self.plane(dst), src, super().sender(src, dst))
        return sender

    def joined(self, src: IntArray, dst: IntArray) -> IntArray:
        """[n] 1 for GPUs on the same plane, else 0."""
        return np.where(self.plane(src) == self.plane(dst), 1, 0)

    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU in its plane; endpoints fill one leaf after the other."""
        return self.number(gpu) // self.down

    def prefixes(self) -> list[str]:
        """Prefixes of switch names: plane0., plane1., ..."""
        return [f"plane{plane}." for plane in range(self.planes)]


MULTI_PLANE_FAT_TREE = ScaleOutSpec(
    "multi-plane-fat-tree", MultiPlaneFabric, MultiPlaneFatTree, "mpft-ib-400g"
)
