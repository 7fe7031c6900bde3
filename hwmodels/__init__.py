"""Hardware descriptions and their data files; nothing here simulates or needs a GPU."""

from __future__ import annotations

from moesim.hwmodels.accelerator import Accelerator, list_accelerators, load_accelerator
from moesim.hwmodels.cluster import Cluster, list_clusters, load_cluster
from moesim.hwmodels.describe import describe, hardware_rows
from moesim.hwmodels.efficiency import Curve, Reading
from moesim.hwmodels.energy import EnergySite, list_energy_sites, load_energy_site
from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
from moesim.hwmodels.failure import (
    FailureRate,
    Restart,
    list_failure_rates,
    list_restarts,
    load_failure_rate,
    load_restart,
)
from moesim.hwmodels.host import Host, list_hosts, load_host
from moesim.hwmodels.network import Network, list_networks, load_network
from moesim.hwmodels.node import Node, list_nodes, load_node
from moesim.hwmodels.price import PriceList, list_prices, load_prices
from moesim.hwmodels.provenance import ProvenanceRow, Sourced, provenance_rows
from moesim.hwmodels.purchase import Purchase, list_purchases, load_purchase
from moesim.hwmodels.scale_up import ScaleUp, list_scale_ups, load_scale_up
from moesim.hwmodels.storage import Storage, list_storage, load_storage
from moesim.hwmodels.topologies import (
    Inventory,
    Link,
    LinkFault,
    LinkTable,
    RouteSet,
    Topology,
    build_topology,
    route_bytes_per_s,
    route_latency_s,
)
from moesim.hwmodels.units import format_quantity, parse_quantity
from moesim.hwmodels.yaml_io import load_mapping, parse_mapping, validate_model

__all__ = [
    "Accelerator",
    "Cluster",
    "Curve",
    "EnergySite",
    "FailureRate",
    "Host",
    "InfeasibleError",
    "InputError",
    "Inventory",
    "Link",
    "LinkFault",
    "LinkTable",
    "MoesimError",
    "Network",
    "Node",
    "PriceList",
    "ProvenanceRow",
    "Purchase",
    "Reading",
    "Restart",
    "RouteSet",
    "ScaleUp",
    "Sourced",
    "Storage",
    "Topology",
    "build_topology",
    "describe",
    "format_quantity",
    "hardware_rows",
    "list_accelerators",
    "list_clusters",
    "list_energy_sites",
    "list_failure_rates",
    "list_hosts",
    "list_networks",
    "list_nodes",
    "list_prices",
    "list_purchases",
    "list_restarts",
    "list_scale_ups",
    "list_storage",
    "load_accelerator",
    "load_cluster",
    "load_energy_site",
    "load_failure_rate",
    "load_host",
    "load_mapping",
    "load_network",
    "load_node",
    "load_prices",
    "load_purchase",
    "load_restart",
    "load_scale_up",
    "load_storage",
    "parse_mapping",
    "parse_quantity",
    "provenance_rows",
    "route_bytes_per_s",
    "route_latency_s",
    "validate_model",
]
