"""Servers whose GPUs share one non-blocking switch; alone, the network of a single server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import SINGLE_NODE
from moesim.hwmodels.node import Node
from moesim.hwmodels.topologies.base import Link, Route, Topology, gpu_name

if TYPE_CHECKING:
    import networkx


def nvlink_route(node: Node, node_index: int, src_gpu: int, dst_gpu: int) -> Route:
    """GPU, switch, GPU inside one server; the physical NVSwitch chips count as one non-blocking switch."""
    if src_gpu == dst_gpu:
        return ()
    hub = f"nvswitch:{node_index}"
    return tuple(
        Link(
            id=f"{tail}->{head}",
            kind="nvlink",
            tail=tail,
            head=head,
            bytes_per_s=node.scale_up_achievable_bytes_per_s,
            nominal_bytes_per_s=node.scale_up_bytes_per_s,
            latency_s=node.scale_up_latency_s / 2,
        )
        for tail, head in ((gpu_name(src_gpu), hub), (hub, gpu_name(dst_gpu)))
    )


def add_nvswitch_nodes(graph: networkx.Graph, node: Node, nodes: int) -> None:
    """The inside of every server: a switch and one edge to each GPU."""
    for index in range(nodes):
        graph.add_node(f"nvswitch:{index}", kind="nvswitch")
        for local in range(node.n_gpus):
            gpu = gpu_name(index * node.n_gpus + local)
            graph.add_node(gpu, kind="gpu")
            graph.add_edge(
                gpu,
                f"nvswitch:{index}",
                kind="nvlink",
                cables=1,
                bytes_per_s=node.scale_up_achievable_bytes_per_s,
            )


class NvswitchNode(Topology):
    """One server and nothing else."""

    kind = SINGLE_NODE

    def __init__(self, node: Node, nodes: int) -> None:
        """Raises InputError for more than one server."""
        if nodes != 1:
            raise InputError(
                f"nodes={nodes}: a network of kind {SINGLE_NODE!r} joins exactly 1 node; "
                f"name a network such as 'mrft-ib-400g' or 'mpft-ib-400g'"
            )
        super().__init__(node, nodes)

    def graph(self) -> networkx.Graph:
        """A star: the switch and its GPUs."""
        import networkx  # takes 0.2 s to load, and only drawings and checks need it

        graph = networkx.Graph()
        add_nvswitch_nodes(graph, self.node, 1)
        return graph

    def route(self, src_gpu: int, dst_gpu: int) -> Route:
        """Two NVLink links."""
        self.check_gpu(src_gpu)
        self.check_gpu(dst_gpu)
        return nvlink_route(self.node, 0, src_gpu, dst_gpu)
