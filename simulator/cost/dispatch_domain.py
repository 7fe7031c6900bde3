"""Prices Hybrid-EP's dispatch and combine, which use TMA inside an NVLink domain and RDMA between domains.

Pure functions of bytes, links and a calibration profile (docs/model.md, eq. X23).
"""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.communication import (
    CurveReader,
    EpKernels,
    EpOperation,
    Links,
    fastest_seconds,
    nic_seconds,
    notify_seconds,
    slowed_down,
    sm_rate,
)
from moesim.simulator.cost.library_collectives import ring_price
from moesim.simulator.cost.moved import ROUTING_MAP
from moesim.simulator.cost.price_evidence import PricedSeconds
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.layout.routing import LinkBytes


@dataclass(frozen=True, slots=True)
class DomainGroup:
    """An expert-parallel group over NVLink domains, and what its kernels write."""

    ranks: int
    nodes: int
    wire: str
    """Format of a row on the wire: "fp8" or "bf16"."""
    written_rows: float
    """Rows that a rank writes for one that arrives: more than 1 where the kernel permutes them itself."""
    routing_map_bytes: float = 0.0
    """Bytes of the routing map of one rank, which all ranks gather before a forward dispatch; 0 elsewhere."""


def domain_transfer(
    operation: EpOperation,
    traffic: LinkBytes,
    links: Links,
    profile: CalibrationProfile,
    kernels: EpKernels,
    group: DomainGroup,
) -> TransferCost:
    """Seconds of a dispatch or combine of Hybrid-EP, alone on its links (eq. X23).

    The same SMs move rows inside the domain and hand rows to the NICs. A forward dispatch first gathers the
    routing map of all ranks and scans it. Raises InputError where a curve is missing, and for 0 SMs.
    """
    curves = CurveReader(profile, kernels.generation)
    local = group.ranks // group.nodes
    sm_s, sm_residual = _sm_seconds(operation, traffic, kernels, group, curves)
    fraction, link_residual = curves.read(f"ep.{operation}.scale_up_fraction", local)
    link_rate = fraction * links.wiring.all_to_all(links.ep_per_node) * links.scale_up_bytes_per_s
    scale_up_s = max(sm_s, traffic.nvlink_bytes / link_rate)
    nic_s, nic_residual = nic_seconds("ep.nic_fraction", traffic, links, group.nodes, curves)
    call_s, call_residual = curves.read(f"ep.{operation}.call_time", group.ranks)
    prepared = _prepared(group, local, links, profile)
    alone = TransferCost(
        launch_s=notify_seconds(links, group.nodes) + call_s + prepared.seconds,
        nic_s=nic_s,
        scale_up_s=scale_up_s,
        nic_bytes=traffic.ib_bytes,
        scale_up_bytes=traffic.nvlink_bytes,
        best_s=fastest_seconds(traffic, links),
        worst_s=call_s * call_residual,
        evidence=prepared.evidence,
        moved_before=(prepared.moved(ROUTING_MAP),) if group.routing_map_bytes else (),
    )
    residual = max(sm_residual, link_residual, nic_residual)
    return slowed_down(alone, residual, kernels.slow_down, curves)


def _sm_seconds(
    operation: EpOperation,
    traffic: LinkBytes,
    kernels: EpKernels,
    group: DomainGroup,
    curves: CurveReader,
) -> tuple[float, float]:
    """Seconds for which the SMs move the rows of both hops, and its relative error."""
    rate, residual = sm_rate(operation, kernels.sms, curves)
    rows = traffic.logical_nvlink_bytes / kernels.row_bytes * group.written_rows
    name = f"ep.{operation}.row_time"
    if curves.has(f"{name}.{group.wire}"):
        name = f"{name}.{group.wire}"
    row_s, row_residual = curves.read(name, group.ranks // group.nodes)
    seconds = rows * (kernels.row_bytes / rate + row_s / kernels.sms)
    if traffic.ib_bytes and curves.has(f"ep.{operation}.nic_sm_rate"):
        nic_row_s, _ = curves.read(f"ep.{operation}.nic_row_time", group.nodes)
        nic_rate, _ = curves.read(f"ep.{operation}.nic_sm_rate", kernels.sms)
        sent = traffic.ib_bytes / kernels.row_bytes
        seconds += sent * nic_row_s / kernels.sms + traffic.ib_bytes / nic_rate
    return seconds, max(residual, row_residual)


def _prepared(group: DomainGroup, local: int, links: Links, profile: CalibrationProfile) -> PricedSeconds:
    """Gather of the routing map of all ranks; its scan is one of the block's operators."""
    if not group.routing_map_bytes:
        return PricedSeconds()
    return ring_price("all_gather", group.routing_map_bytes * group.ranks, group.ranks, local, links, profile)
