"""Fat trees of two and three layers: one, one for each plane, and one for each rail."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, Self

import numpy as np
from msgspec import Struct
from pydantic import model_validator

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.topologies.description import (
    LayeredFabric,
    NetworkTier,
    NodeFigures,
    ScaleOutFabric,
    SwitchedFabric,
)
from moesim.hwmodels.topologies.part import (
    ScaleOutPart,
    ScaleOutSpec,
    absent_where,
    columns,
    endpoints_of_leaf,
    link,
)
from moesim.hwmodels.topologies.wiring import Wiring

# -- two layers --------------------------------------------------------------------------------------


class Trees(Struct):
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
    down: int
    """GPUs of a leaf."""
    up: int
    """Ports of a leaf towards the spines."""

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
        self.leaves, self.spines = ends
        trees.wire(wiring, "leaf-spine", (ends[0], ends[1]), self.fabric)
        gpus = np.arange(self.n_gpus)
        self.nics = self.wire_nics(wiring, ends[0][self.plane(gpus), self.leaf(gpus)])

    def climbs(self) -> int:
        """One way for each uplink of a leaf."""
        return self.trees.choices

    def climb(self, gpu: IntArray, choice: IntArray) -> tuple[IntArray, IntArray]:
        """NIC and trunk up to a spine; a single leaf is the highest switch itself."""
        tree, up = self.plane(gpu), link(self.nics + gpu)
        if not self.trees.spines:
            return columns(up), self.leaves[tree, 0]
        trunk = link(self.trees.trunk(tree, self.leaf(gpu), choice))
        return columns(up, trunk), self.spines[tree, choice % self.trees.spines]

    def top_switches(self) -> IntArray:
        """The spines of all trees, or their single leaves."""
        return (self.spines if self.trees.spines else self.leaves).ravel()

    def n_top_switches(self) -> int:
        """Their number."""
        return self.trees.count * max(1, self.trees.spines)

    @property
    def unit_gpus(self) -> int:
        """Neighbouring GPUs that share the leaves of one unit, one leaf for each rail."""
        return self.down * self.per_node

    def tiers(self) -> tuple[NetworkTier, ...]:
        """The uplinks of a unit of leaves where they are oversubscribed."""
        rate = self.fabric.link_bandwidth.value
        if not self.trees.spines or self.up * rate >= self.down * self.nic_rates()[1]:
            return ()
        leaves = self.unit_gpus // self.down
        return (NetworkTier("oversubscribed leaves", self.unit_gpus, leaves * self.up * rate),)

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


# -- fat trees -------------------------------------------------------------------------------------


class FatTreeFabric(LayeredFabric):
    """A fat-tree of two or three layers for all rails (single plane)."""

    kind: Literal["fat-tree"]
    planes: SourcedCount | None = None

    @model_validator(mode="after")
    def _one_plane(self) -> Self:
        if self.planes is not None and self.planes.n != 1:
            raise ValueError(
                f"planes={self.planes.n}: a network of kind 'fat-tree' has 1 plane; "
                f"for more use kind 'multi-plane-fat-tree'"
            )
        return self


class FatTree(TwoLayerPart):
    """Two layers, single plane: GPU i of every server is on rail i, and the rails meet in the spines.

    The spine and the cable follow from the destination (destination-modulo routing, as InfiniBand subnet
    managers do on fat-trees), so shifts of all ranks by a constant do not collide.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: FatTreeFabric) -> None:
        """Raises InputError where two layers of these switches have too few ports."""
        super().__init__(node, nodes, fabric)
        down, self.up = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        self.leaves_per_rail = -(-nodes // self.down)
        leaves = self.leaves_per_rail * self.per_node
        self.trees = Trees.for_leaves(1, leaves, fabric.switch_ports.n, self.up)

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
    With an oversubscribed core, pods are larger and middle switches have fewer ports up. With rails that
    forward, traffic to another rail first moves over NVLink to the GPU of its own node on that rail.
    """

    def __init__(
        self, node: NodeFigures, nodes: int, fabric: LayeredFabric, *, forwards: bool = False
    ) -> None:
        """Raises InputError where three layers of these switches have too few ports."""
        super().__init__(node, nodes, fabric)
        self.forwards = forwards
        ports = fabric.switch_ports.n
        down, self.middles = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        self.leaves = -(-nodes // self.down) * self.per_node
        self.pod_leaves, self.core_ports = fabric.middle_ports()
        self.pods = -(-self.leaves // self.pod_leaves)
        if self.pods > ports:
            raise InputError(
                f"a three-layer fat-tree of {ports}-port switches has at most {ports} pods "
                f"({ports * self.pod_leaves * down} endpoints), but {self.pods} are needed: use fewer nodes "
                f"or switches with more ports"
            )
        self.cores = Trees.for_leaves(self.middles, self.pods, ports, self.core_ports)

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
        self.middle_vertices, self.core_vertices = of_group, core
        self.cores.wire(wiring, "spine-core", (of_group, core), self.fabric)
        self.nics = self.wire_nics(wiring, leaves + self.leaf(np.arange(self.n_gpus)))

    def size(self) -> tuple[int, int]:
        """(switches of all layers, cables); the cables are the trunks of both layers and the NICs."""
        cores = self.middles * self.cores.spines
        cables = self.leaves * self.middles + self.cores.cables + self.n_gpus
        return self.leaves + self.pods * self.middles + cores, cables

    def climbs(self) -> int:
        """One way for each pair of a leaf's and a middle switch's uplink."""
        return self.middles * self.cores.choices

    def climb(self, gpu: IntArray, choice: IntArray) -> tuple[IntArray, IntArray]:
        """NIC, leaf and middle switch up to a core; in a single pod up to a middle switch."""
        leaf, middle, up = self.leaf(gpu), choice % self.middles, choice // self.middles
        hops = link(self.nics + gpu), link(self.trunks + leaf * self.middles + middle)
        if not self.cores.spines:
            return columns(*hops), self.middle_vertices[middle, 0]
        core = link(self.cores.trunk(middle, leaf // self.pod_leaves, up))
        return columns(*hops, core), self.core_vertices[middle, up % self.cores.spines]

    def top_switches(self) -> IntArray:
        """The cores, or the middle switches of a single pod."""
        return (self.core_vertices if self.cores.spines else self.middle_vertices).ravel()

    def n_top_switches(self) -> int:
        """Their number."""
        return self.middles * max(1, self.cores.spines)

    def tiers(self) -> tuple[NetworkTier, ...]:
        """The uplinks of a unit of leaves and those of a pod, where they are oversubscribed.

        Pods that do not hold whole units are taken as neighbouring GPUs all the same.
        """
        rate, nic = self.fabric.link_bandwidth.value, self.nic_rates()[1]
        tiers, pod = [], self.pod_leaves * self.down
        unit = NetworkTier(
            "oversubscribed leaves", self.down * self.per_node, self.per_node * self.middles * rate
        )
        core = NetworkTier("oversubscribed core", pod, self.middles * self.core_ports * rate)
        if self.leaves > self.per_node and unit.bytes_per_s < unit.gpus * nic:
            tiers.append(unit)
        if self.pods > 1 and core.bytes_per_s < pod * nic:
            tiers.append(core)
        return tuple(tiers)

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
        down, self.up = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        leaves = -(-(self.n_gpus // self.planes) // self.down)
        self.trees = Trees.for_leaves(self.planes, leaves, fabric.switch_ports.n, self.up)

    @property
    def unit_gpus(self) -> int:
        """Neighbouring GPUs whose NICs fill one leaf of every plane."""
        return self.down * self.planes

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


class RailFabric(LayeredFabric):
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
        down, self.up = fabric.leaf_ports()
        self.down = endpoints_of_leaf(down, node.n_nics_per_gpu)
        units = -(-nodes // self.down)
        self.trees = Trees.for_leaves(1, units * self.per_node, fabric.switch_ports.n, self.up)

    def leaf(self, gpu: IntArray) -> IntArray:
        """The leaf of a GPU; a unit has one leaf for each rail."""
        return gpu // self.per_node // self.down * self.per_node + gpu % self.per_node

    def number(self, gpu: IntArray) -> IntArray:
        """The GPU's number on its rail."""
        return gpu // self.per_node


def rails_of_layers(node: NodeFigures, nodes: int, fabric: RailFabric) -> ScaleOutPart:
    """Rails under two or three layers; raises InputError where the switches have too few ports."""
    if fabric.n_layers == 2:
        return RailOptimised(node, nodes, fabric)
    return ThreeLayerFatTree(node, nodes, fabric, forwards=fabric.cross_rail == "forward")


RAIL_OPTIMISED = ScaleOutSpec("rail-optimised", RailFabric, rails_of_layers, "rail-roce-400g")
