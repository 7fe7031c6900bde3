"""Topologies by name: one file each, registered here."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import (
    SINGLE_NODE,
    DragonflyFabric,
    EdgeListFabric,
    Fabric,
    FatTreeFabric,
    MultiPlaneFabric,
    Network,
    RailFabric,
)
from moesim.hwmodels.node import Node
from moesim.hwmodels.scale_up import (
    DomainSection,
    MeshSection,
    SupernodeSection,
    TorusSection,
)
from moesim.hwmodels.topologies.base import Topology
from moesim.hwmodels.topologies.cluster_topology import ClusterTopology
from moesim.hwmodels.topologies.dragonfly import Dragonfly
from moesim.hwmodels.topologies.edge_list import EdgeList
from moesim.hwmodels.topologies.fat_tree import FatTree, ThreeLayerFatTree
from moesim.hwmodels.topologies.faults import LinkFault
from moesim.hwmodels.topologies.fully_connected_node import FullyConnectedNode
from moesim.hwmodels.topologies.inventory import Inventory
from moesim.hwmodels.topologies.multi_plane_fat_tree import MultiPlaneFatTree
from moesim.hwmodels.topologies.nvswitch_node import NvswitchNode
from moesim.hwmodels.topologies.part import ScaleOutPart, ScaleUpPart
from moesim.hwmodels.topologies.rail_optimised import RailOptimised
from moesim.hwmodels.topologies.scale_up_domain import ScaleUpDomain
from moesim.hwmodels.topologies.supernode import Supernode
from moesim.hwmodels.topologies.tables import (
    Link,
    LinkTable,
    Route,
    RouteSet,
    Spreading,
    route_bytes_per_s,
    route_latency_s,
)
from moesim.hwmodels.topologies.torus import Torus
from moesim.hwmodels.topologies.wiring import SCALE_UP_KINDS, gpu_name

__all__ = [
    "SCALE_UP_KINDS",
    "Inventory",
    "Link",
    "LinkFault",
    "LinkTable",
    "Route",
    "RouteSet",
    "Spreading",
    "Topology",
    "build_topology",
    "gpu_name",
    "route_bytes_per_s",
    "route_latency_s",
]


def scale_up_part(node: Node, nodes: int) -> ScaleUpPart:
    """What joins the GPUs of every node, by the kind of its `scale_up`.

    Raises InputError where the section does not fit the node.
    """
    section = None if node.scale_up is None else node.scale_up.fabric
    if isinstance(section, DomainSection):
        return ScaleUpDomain(node, nodes, section)
    if isinstance(section, MeshSection):
        return FullyConnectedNode(node, nodes, section)
    if isinstance(section, TorusSection):
        return Torus(node, nodes, section)
    if isinstance(section, SupernodeSection):
        return Supernode(node, nodes, section)
    return NvswitchNode(node, nodes, section)


def scale_out_part(node: Node, nodes: int, fabric: Fabric) -> ScaleOutPart:
    """What joins the nodes, by the kind of the network; raises InputError where the nodes do not fit."""
    if isinstance(fabric, FatTreeFabric):
        return (FatTree if fabric.n_layers == 2 else ThreeLayerFatTree)(node, nodes, fabric)
    if isinstance(fabric, MultiPlaneFabric):
        return MultiPlaneFatTree(node, nodes, fabric)
    if isinstance(fabric, RailFabric):
        return RailOptimised(node, nodes, fabric)
    assert isinstance(fabric, DragonflyFabric)
    return Dragonfly(node, nodes, fabric)


def build_topology(node: Node, nodes: int, network: Network) -> Topology:
    """The topology of `nodes` servers on a network.

    Raises InputError for nodes that do not fit the network or its scale-up part.
    """
    try:
        if network.fabric is None and nodes != 1:
            raise InputError(
                f"nodes={nodes}: a network of kind {SINGLE_NODE!r} joins exactly 1 node; "
                f"name a network such as 'mrft-ib-400g' or 'mpft-ib-400g'"
            )
        if isinstance(network.fabric, EdgeListFabric):
            return EdgeList(node, nodes, network.fabric, network.prices)
        inside = scale_up_part(node, nodes)
        outside = None if network.fabric is None else scale_out_part(node, nodes, network.fabric)
        return ClusterTopology(network.kind, node, nodes, (inside, outside), network.prices)
    except InputError as error:
        raise InputError(f"network {network.name!r}: {error}") from None
