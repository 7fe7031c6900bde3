"""Leaves and spines of one two-layer fat-tree: how many there are, and which a packet takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import Fabric
from moesim.hwmodels.node import Node
from moesim.hwmodels.topologies.base import Link, LinkKind, Route, gpu_name

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class TwoLayer:
    """One fat-tree of `leaves` leaf switches; endpoint e sits on leaf e // (ports / 2).

    The spines are the fewest that take every uplink without oversubscription and divide a leaf's
    uplinks evenly; each leaf has `bundle` parallel cables to each spine. A full tree of P-port switches
    has P leaves, P/2 spines and P^2/2 endpoints (arXiv 2505.09343, Table 3: 2,048 for P = 64).
    """

    prefix: str
    leaves: int
    spines: int
    bundle: int
    down_ports: int

    @classmethod
    def for_leaves(cls, prefix: str, leaves: int, switch_ports: int) -> TwoLayer:
        """The smallest non-blocking tree with this many leaves.

        Raises InputError above `switch_ports` leaves: a third layer would be needed.
        """
        if leaves > switch_ports:
            raise InputError(
                f"a two-layer fat-tree of {switch_ports}-port switches has at most {switch_ports} leaves "
                f"({switch_ports**2 // 2} endpoints), but {leaves} are needed: use fewer nodes, "
                f"a network with more planes, or switches with more ports"
            )
        uplinks = switch_ports // 2
        if leaves == 1:
            return cls(prefix, 1, 0, 0, uplinks)
        bundle = max(b for b in range(1, uplinks + 1) if uplinks % b == 0 and leaves * b <= switch_ports)
        return cls(prefix, leaves, uplinks // bundle, bundle, uplinks)

    def leaf_of(self, endpoint: int) -> int:
        """The leaf of an endpoint."""
        return endpoint // self.down_ports

    def switch_names(self) -> tuple[list[str], list[str]]:
        """Names of the leaves and of the spines."""
        leaves = [f"{self.prefix}leaf:{i}" for i in range(self.leaves)]
        return leaves, [f"{self.prefix}spine:{i}" for i in range(self.spines)]

    def route(self, node: Node, fabric: Fabric, src: tuple[int, int], dst: tuple[int, int]) -> Route:
        """Links between two (gpu, endpoint) pairs: NIC, leaf, spine where the leaves differ, leaf, NIC.

        The spine and the cable follow from the destination (destination-modulo routing, as InfiniBand
        subnet managers do on fat-trees), so shifts of all ranks by a constant do not collide.
        """
        (src_gpu, src_end), (dst_gpu, dst_end) = src, dst
        up_leaf, down_leaf = (f"{self.prefix}leaf:{self.leaf_of(e)}" for e in (src_end, dst_end))
        first = self._nic(node, fabric, gpu_name(src_gpu), up_leaf)
        last = self._nic(node, fabric, down_leaf, gpu_name(dst_gpu))
        if up_leaf == down_leaf:
            return (first, last)
        spine = f"{self.prefix}spine:{dst_end % self.spines}"
        cable = (dst_end // self.spines) % self.bundle
        extra_s = (fabric.latency_cross_leaf.value - fabric.latency_same_leaf.value) / 2
        # Between switches the line rate holds; what a NIC cannot fill is lost at the NIC links already.
        rate = fabric.link_bandwidth.value
        middle = (
            _link("leaf-spine", up_leaf, spine, (rate, rate), extra_s, cable),
            _link("leaf-spine", spine, down_leaf, (rate, rate), extra_s, cable),
        )
        return (first, *middle, last)

    def _nic(self, node: Node, fabric: Fabric, tail: str, head: str) -> Link:
        nominal, payload = nic_rates(node, fabric)
        return _link("nic", tail, head, (payload, nominal), fabric.latency_same_leaf.value / 2)

    def add_to(self, graph: networkx.Graph, fabric: Fabric) -> None:
        """The switches and the cables between them."""
        leaves, spines = self.switch_names()
        graph.add_nodes_from(leaves, kind="leaf")
        graph.add_nodes_from(spines, kind="spine")
        for leaf in leaves:
            for spine in spines:
                graph.add_edge(
                    leaf,
                    spine,
                    kind="leaf-spine",
                    cables=self.bundle,
                    bytes_per_s=fabric.link_bandwidth.value,
                )


def nic_rates(node: Node, fabric: Fabric) -> tuple[float, float]:
    """(nominal, payload) bandwidth of a GPU's NICs on this fabric: the slower of NIC and switch port."""
    ports = fabric.link_bandwidth.value * node.nics_per_gpu.n
    return min(node.scale_out_bytes_per_s, ports), min(node.scale_out_effective_bytes_per_s, ports)


def _link(
    kind: LinkKind,
    tail: str,
    head: str,
    rates: tuple[float, float],
    latency_s: float,
    cable: int | None = None,
) -> Link:
    suffix = "" if cable is None else f"#{cable}"
    return Link(f"{tail}->{head}{suffix}", kind, tail, head, rates[0], rates[1], latency_s)
