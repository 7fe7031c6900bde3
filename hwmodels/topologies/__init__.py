"""Network topologies, one file for each kind; `registry.py` lists them."""

from __future__ import annotations

from moesim.hwmodels.topologies.base import Topology
from moesim.hwmodels.topologies.description import NetworkTier
from moesim.hwmodels.topologies.faults import LinkFault
from moesim.hwmodels.topologies.registry import build_topology
from moesim.hwmodels.topologies.tables import (
    Link,
    LinkTable,
    Route,
    RouteSet,
    Spreading,
    route_bytes_per_s,
    route_latency_s,
)
from moesim.hwmodels.topologies.wiring import Inventory, gpu_name

__all__ = [
    "Inventory",
    "Link",
    "LinkFault",
    "LinkTable",
    "NetworkTier",
    "Route",
    "RouteSet",
    "Spreading",
    "Topology",
    "build_topology",
    "gpu_name",
    "route_bytes_per_s",
    "route_latency_s",
]
