"""Prices transfers on the links of a GPU: what a dedicated engine moves, pipeline sends, exchanges of counts.

Pure functions of bytes, links and a calibration profile; the engine adds contention between transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.price_evidence import PriceEvidence
from moesim.simulator.cost.rate_tables import operator_bytes
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.dispatchers.protocol import LinkBytes, Links, fastest_seconds, notify_seconds
from moesim.simulator.model.operator import Operator

COPY, STATED = "copy.local.sm_rate", "permute/sm_rate"
"""Curve of bytes/s over SMs of a copy inside one GPU, and the use of one that stands in for it."""


def engine_transfer(
    traffic: LinkBytes, links: Links, profile: CalibrationProfile, *, nodes: int
) -> TransferCost:
    """Seconds of a dispatch or combine that a dedicated engine moves without compute units.

    payload = max(NIC bytes / NIC rate, scale-up bytes / scale-up rate). The rates are shares of the nominal
    ones, from the profile's curves engine.ep.* over the number of nodes (docs/model.md, eq. H1). Raises
    InputError where the profile has no such curve.
    """

    def seconds(curve_id: str, moved: float, rate: float) -> tuple[float, float]:
        curve = profile.curve(curve_id)
        return moved / (curve.curve.at(nodes).value * rate), curve.residual.relative

    ids = ["engine.ep.scale_up_fraction"]
    wired = links.wiring.all_to_all(links.ep_per_node) * links.scale_up_bytes_per_s
    scale_up_s, residual = seconds(ids[0], traffic.nvlink_bytes, wired)
    nic_s = 0.0
    if traffic.ib_bytes:
        ids.append("engine.ep.nic_fraction")
        nic_s, nic_residual = seconds(ids[1], traffic.ib_bytes, links.nic_bytes_per_s)
        residual = max(residual, nic_residual)
    return TransferCost(
        launch_s=notify_seconds(links, nodes),
        nic_s=nic_s,
        scale_up_s=scale_up_s,
        nic_bytes=traffic.ib_bytes,
        scale_up_bytes=traffic.nvlink_bytes,
        best_s=fastest_seconds(traffic, links),
        worst_s=max(nic_s, scale_up_s) * (1.0 + residual),
        evidence=PriceEvidence.of(ids),
    )


def send_seconds(
    payload_bytes: float, links: Links, profile: CalibrationProfile, *, across_nodes: bool, shared: int = 1
) -> float:
    """Seconds of one point-to-point send between neighbouring pipeline ranks, alone (eq. X4).

    `shared`: number of the rank's sends that use the same link at the same time, this one included.
    """
    kind, rate, latency = (
        ("nic", links.nic_bytes_per_s, links.nic_latency_s)
        if across_nodes
        else ("scale_up", links.wiring.pair() * links.scale_up_bytes_per_s, links.scale_up_latency_s)
    )
    share = profile.curve(f"{links.curves}p2p.{kind}_fraction").curve.at(payload_bytes).value
    return latency + payload_bytes * shared / (share * rate)


def beside_compute(
    operators: Sequence[Operator],
    costs: Sequence[OperatorCost],
    profile: CalibrationProfile,
    sms: int,
) -> tuple[OperatorCost, ...]:
    """Costs of permutations in an overlapped pair: at least the time that `sms` SMs need for their bytes.

    Persistent GEMMs of the other micro-batch hold all other SMs (eq. C52). The rate of an SM is that of a
    copy inside the GPU, or the one that a profile states for it; without either the kernels keep their cost.
    """
    curve = next((c for c in profile.curves if c.id == COPY or STATED in c.used_for), None)
    if curve is None or not sms:
        return tuple(costs)
    rate, residual = curve.curve.at(sms).value, curve.residual.relative
    return tuple(
        _at_least(cost, operator_bytes(op) / rate, residual, curve.id) if op.cls == "permute" else cost
        for op, cost in zip(operators, costs, strict=True)
    )


def _at_least(cost: OperatorCost, seconds: float, residual: float, entry: str) -> OperatorCost:
    if seconds <= cost.seconds:
        return cost
    return replace(
        cost,
        seconds=seconds,
        residual=residual,
        worst_seconds=max(cost.worst_seconds, seconds * (1.0 + residual)),
        curve_ids=(entry, *cost.curve_ids),
        depends_on=cost.depends_on | {entry},
    )
