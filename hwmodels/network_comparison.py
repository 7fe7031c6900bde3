"""Compares our counts and costs of full-size networks with the table of arXiv 2505.09343."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.price import load_fabric_prices
from moesim.hwmodels.provenance import DateText, Kind, Source
from moesim.hwmodels.topologies import build_topology
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping

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


@dataclass(frozen=True, slots=True)
class ComparedFigure:
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
