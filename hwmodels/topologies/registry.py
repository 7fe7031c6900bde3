"""Every kind of topology (a new one is its file and one line here), and what builds that of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.base import Topology
from moesim.hwmodels.topologies.buildings import SeveralBuildings
from moesim.hwmodels.topologies.cluster_topology import ClusterTopology
from moesim.hwmodels.topologies.description import NetworkFigures, NodeFigures
from moesim.hwmodels.topologies.dragonfly import DRAGONFLY
from moesim.hwmodels.topologies.edge_list import EDGE_LIST
from moesim.hwmodels.topologies.fat_tree import FAT_TREE, MULTI_PLANE_FAT_TREE, RAIL_OPTIMISED
from moesim.hwmodels.topologies.part import ScaleOutPart, ScaleOutSpec, ScaleUpSpec
from moesim.hwmodels.topologies.scale_up_parts import (
    FULLY_CONNECTED,
    NVSWITCH,
    SCALE_UP_DOMAIN,
    SINGLE_NODE,
    SUPERNODE,
)
from moesim.hwmodels.topologies.torus import TORUS
from moesim.hwmodels.validation import registry

# -- kinds -----------------------------------------------------------------------------------------

SCALE_UP: Mapping[str, ScaleUpSpec] = registry(
    NVSWITCH,
    SCALE_UP_DOMAIN,
    FULLY_CONNECTED,
    TORUS,
    SUPERNODE,
    key="kind",
)
"""What joins the GPUs of a node, by the `kind` of a scale-up file."""

SCALE_OUT: Mapping[str, ScaleOutSpec] = registry(
    SINGLE_NODE,
    FAT_TREE,
    MULTI_PLANE_FAT_TREE,
    RAIL_OPTIMISED,
    DRAGONFLY,
    EDGE_LIST,
    key="kind",
)
"""What joins the nodes, by the `kind` of a network file."""


# -- building --------------------------------------------------------------------------------------


def build_topology(node: NodeFigures, nodes: int, network: NetworkFigures) -> Topology:
    """The topology of `nodes` servers on a network.

    Raises InputError for nodes that do not fit the network or its scale-up part.
    """
    if network.fabric is not None and network.adapter != node.adapter:
        has = f"NICs of kind {node.adapter}" if node.adapter else "InfiniBand or RoCE NICs"
        joins = network.adapter or "InfiniBand or RoCE"
        raise InputError(f"network {network.name!r} joins {joins} NICs, and node {node.name!r} has {has}")
    try:
        outside = _outside(node, nodes, network)
        if isinstance(outside, Topology):
            built = outside
        else:
            inside = (  # one switch where the node states nothing
                NVSWITCH.build(node, nodes, None)
                if node.scale_up is None
                else SCALE_UP[node.scale_up.kind].build(node, nodes, node.scale_up.fabric)
            )
            built = ClusterTopology(node, nodes, (inside, outside))
    except InputError as error:
        raise InputError(f"network {network.name!r}: {error}") from None
    built.kind, built.prices = network.kind, network.prices
    return built


def _outside(node: NodeFigures, nodes: int, network: NetworkFigures) -> ScaleOutPart | Topology | None:
    """What joins the nodes, in one building or several."""
    build, buildings = SCALE_OUT[network.kind].build, network.buildings
    if buildings is None:
        return build(node, nodes, network.fabric)

    def inside(own: int) -> ScaleOutPart:
        part = build(node, own, network.fabric)
        if not isinstance(part, ScaleOutPart):
            kinds = [kind for kind in SCALE_OUT if kind not in ("single-node", "edge-list")]
            raise InputError(
                f"buildings need a network of switches inside each, and kind {network.kind!r} states none; "
                f"kinds that have: {', '.join(kinds)}"
            )
        return part

    return SeveralBuildings(node, nodes, buildings, inside)
