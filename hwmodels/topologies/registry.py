"""Every kind of topology: a new one is its file and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.hwmodels.registry import registry
from moesim.hwmodels.topologies.dragonfly import DRAGONFLY
from moesim.hwmodels.topologies.edge_list import EDGE_LIST
from moesim.hwmodels.topologies.fat_tree import FAT_TREE
from moesim.hwmodels.topologies.fully_connected_node import FULLY_CONNECTED
from moesim.hwmodels.topologies.multi_plane_fat_tree import MULTI_PLANE_FAT_TREE
from moesim.hwmodels.topologies.nvswitch_node import NVSWITCH
from moesim.hwmodels.topologies.rail_optimised import RAIL_OPTIMISED
from moesim.hwmodels.topologies.scale_up_domain import SCALE_UP_DOMAIN
from moesim.hwmodels.topologies.single_node import SINGLE_NODE
from moesim.hwmodels.topologies.spec import ScaleOutSpec, ScaleUpSpec
from moesim.hwmodels.topologies.supernode import SUPERNODE
from moesim.hwmodels.topologies.torus import TORUS

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
