"""Prices low-latency kernels, which send a copy of a row to every chosen expert's rank without a hop between.

Pure functions of bytes, links and a calibration profile (docs/model.md, eq. X29).
"""

from __future__ import annotations

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.communication import (
    CurveReader,
    EpKernels,
    EpOperation,
    Links,
    fastest_seconds,
    nic_seconds,
    slowed_down,
)
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.layout.routing import LinkBytes


def direct_transfer(
    operation: EpOperation,
    traffic: LinkBytes,
    links: Links,
    profile: CalibrationProfile,
    kernels: EpKernels,
    *,
    nodes: int,
) -> TransferCost:
    """Seconds of a dispatch or combine of low-latency kernels, alone on its links (eq. X29).

    payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate) after the time of a call and one latency
    of the network. No exchange of counts comes before it, and the kernel takes the SMs that it needs. Raises
    InputError where a curve is missing.
    """
    curves = CurveReader(profile, kernels.generation)
    fraction, residual = curves.read(f"ep.{operation}.scale_up_fraction", links.ep_per_node)
    link_rate = fraction * links.wiring.all_to_all(links.ep_per_node) * links.scale_up_bytes_per_s
    nic_s, nic_residual = nic_seconds(f"ep.{operation}.nic_fraction", traffic, links, nodes, curves)
    call_s, call_residual = curves.read(f"ep.{operation}.call_time", kernels.tokens)
    alone = TransferCost(
        launch_s=call_s + (links.nic_latency_s if nodes > 1 else 0.0),
        nic_s=nic_s,
        scale_up_s=traffic.nvlink_bytes / link_rate,
        nic_bytes=traffic.ib_bytes,
        scale_up_bytes=traffic.nvlink_bytes,
        best_s=fastest_seconds(traffic, links),
        worst_s=call_s * call_residual,
    )
    return slowed_down(alone, max(residual, nic_residual), kernels.slow_down, curves)
