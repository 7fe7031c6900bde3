"""Builds the topology of a cluster from its node and its network."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.base import Topology
from moesim.hwmodels.topologies.cluster_topology import ClusterTopology
from moesim.hwmodels.topologies.description import NetworkFigures, NodeFigures
from moesim.hwmodels.topologies.nvswitch_node import NVSWITCH
from moesim.hwmodels.topologies.part import ScaleUpPart
from moesim.hwmodels.topologies.registry import SCALE_OUT, SCALE_UP


def scale_up_part(node: NodeFigures, nodes: int) -> ScaleUpPart:
    """The scale-up part of every node, by the kind of its `scale_up`; one switch where it has none.

    Raises InputError where the description does not fit the node.
    """
    if node.scale_up is None:
        return NVSWITCH.build(node, nodes, None)
    return SCALE_UP[node.scale_up.kind].build(node, nodes, node.scale_up.fabric)


def build_topology(node: NodeFigures, nodes: int, network: NetworkFigures) -> Topology:
    """The topology of `nodes` servers on a network.

    Raises InputError for nodes that do not fit the network or its scale-up part.
    """
    try:
        outside = SCALE_OUT[network.kind].build(node, nodes, network.fabric)
        if isinstance(outside, Topology):
            built = outside
        else:
            built = ClusterTopology(node, nodes, (scale_up_part(node, nodes), outside))
    except InputError as error:
        raise InputError(f"network {network.name!r}: {error}") from None
    built.kind, built.prices = network.kind, network.prices
    return built
