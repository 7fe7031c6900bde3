"""Separate two-layer fat-trees side by side (multi-plane fat-tree, MPFT): one NIC of a server in each."""

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


class MultiPlaneFatTree(Topology):
    """Planes are not joined by any switch (arXiv 2505.09343, section 5.1).

    Traffic to a GPU on another plane is first forwarded inside the sender's server, over NVLink, to the
    GPU whose NIC is on the receiver's plane. A transport that forwards at the receiver instead (DeepEP)
    asks for the two routes one after the other.
    """

    kind = "multi-plane-fat-tree"

    def __init__(self, node: Node, nodes: int, fabric: Fabric) -> None:
        """Raises InputError where planes do not divide a server's GPUs or switches have too few ports."""
        super().__init__(node, nodes)
        self.fabric = fabric
        self.planes = fabric.planes.n
        if self.gpus_per_node % self.planes:
            legal = [p for p in range(1, self.gpus_per_node + 1) if self.gpus_per_node % p == 0]
            raise InputError(
                f"planes={self.planes} does not divide the {self.gpus_per_node} GPUs of node {node.name!r}; "
                f"legal: {', '.join(map(str, legal))}"
            )
        self.endpoints_per_plane = self.n_gpus // self.planes
        down = fabric.switch_ports.n // 2
        leaves = -(-self.endpoints_per_plane // down)
        self.trees = tuple(
            TwoLayer.for_leaves(f"plane{plane}.", leaves, fabric.switch_ports.n)
            for plane in range(self.planes)
        )

    def plane_of(self, gpu: int) -> int:
        """The plane of a GPU's NIC."""
        return self.local_of(gpu) % self.planes

    def endpoint(self, gpu: int) -> int:
        """The GPU's number among the endpoints of its plane, server by server."""
        per_node = self.gpus_per_node // self.planes
        return self.node_of(gpu) * per_node + self.local_of(gpu) // self.planes

    def route(self, src_gpu: int, dst_gpu: int) -> Route:
        """NVLink in a server; otherwise (NVLink to the receiver's plane,) NIC, leaf, (spine, leaf,) NIC."""
        self.check_gpu(src_gpu)
        self.check_gpu(dst_gpu)
        server = self.node_of(src_gpu)
        if server == self.node_of(dst_gpu):
            return nvlink_route(self.node, server, src_gpu, dst_gpu)
        plane = self.plane_of(dst_gpu)
        sender = src_gpu
        if self.plane_of(src_gpu) != plane:
            sender = server * self.gpus_per_node + self.local_of(dst_gpu)
        forward = nvlink_route(self.node, server, src_gpu, sender)
        src, dst = (sender, self.endpoint(sender)), (dst_gpu, self.endpoint(dst_gpu))
        return forward + self.trees[plane].route(self.node, self.fabric, src, dst)

    def graph(self) -> networkx.Graph:
        """Servers with their NVSwitch, and the leaves and spines of every plane."""
        import networkx  # takes 0.2 s to load, and only drawings and checks need it

        graph = networkx.Graph()
        add_nvswitch_nodes(graph, self.node, self.nodes)
        for tree in self.trees:
            tree.add_to(graph, self.fabric)
        payload = nic_rates(self.node, self.fabric)[1]
        for gpu in range(self.n_gpus):
            tree = self.trees[self.plane_of(gpu)]
            leaf = f"{tree.prefix}leaf:{tree.leaf_of(self.endpoint(gpu))}"
            graph.add_edge(gpu_name(gpu), leaf, kind="nic", cables=1, bytes_per_s=payload)
        return graph
