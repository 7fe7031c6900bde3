"""A two-level supernode (CloudMatrix384) with switches in every host and a second level above them."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from moesim.hwmodels import ranges
from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedCount, SourcedSeconds
from moesim.hwmodels.topologies.description import NodeFigures, ScaleUpFabric
from moesim.hwmodels.topologies.part import ScaleUpPart, absent_where, columns, link
from moesim.hwmodels.topologies.spec import ScaleUpSpec
from moesim.hwmodels.topologies.wiring import Wiring


class SupernodeFabric(ScaleUpFabric):
    """Hosts of `gpus_per_host` under their own first-level switches, joined by a second level.

    Both levels come in `planes` identical planes that traffic is striped over; every plane has
    `second_level_switches` chips, each wired to every host's first-level chip of that plane, without
    oversubscription (CloudMatrix384).
    """

    kind: Literal["supernode"]
    gpus_per_host: SourcedCount
    planes: SourcedCount
    second_level_switches: SourcedCount
    latency_across_hosts: Annotated[SourcedSeconds, ranges.LATENCY]
    """Latency that the second level adds to that inside a host."""


class Supernode(ScaleUpPart):
    """Pairs inside a host use its first-level switch; pairs across hosts also use one of the second level.

    Traffic is striped over the planes, so a vertex of either level stands for one chip of every plane. A
    plane that fails takes its part of every link.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: SupernodeFabric) -> None:
        """Raises InputError where the GPUs of the node do not divide into hosts."""
        super().__init__(node, nodes)
        self.fabric = fabric
        self.per_host = fabric.gpus_per_host.n
        if self.per_node % self.per_host:
            raise InputError(
                f"gpus_per_host={self.per_host} does not divide the {self.per_node} GPUs "
                f"of node {node.name!r}"
            )
        self.hosts = self.per_node // self.per_host
        self.spines = fabric.second_level_switches.n

    def wire(self, wiring: Wiring) -> None:
        """Add the ports first, then the trunks host by host."""
        planes, hosts = self.fabric.planes.n, self.hosts * self.nodes
        low = wiring.add_vertices(
            "scale-up-l1", hosts, lambda i: f"l1:{i // self.hosts}.{i % self.hosts}", planes
        )
        high = wiring.add_vertices(
            "scale-up-l2",
            self.spines * self.nodes,
            lambda i: f"l2:{i // self.spines}.{i % self.spines}",
            planes,
        )
        gpus = np.arange(self.n_gpus)
        port = self.node.scale_up_bytes_per_s
        self.ports = wiring.add_cables(
            "nvlink",
            gpus,
            low + gpus // self.per_host,
            (self.node.scale_up_achievable_bytes_per_s, port),
            self.node.scale_up_latency_s / 2,
            strands=planes,
        )
        host = np.repeat(np.arange(hosts), self.spines)
        spine = np.tile(np.arange(self.spines), hosts)
        trunk = port * self.per_host / self.spines  # no oversubscription
        self.trunks = wiring.add_cables(
            "scale-up-trunk",
            low + host,
            high + host // self.hosts * self.spines + spine,
            (trunk, trunk),
            self.fabric.latency_across_hosts.value / 2,
            strands=planes,
            optical=True,
        )

    def size(self) -> tuple[int, int]:
        """(switches of both levels, ports and trunks)."""
        hosts = self.hosts * self.nodes
        return hosts + self.spines * self.nodes, self.n_gpus + hosts * self.spines

    def fanout(self, src: IntArray, dst: IntArray) -> IntArray:
        """One path inside a host, one per second-level switch across hosts."""
        return np.where(src // self.per_host == dst // self.per_host, 1, self.spines)

    def preferred(self, src: IntArray, dst: IntArray) -> IntArray:
        """The second-level switch follows from the destination."""
        return dst % self.fanout(src, dst)

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """Links of each path: port, (trunk up, trunk down,) port."""
        here, there = src // self.per_host, dst // self.per_host
        same = here == there
        return columns(
            absent_where(src == dst, link(self.ports + src)),
            absent_where(same, link(self.trunks + here * self.spines + choice)),
            absent_where(same, link(self.trunks + there * self.spines + choice, back=True)),
            absent_where(src == dst, link(self.ports + dst, back=True)),
        )


SUPERNODE = ScaleUpSpec("supernode", SupernodeFabric, Supernode, "cloudmatrix384")
