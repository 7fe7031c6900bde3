"""Fat trees: one, one for each plane, and one for each rail."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.topologies.description import NodeFigures, SwitchedFabric
from moesim.hwmodels.topologies.part import ScaleOutPart, ScaleOutSpec, absent_where, endpoints_of_leaf, link
from moesim.hwmodels.topologies.two_layer import Trees, TwoLayerPart
from moesim.hwmodels.topologies.wiring import Wiring

# -- fat trees -------------------------------------------------------------------------------------


class FatTreeFabric(SwitchedFabric):
    """A fat-tree of two or three layers for all rails (single plane)."""

    kind: Literal["fat-tree"]
    planes: SourcedCount | None = None
    layers: SourcedCount | None = None
    """2 or 3; 2 where it is not given."""

    @model_validator(mode="after")
    def _one_plane(self) -> Self:
        if self.planes is not None and self.planes.n != 1:
            raise ValueError(
                f"planes={self.planes.n}: a network of kind 'fat-tree' has 1 plane; "
                f"for more use kind 'multi-plane-fat-tree'"
            )
        if self.n_layers not in (2, 3):
            raise ValueError(f"layers={self.n_layers}: a fat-tree here has 2 or 3 layers")
        return self

    @property
    def n_layers(self) -> int:
        """Layers of switches."""
        return 2 if self.layers is None else self.layers.n


class FatTree(TwoLayerPart):
    """Two layers, single plane: GPU i of every server is on rail i, and the rails meet in the spines.

    The spine and the cable follow from the destination (destination-modulo routing, as InfiniBand subnet
    managers do on fat-trees), so shifts of all ranks by a constant do not collide.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: FatTreeFabric) -> None:
        """Raises InputError where two layers of these switches have too few ports."""
        super().__init__(node, nodes, fabric)
        down, up = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        self.leaves_per_rail = -(-nodes // self.down)
        leaves = self.leaves_per_rail * self.per_node
        self.trees = Trees.for_leaves(1, leaves, fabric.switch_ports.n, up)

    def number(self, gpu: IntArray) -> IntArray:
        """The GPU's endpoint number; each rail starts a new leaf, so its last leaf may have free ports."""
        return gpu % self.per_node * self.leaves_per_rail * self.down + gpu // self.per_node

    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU; endpoints fill one leaf after the other."""
        return self.number(gpu) // self.down


class ThreeLayerFatTree(ScaleOutPart):
    """Pods of leaves and middle switches, joined by cores (the k-ary fat-tree).

    A pod of P-port switches has P/2 leaves, each with one cable to each of its middle switches; middle
    switch j of every pod is joined to core group j. A full tree without oversubscription has P^3/4
    endpoints and 5 P^2/4 switches (arXiv 2505.09343, Table 3: 65,536 and 5,120 for P = 64). Nodes fill one
    pod after the other; a unit of leaves, one for each rail, serves as many nodes as a leaf has ports down.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: FatTreeFabric) -> None:
        """Raises InputError where three layers of these switches have too few ports."""
        super().__init__(node, nodes, fabric)
        ports = fabric.switch_ports.n
        down, self.middles = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        self.leaves = -(-nodes // self.down) * self.per_node
        self.pod_leaves = ports // 2
        self.pods = -(-self.leaves // self.pod_leaves)
        if self.pods > ports:
            raise InputError(
                f"a three-layer fat-tree of {ports}-port switches has at most {ports} pods "
                f"({ports * self.pod_leaves * down} endpoints), but {self.pods} are needed: use fewer nodes "
                f"or switches with more ports"
            )
        self.cores = Trees.for_leaves(self.middles, self.pods, ports)

    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU; a unit has one leaf for each rail."""
        return gpu // self.per_node // self.down * self.per_node + gpu % self.per_node

    def wire(self, wiring: Wiring) -> None:
        """Add the switches, the trunks by leaf, those by core group, and the NICs."""
        leaves = wiring.add_vertices("leaf", self.leaves, lambda i: f"leaf:{i}")
        middles = wiring.add_vertices(
            "middle", self.pods * self.middles, lambda i: f"middle:{i // self.middles}.{i % self.middles}"
        )
        per_group = self.cores.spines
        cores = wiring.add_vertices(
            "core", self.middles * per_group, lambda i: f"core:{i // per_group}.{i % per_group}"
        )
        tails = np.repeat(np.arange(self.leaves), self.middles)
        heads = tails // self.pod_leaves * self.middles + np.tile(np.arange(self.middles), self.leaves)
        rate = self.fabric.link_bandwidth.value
        self.trunks = wiring.add_cables(
            "leaf-spine",
            leaves + tails,
            middles + heads,
            (rate, rate),
            self.fabric.hop_latency_s,
            optical=True,
        )
        of_group = middles + np.arange(self.pods * self.middles).reshape(self.pods, self.middles).T
        core = cores + np.arange(self.middles * per_group).reshape(self.middles, per_group)
        self.cores.wire(wiring, "spine-core", (of_group, core), self.fabric)
        self.nics = self.wire_nics(wiring, leaves + self.leaf(np.arange(self.n_gpus)))

    def size(self) -> tuple[int, int]:
        """(switches of all layers, cables); the cables are the trunks of both layers and the NICs."""
        cores = self.middles * self.cores.spines
        cables = self.leaves * self.middles + self.cores.cables + self.n_gpus
        return self.leaves + self.pods * self.middles + cores, cables

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """One path on a leaf, one per middle switch inside a pod, one per core cable between pods."""
        here, there = self.leaf(src), self.leaf(dst)
        in_pod = here // self.pod_leaves == there // self.pod_leaves
        across = self.middles * self.cores.choices
        return np.where(here == there, 1, np.where(in_pod, self.middles, across))

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The destination's number modulo the number of paths, which fixes middle switch and core cable."""
        number = self.leaf(dst) * self.down + dst // self.per_node % self.down
        return number % self.fanout(src, dst)

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of each path over NIC, leaf, (middle, (core, middle,) leaf,) and NIC."""
        here, there = self.leaf(src), self.leaf(dst)
        pods = here // self.pod_leaves, there // self.pod_leaves
        same, in_pod = here == there, pods[0] == pods[1]
        middle, up = choice % self.middles, choice // self.middles
        return self.between_nics(
            src,
            dst,
            absent_where(same, link(self.trunks + here * self.middles + middle)),
            absent_where(in_pod, link(self.cores.trunk(middle, pods[0], up))),
            absent_where(in_pod, link(self.cores.trunk(middle, pods[1], up), back=True)),
            absent_where(same, link(self.trunks + there * self.middles + middle, back=True)),
        )


def fat_tree_of_layers(node: NodeFigures, nodes: int, fabric: FatTreeFabric) -> ScaleOutPart:
    """The fat-tree of two or three layers; raises InputError where its switches have too few ports."""
    return (FatTree if fabric.n_layers == 2 else ThreeLayerFatTree)(node, nodes, fabric)


FAT_TREE = ScaleOutSpec("fat-tree", FatTreeFabric, fat_tree_of_layers, "mrft-ib-400g")


# -- planes ----------------------------------------------------------------------------------------


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
        self.trees = Trees.for_leaves(self.planes, leaves, fabric.switch_ports.n, up)

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


# -- rails -----------------------------------------------------------------------------------------


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
        self.trees = Trees.for_leaves(1, units * self.per_node, fabric.switch_ports.n, up)

    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU; a unit has one leaf for each rail."""
        return gpu // self.per_node // self.down * self.per_node + gpu % self.per_node

    def number(self, gpu: IntArray) -> IntArray:
        """The GPU's number on its rail."""
        return gpu // self.per_node


RAIL_OPTIMISED = ScaleOutSpec("rail-optimised", RailFabric, RailOptimised, "rail-roce-400g")
