"""The kind of network of a cluster of one node, which has none."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.description import NodeFigures
from moesim.hwmodels.topologies.spec import ScaleOutSpec


def no_network(node: NodeFigures, nodes: int, fabric: None) -> None:
    """One node, which nothing joins to another.

    Raises InputError for more of them.
    """
    del node, fabric
    if nodes != 1:
        raise InputError(
            f"nodes={nodes}: a network of kind {SINGLE_NODE.kind!r} joins exactly 1 node; "
            f"name a network such as 'mrft-ib-400g' or 'mpft-ib-400g'"
        )


SINGLE_NODE = ScaleOutSpec("single-node", None, no_network, "single-node")
