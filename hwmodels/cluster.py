"""A cluster is a number of equal nodes on a network, with a price per GPU hour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.errors import InputError, LegalValuesError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.network import Network, NetworkRef, list_networks, load_network
from moesim.hwmodels.node import Node, NodeRef, list_nodes, load_node
from moesim.hwmodels.price import EnergySiteRef, RentPrice
from moesim.hwmodels.provenance import DateText, Kind, Source
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.hwmodels.yaml_io import load_described, shipped_names

FOLDER = "clusters"


class Cluster(Section):
    """Data of one cluster (`data/clusters/*.yaml`); node, network and energy may be names, paths or data.

    `kind`, `source` and `date` say where the composition comes from; in a scenario they may be left out.
    """

    name: str = "custom"
    """Shown in results."""
    title: str = "custom cluster"
    """Shown to people."""
    node: NodeRef
    """A shipped node, a file, or its description: accelerator, GPUs, NVSwitch, NICs."""
    nodes: Annotated[int, Field(ge=1, strict=True)]
    """How many."""
    network: NetworkRef
    """A shipped network, a file, or its description; `single-node` for one node."""
    price_per_gpu_hour: RentPrice | None = None
    """`"$2/h"`, or with its source and `term`; without it the run has no cost."""
    energy: EnergySiteRef | None = None
    """Electricity of the site."""
    kind: Kind = "assumed"
    """Provenance of the composition."""
    source: Source = "stated by the user"
    """Source of the composition."""
    date: DateText = "undated"
    """Date of the composition."""
    note: str | None = None
    """Free text."""

    @model_validator(mode="after")
    def _nodes_fit_the_network(self) -> Self:
        try:
            self.topology()
        except InputError as error:
            networks = [name for name in list_networks() if _joins(self.node, self.nodes, load_network(name))]
            fewer, most = (
                0,
                self.nodes,
            )  # bisection: the network joins `fewer` nodes (or none), but not `most`
            while most - fewer > 1:
                middle = (fewer + most) // 2
                if _joins(self.node, middle, self.network):
                    fewer = middle
                else:
                    most = middle
            hints = (
                [f"networks that join {self.nodes} of these nodes: {', '.join(networks)}"] if networks else []
            )
            hints += [f"this network joins {fewer} of them"] if fewer else []
            hints += _nodes_of(self.network, self.accelerator.name)
            text = "; ".join([str(error), *hints])
            raise LegalValuesError(text, "nodes", (fewer,) if fewer else ()) from None
        return self

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator of the nodes."""
        return self.node.accelerator

    @property
    def n_gpus(self) -> int:
        """Accelerators in the cluster."""
        return self.nodes * self.node.n_gpus

    @property
    def usd_per_gpu_hour(self) -> float:
        """Price of one GPU for one hour; raises InputError where the cluster states none."""
        if self.price_per_gpu_hour is None:
            raise InputError(
                f"cluster {self.name!r} has no price_per_gpu_hour; state one, for example "
                f'price_per_gpu_hour: "$2/h", to get a cost'
            )
        return self.price_per_gpu_hour.value

    @property
    def nic_bytes_per_s(self) -> float:
        """Nominal scale-out rate of one GPU, set by its NICs or by slower switch ports; 0 for one node."""
        if self.nodes == 1 or self.network.fabric is None:
            return 0.0
        ports = self.network.fabric.link_bandwidth.value * self.node.n_nics_per_gpu
        return min(self.node.scale_out_bytes_per_s, ports)

    def topology(self) -> Topology:
        """Links and routes between the GPUs; GPU g is local GPU g % n of node g // n.

        Raises InputError where the nodes do not fit the network.
        """
        return build_topology(self.node, self.nodes, self.network)


def _joins(node: Node, nodes: int, network: Network) -> bool:
    """Whether a network can join this many nodes."""
    try:
        build_topology(node, nodes, network)
    except InputError:
        return False
    return True


def _nodes_of(network: Network, accelerator: str) -> list[str]:
    """A hint with the shipped nodes of an accelerator whose NICs join a network of an adapter of its own."""
    if network.adapter is None:
        return []
    shipped = [load_node(name) for name in list_nodes()]
    same = [n.name for n in shipped if n.adapter == network.adapter]
    own = [n.name for n in shipped if n.name in same and n.accelerator.name == accelerator]
    return [f"nodes with {network.adapter}: {', '.join(own or same)}"]


def list_clusters() -> tuple[str, ...]:
    """Names of the shipped clusters."""
    return shipped_names(FOLDER)


def load_cluster(name: str, base: Path | None = None) -> Cluster:
    """The cluster of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(Cluster, FOLDER, name, "cluster", base)
