"""Hardware descriptions and their data files; nothing here simulates or needs a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesim.hwmodels.accelerator import Accelerator, list_accelerators, load_accelerator
    from moesim.hwmodels.calibration_entry import Curve, Reading
    from moesim.hwmodels.cluster import Cluster, list_clusters, load_cluster
    from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
    from moesim.hwmodels.failure import (
        FailureRate,
        Restart,
        Storage,
        list_failure_rates,
        list_restarts,
        list_storage,
        load_failure_rate,
        load_restart,
        load_storage,
    )
    from moesim.hwmodels.hardware_text import describe, hardware_rows
    from moesim.hwmodels.host import Host, list_hosts, load_host
    from moesim.hwmodels.network import (
        Network,
        ScaleUp,
        list_networks,
        list_scale_ups,
        load_network,
        load_scale_up,
    )
    from moesim.hwmodels.node import Node, list_nodes, load_node
    from moesim.hwmodels.price import (
        EnergySite,
        PriceList,
        Purchase,
        list_energy_sites,
        list_prices,
        list_purchases,
        load_energy_site,
        load_prices,
        load_purchase,
    )
    from moesim.hwmodels.provenance import ProvenanceRow, Sourced, provenance_rows
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
    from moesim.hwmodels.validation import validate_model
    from moesim.hwmodels.yaml_io import load_mapping, parse_mapping

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

_MODULES = {
    name: f"moesim.hwmodels.{module}"
    for module, names in {
        "accelerator": "Accelerator list_accelerators load_accelerator",
        "calibration_entry": "Curve Reading",
        "cluster": "Cluster list_clusters load_cluster",
        "errors": "InfeasibleError InputError MoesimError",
        "failure": (
            "FailureRate Restart Storage list_failure_rates list_restarts list_storage load_failure_rate "
            "load_restart load_storage"
        ),
        "hardware_text": "describe hardware_rows",
        "host": "Host list_hosts load_host",
        "network": "Network ScaleUp list_networks list_scale_ups load_network load_scale_up",
        "node": "Node list_nodes load_node",
        "price": (
            "EnergySite PriceList Purchase list_energy_sites list_prices list_purchases load_energy_site "
            "load_prices load_purchase"
        ),
        "provenance": "ProvenanceRow Sourced provenance_rows",
        "topologies": (
            "Inventory Link LinkFault LinkTable RouteSet Topology build_topology route_bytes_per_s "
            "route_latency_s"
        ),
        "units": "format_quantity parse_quantity",
        "validation": "validate_model",
        "yaml_io": "load_mapping parse_mapping",
    }.items()
    for name in names.split()
}
"""Modules of the public names, which are loaded when first used, so that a command that reads no hardware
imports neither pydantic nor NumPy."""


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Every public name, also those that are not loaded yet, so that completion offers them."""
    return sorted({*globals(), *__all__})
