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
    "Accelerator": "moesim.hwmodels.accelerator",
    "Cluster": "moesim.hwmodels.cluster",
    "Curve": "moesim.hwmodels.calibration_entry",
    "EnergySite": "moesim.hwmodels.price",
    "FailureRate": "moesim.hwmodels.failure",
    "Host": "moesim.hwmodels.host",
    "InfeasibleError": "moesim.hwmodels.errors",
    "InputError": "moesim.hwmodels.errors",
    "Inventory": "moesim.hwmodels.topologies",
    "Link": "moesim.hwmodels.topologies",
    "LinkFault": "moesim.hwmodels.topologies",
    "LinkTable": "moesim.hwmodels.topologies",
    "MoesimError": "moesim.hwmodels.errors",
    "Network": "moesim.hwmodels.network",
    "Node": "moesim.hwmodels.node",
    "PriceList": "moesim.hwmodels.price",
    "ProvenanceRow": "moesim.hwmodels.provenance",
    "Purchase": "moesim.hwmodels.price",
    "Reading": "moesim.hwmodels.calibration_entry",
    "Restart": "moesim.hwmodels.failure",
    "RouteSet": "moesim.hwmodels.topologies",
    "ScaleUp": "moesim.hwmodels.network",
    "Sourced": "moesim.hwmodels.provenance",
    "Storage": "moesim.hwmodels.failure",
    "Topology": "moesim.hwmodels.topologies",
    "build_topology": "moesim.hwmodels.topologies",
    "describe": "moesim.hwmodels.hardware_text",
    "format_quantity": "moesim.hwmodels.units",
    "hardware_rows": "moesim.hwmodels.hardware_text",
    "list_accelerators": "moesim.hwmodels.accelerator",
    "list_clusters": "moesim.hwmodels.cluster",
    "list_energy_sites": "moesim.hwmodels.price",
    "list_failure_rates": "moesim.hwmodels.failure",
    "list_hosts": "moesim.hwmodels.host",
    "list_networks": "moesim.hwmodels.network",
    "list_nodes": "moesim.hwmodels.node",
    "list_prices": "moesim.hwmodels.price",
    "list_purchases": "moesim.hwmodels.price",
    "list_restarts": "moesim.hwmodels.failure",
    "list_scale_ups": "moesim.hwmodels.network",
    "list_storage": "moesim.hwmodels.failure",
    "load_accelerator": "moesim.hwmodels.accelerator",
    "load_cluster": "moesim.hwmodels.cluster",
    "load_energy_site": "moesim.hwmodels.price",
    "load_failure_rate": "moesim.hwmodels.failure",
    "load_host": "moesim.hwmodels.host",
    "load_mapping": "moesim.hwmodels.yaml_io",
    "load_network": "moesim.hwmodels.network",
    "load_node": "moesim.hwmodels.node",
    "load_prices": "moesim.hwmodels.price",
    "load_purchase": "moesim.hwmodels.price",
    "load_restart": "moesim.hwmodels.failure",
    "load_scale_up": "moesim.hwmodels.network",
    "load_storage": "moesim.hwmodels.failure",
    "parse_mapping": "moesim.hwmodels.yaml_io",
    "parse_quantity": "moesim.hwmodels.units",
    "provenance_rows": "moesim.hwmodels.provenance",
    "route_bytes_per_s": "moesim.hwmodels.topologies",
    "route_latency_s": "moesim.hwmodels.topologies",
    "validate_model": "moesim.hwmodels.validation",
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
