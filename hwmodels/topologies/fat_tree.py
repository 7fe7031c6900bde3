"""One two-layer fat-tree for all rails (multi-rail fat-tree, MRFT): a leaf serves one rail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import Fabric
from moesim.hwmodels.node import Node
from moesim.hwmodels.topologies.base import Route, Topology, gpu_name
from moesim.hwmodels.topologies.nvswitch_node import add_nvswitch_nodes, nvlink_route
from moesim.hwmodels.topologies.two_layer import TwoLayer, nic_rates

if TYPE_CHECKING:
    import networkx


class FatTree(Topology):
    """Single plane: GPU i of every server is on rail i, and the rails meet in the spines."""

    kind = "fat-tree"

    def __init__(self, node: Node, nodes: int, fabric: Fabric) -> None:
        """Raises InputError where two layers of these switches have too few ports."""
        super().__init__(node, nodes)
        if fabric.planes.n != 1:
            raise InputError(
                f"planes={fabric.planes.n}: a network of kind {self.kind!r} has 1 plane; "
                f"for more use kind 'multi-plane-fat-tree'"
            )
        self.fabric = fabric
        down = fabric.switch_ports.n // 2
        self.leaves_per_rail = -(-nodes // down)
        self.tree = TwoLayer.for_leaves("", self.leaves_per_rail * self.gpus_per_node, fabric.switch_ports.n)

    def endpoint(self, gpu: int) -> int:
        """Rails fill whole leaves, so a leaf's last ports stay free where nodes are not a multiple."""
        return self.local_of(gpu) * self.leaves_per_rail * self.tree.down_ports + self.node_of(gpu)

    def route(self, src_gpu: int, dst_gpu: int) -> Route:
        """NVLink inside a server; otherwise NIC, leaf, spine unless the leaf is the same, leaf, NIC."""
        self.check_gpu(src_gpu)
        self.check_gpu(dst_gpu)
        if self.node_of(src_gpu) == self.node_of(dst_gpu):
            return nvlink_route(self.node, self.node_of(src_gpu), src_gpu, dst_gpu)
        src, dst = (src_gpu, self.endpoint(src_gpu)), (dst_gpu, self.endpoint(dst_gpu))
        return self.tree.route(self.node, self.fabric, src, dst)

    def graph(self) -> networkx.Graph:
        """Servers with their NVSwitch, leaves and spines."""
        import networkx  # takes 0.2 s to load, and only drawings and checks need it

        graph = networkx.Graph()
        add_nvswitch_nodes(graph, self.node, self.nodes)
        self.tree.add_to(graph, self.fabric)
        payload = nic_rates(self.node, self.fabric)[1]
        for gpu in range(self.n_gpus):
            leaf = f"leaf:{self.tree.leaf_of(self.endpoint(gpu))}"
            graph.add_edge(gpu_name(gpu), leaf, kind="nic", cables=1, bytes_per_s=payload)
        return graph
