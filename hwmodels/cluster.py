"""A cluster is a number of equal nodes on a network, with a price per GPU hour."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Self

from msgspec import Struct
from pydantic import Field, model_validator

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.errors import InputError, LegalValuesError
from moesim.hwmodels.frozen import Frozen, Section
from moesim.hwmodels.network import Network, NetworkRef, list_networks, load_network
from moesim.hwmodels.node import Node, NodeRef, list_nodes, load_node
from moesim.hwmodels.price import EnergySiteRef, RentPrice, load_fabric_prices
from moesim.hwmodels.provenance import DateText, Kind, Source
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import load_described, parse_mapping, shipped_names

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


# -- networks at full size --------------------------------------------------------------------------
# Compares our counts and costs of full-size networks with the table of arXiv 2505.09343.

PRICES = "ndr-400g"


class PublishedNetwork(Frozen):
    """One column of the table: counts, cost in millions of dollars, and thousands of dollars per endpoint."""

    name: str
    endpoints: int
    switches: int
    links: int
    cost_musd: float
    cost_kusd_per_endpoint: float


class PublishedTable(Frozen):
    """The table with its source (`data/comparisons/isca-2025-table3.yaml`)."""

    title: str
    kind: Kind
    source: Source
    date: DateText
    note: str
    rows: tuple[PublishedNetwork, ...]


class ComparedFigure(Struct, frozen=True):
    """One figure of one network, as published and as counted here."""

    network: str
    figure: str
    published: float
    ours: float

    @property
    def relative_error(self) -> float:
        """(ours - published) / published."""
        return self.ours / self.published - 1


def published_table() -> PublishedTable:
    """The table as printed."""
    name = "isca-2025-table3.yaml"
    text = files("moesim.hwmodels").joinpath("data", "comparisons", name).read_text("utf-8")
    return validate_model(PublishedTable, parse_mapping(text, name), name)


# Network and number of 8-GPU nodes that fill it.
FULL_SIZE = {
    "FT2": ("mrft-ib-400g", 256),
    "MPFT": ("mpft-ib-400g", 2048),
    "FT3": ("ft3-ib-400g", 8192),
    "DF": ("dragonfly-ib-400g", 32704),
}
SLIM_FLY_Q = 28


def slim_fly_counts(q: int) -> tuple[int, int, int]:
    """(endpoints, switches, links) of a slim fly over q, q = 4 w + d with d in -1, 0, 1 (eq. N5).

    2 q^2 switches with (3 q - d) / 2 links to others and half as many endpoints, rounded up
    (arXiv 1912.08968). Raises InputError where q leaves the remainder 2. The graph itself exists only
    where q is a power of a prime. The table's q = 28 is none, so its column follows from this formula and
    describes no network that could be wired.
    """
    if q < 3 or q % 4 == 2:
        raise InputError(f"q={q}: a slim fly needs q = 4 w - 1, 4 w or 4 w + 1, at least 3")
    degree = (3 * q - {0: 0, 1: 1, 3: -1}[q % 4]) // 2
    switches = 2 * q * q
    return switches * -(-degree // 2), switches, switches * degree // 2


def compare_networks() -> list[ComparedFigure]:
    """Every cell of the table, as published and as computed from our topologies and a price list.

    Nothing is fitted to the table; the prices come from another source and do not include NICs.
    """
    prices, cells = load_fabric_prices(PRICES), []
    for row in published_table().rows:
        if row.name == "SF":
            endpoints, switches, links = slim_fly_counts(SLIM_FLY_Q)
        else:
            network, nodes = FULL_SIZE[row.name]
            counted = build_topology(load_node("hgx-h800"), nodes, load_network(network)).inventory()
            endpoints, switches = counted.endpoints, counted.scale_out_switches
            links = counted.inter_switch_links
        # docs/model.md, eq. N1
        cost = switches * prices.switch.value + (endpoints + links) * prices.link.value
        ours = {
            "endpoints": float(endpoints),
            "switches": float(switches),
            "links": float(links),
            "cost_musd": cost / 1e6,
            "cost_kusd_per_endpoint": cost / endpoints / 1e3,
        }
        cells += [
            ComparedFigure(row.name, name, float(getattr(row, name)), value) for name, value in ours.items()
        ]
    return cells
