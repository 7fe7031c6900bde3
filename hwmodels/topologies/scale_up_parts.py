"""Scale-up parts: one GPU, GPUs that are fully connected or share switches, domains and supernodes."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from moesim.hwmodels import ranges
from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedCount, SourcedSeconds
from moesim.hwmodels.topologies.description import NodeFigures, ScaleUpFabric, ScaleUpShares
from moesim.hwmodels.topologies.part import (
    ScaleOutSpec,
    ScaleUpPart,
    ScaleUpSpec,
    absent_where,
    columns,
    link,
)
from moesim.hwmodels.topologies.wiring import Wiring

# -- one GPU a node --------------------------------------------------------------------------------


def no_network(node: NodeFigures, nodes: int, fabric: None) -> None:
    """One node, which nothing joins to another.

    Raises InputError for more of them.
    """
    if nodes != 1:
        raise InputError(
            f"nodes={nodes}: a network of kind {SINGLE_NODE.kind!r} joins exactly 1 node; "
            f"name a network such as 'mrft-ib-400g' or 'mpft-ib-400g'"
        )


SINGLE_NODE = ScaleOutSpec("single-node", None, no_network, "single-node")


# -- fully connected -------------------------------------------------------------------------------


class MeshFabric(ScaleUpFabric):
    """Every pair of GPUs has a link of its own (MI300X). Bandwidths are of one pair and direction."""

    kind: Literal["fully-connected"]
    link_bandwidth: SourcedBytesPerSecond
    link_bandwidth_effective: SourcedBytesPerSecond

    def shares(self, node: NodeFigures) -> ScaleUpShares:
        """Shares of the links to the other members of a group."""
        return MeshShares(self.link_bandwidth.value / node.scale_up_bytes_per_s, node.n_gpus)


class MeshShares(ScaleUpShares, frozen=True):
    """Shares in a node of `gpus` with a link for each pair; `link` is a link's nominal rate over a GPU's."""

    link: float
    gpus: int

    def all_to_all(self, group: int) -> float:
        """Share of a uniform all-to-all of `group` GPUs, which uses the links to the other members."""
        if group <= 1:
            return 1.0
        # The links of a part of a node do not add up to the whole rate of a GPU.
        return min(1.0, (group - 1) * min(self.link, 1.0 / (self.gpus - 1)))

    def pair(self) -> float:
        """Share of two neighbours, which is one link."""
        return self.link

    def ring(self, group: int) -> float:
        """Share of a reduce-scatter or all-gather, with rings over all links between the members."""
        return self.all_to_all(group)


class FullyConnectedNode(ScaleUpPart):
    """Each pair uses its own link or, where that is down, two links over a third GPU."""

    def __init__(self, node: NodeFigures, nodes: int, fabric: MeshFabric) -> None:
        """Takes the node and the figures of one pair."""
        super().__init__(node, nodes)
        self.fabric = fabric
        self.pairs = self.per_node * (self.per_node - 1) // 2

    def wire(self, wiring: Wiring) -> None:
        """Add a cable for every pair i < j of every node, ordered by i, then j."""
        i, j = np.triu_indices(self.per_node, 1)
        node = np.repeat(np.arange(self.nodes), self.pairs) * self.per_node
        rates = (self.fabric.link_bandwidth_effective.value, self.fabric.link_bandwidth.value)
        self.first = wiring.add_cables(
            "mesh",
            node + np.tile(i, self.nodes),
            node + np.tile(j, self.nodes),
            rates,
            self.node.scale_up_latency_s,
        )

    def size(self) -> tuple[int, int]:
        """(0, cables), one cable per pair."""
        return 0, self.nodes * self.pairs

    def _direct(self, src: IntArray, dst: IntArray) -> IntArray:
        n = self.per_node
        i, j = np.minimum(src % n, dst % n), np.maximum(src % n, dst % n)
        pair = i * (2 * n - i - 1) // 2 + j - i - 1
        cable = self.first + src // n * self.pairs + pair
        return absent_where(src == dst, np.where(src > dst, link(cable, back=True), link(cable)))

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """[n, 1] the link of each pair."""
        return columns(self._direct(src, dst))

    def detours(self) -> int:
        """One detour per GPU of the node; those over the pair's own two GPUs bring no new path."""
        return self.per_node

    def detour_paths(self, src: IntArray, dst: IntArray, number: int) -> IntArray:
        """Paths over a third GPU; each pair starts with a different one."""
        n = self.per_node
        via = src // n * n + (src + dst + number) % n
        return columns(self._direct(src, via), self._direct(via, dst))


FULLY_CONNECTED = ScaleUpSpec("fully-connected", MeshFabric, FullyConnectedNode, "mi300x-mesh")


# -- switched --------------------------------------------------------------------------------------


class HubFabric(ScaleUpFabric):
    """Every GPU has `links_per_gpu` links, spread over `switches` chips."""

    switches: SourcedCount
    links_per_gpu: SourcedCount


class NvswitchFabric(HubFabric):
    """One server (HGX)."""

    kind: Literal["nvswitch"]


class NvswitchNode(ScaleUpPart):
    """GPUs behind one non-blocking switch; a port is one link out of the GPU and one into it.

    The switch chips count as one switch, since every GPU stripes its traffic over all of them. A chip that
    fails takes its part of every port.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: HubFabric | None = None) -> None:
        """Raises InputError where a GPU has fewer links than there are chips."""
        super().__init__(node, nodes)
        self.chips = 1 if fabric is None else fabric.switches.n
        self.strands = 1 if fabric is None else fabric.links_per_gpu.n
        if self.strands < self.chips:
            raise InputError(
                f"links_per_gpu={self.strands} is fewer than switches={self.chips}: "
                f"every GPU needs a link to every chip"
            )

    def wire(self, wiring: Wiring) -> None:
        """Add one switch per node and one cable per GPU."""
        hub = wiring.add_vertices("nvswitch", self.nodes, lambda i: f"nvswitch:{i}", chips=self.chips)
        gpus = np.arange(self.n_gpus)
        self.first = wiring.add_cables(
            "nvlink",
            gpus,
            hub + gpus // self.per_node,
            (self.node.scale_up_achievable_bytes_per_s, self.node.scale_up_bytes_per_s),
            self.node.scale_up_latency_s / 2,
            strands=self.strands,
        )

    def size(self) -> tuple[int, int]:
        """(switches, cables): one switch per node and one cable per GPU."""
        return self.nodes, self.n_gpus

    def paths(self, src: IntArray, dst: IntArray, choice: IntArray) -> IntArray:
        """[n, 2] the link out of the sender's port and the one into the receiver's."""
        itself = src == dst
        return columns(
            absent_where(itself, link(self.first + src)),
            absent_where(itself, link(self.first + dst, back=True)),
        )


NVSWITCH = ScaleUpSpec("nvswitch", NvswitchFabric, NvswitchNode, "hgx-hopper")


# -- domains ---------------------------------------------------------------------------------------


class DomainFabric(HubFabric):
    """Several servers of `gpus_per_host` GPUs that share the switch chips (NVL72)."""

    kind: Literal["scale-up-domain"]
    gpus_per_host: SourcedCount


class ScaleUpDomain(NvswitchNode):
    """An NVSwitch node whose `gpus` are those of all hosts in the domain.

    Ranks and placement treat the domain as one node, with its GPUs numbered host by host.
    """

    def __init__(self, node: NodeFigures, nodes: int, fabric: DomainFabric) -> None:
        """Raises InputError where the GPUs do not divide into hosts or a GPU's links over the chips."""
        super().__init__(node, nodes, fabric)
        per_host = fabric.gpus_per_host.n
        if per_host < 1 or self.per_node % per_host:
            raise InputError(
                f"gpus_per_host={per_host} does not divide the {self.per_node} GPUs of node {node.name!r}"
            )
        if self.strands % self.chips:
            raise InputError(
                f"links_per_gpu={self.strands} is no multiple of switches={self.chips}: "
                f"chips of a domain carry equal parts"
            )
        self.hosts = self.per_node // per_host


SCALE_UP_DOMAIN = ScaleUpSpec("scale-up-domain", DomainFabric, ScaleUpDomain, "nvl72")


# -- supernodes ------------------------------------------------------------------------------------


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
