"""Topologies by name: one file each, registered here."""

from __future__ import annotations

from collections.abc import Callable

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import Fabric, Network
from moesim.hwmodels.node import Node
from moesim.hwmodels.topologies.base import (
    Link,
    LinkKind,
    Route,
    Topology,
    gpu_name,
    route_bytes_per_s,
    route_latency_s,
)
from moesim.hwmodels.topologies.fat_tree import FatTree
from moesim.hwmodels.topologies.multi_plane_fat_tree import MultiPlaneFatTree
from moesim.hwmodels.topologies.nvswitch_node import NvswitchNode
from moesim.hwmodels.validation import nearest

__all__ = [
    "TOPOLOGIES",
    "Link",
    "LinkKind",
    "Route",
    "Topology",
    "build_topology",
    "gpu_name",
    "route_bytes_per_s",
    "route_latency_s",
]

TOPOLOGIES: dict[str, Callable[[Node, int, Fabric], Topology]] = {
    FatTree.kind: FatTree,
    MultiPlaneFatTree.kind: MultiPlaneFatTree,
}
"""Networks with a fabric, by the `kind` of their file; a single node has none."""


def build_topology(node: Node, nodes: int, network: Network) -> Topology:
    """The topology of `nodes` servers on a network.

    Raises InputError for an unknown kind of network and for nodes that do not fit it.
    """
    try:
        if network.fabric is None:
            return NvswitchNode(node, nodes)
        if network.kind in TOPOLOGIES:
            return TOPOLOGIES[network.kind](node, nodes, network.fabric)
    except InputError as error:
        raise InputError(f"network {network.name!r}: {error}") from None
    legal = sorted([*TOPOLOGIES, NvswitchNode.kind])
    raise InputError(
        f"network {network.name!r}: unknown kind {network.kind!r}{nearest(network.kind, legal)}; "
        f"the known ones are {', '.join(legal)}"
    )
