"""Seconds of transfers: expert-parallel dispatch and combine, pipeline sends, data-parallel collectives.

Pure functions of bytes, links and a calibration profile; contention between transfers is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.routing import LinkBytes

EpOperation = Literal["dispatch", "combine"]

NOTIFY_ROUNDS = 2
"""Counts, then a barrier: two latency-bound exchanges before every payload (DeepEP notify_dispatch)."""


@dataclass(frozen=True, slots=True)
class Links:
    """Nominal rates per GPU and direction, and one-way latencies, of the links that a transfer may use.

    `nic_bytes_per_s` is 0 where the node has no network (a single node).
    """

    scale_up_bytes_per_s: float
    scale_up_latency_s: float
    nic_bytes_per_s: float
    nic_latency_s: float
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Alone on its links: launch (barrier latency) and payload by the resource that limits it.

    `best_s`/`worst_s`: payload at nominal link rates / with every residual and slow-down against it.
    """

    launch_s: float
    nic_s: float
    scale_up_s: float
    best_s: float
    worst_s: float
    curve_ids: tuple[str, ...]
    extrapolations: tuple[str, ...] = ()

    @property
    def payload_s(self) -> float:
        """The slower of the two paths: both run at the same time, chunk by chunk."""
        return max(self.nic_s, self.scale_up_s)


def ep_transfer(
    operation: EpOperation,
    traffic: LinkBytes,
    links: Links,
    profile: CalibrationProfile,
    *,
    sms: int,
    nodes: int,
    kernels: str,
    slowdown: float = 1.0,
    slowdown_residual: float = 0.0,
) -> TransferTime:
    """Seconds of a dispatch or combine with `sms` communication SMs, alone on its links.

    payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate, rows / SM rate) * `slowdown`; the rates
    come from the profile's curves, the rows count the own rank's (docs/model.md, eq. X2). `slowdown` >= 1
    is what compute beside it costs, `kernels` the generation of the NIC curve and, where the profile has
    them, of the others. Raises InputError without such a curve, and without SMs where the generation needs
    some (its SM curve does not begin at 0).
    """
    rate = of_generation(profile, f"ep.{operation}.sm_rate", kernels)
    if sms < 1 and rate.curve.xs[0] > 0.0:
        raise InputError(
            f"communication.sms={sms}: expert-parallel kernels need at least 1 communication SM "
            "(DeepEP uses 20 to 24); set communication.sms, or parallel.ep=1"
        )
    used: list[str] = []
    notes: list[str] = []

    def read(curve_id: str, x: float) -> tuple[float, float]:
        curve = of_generation(profile, curve_id, kernels)
        reading = curve.curve.at(x)
        used.append(curve.id)
        if reading.extrapolated:
            notes.append(reading.note)
        return reading.value, curve.residual.relative

    sm_rate, sm_residual = read(f"ep.{operation}.sm_rate", sms)
    # Below 20 SMs the SM curve is the limit; the link share was measured with enough SMs.
    fraction, link_residual = read(f"ep.{operation}.scale_up_fraction", max(20, sms))
    link_rate = fraction * links.scale_up_bytes_per_s
    scale_up_s = max(traffic.logical_nvlink_bytes / sm_rate, traffic.nvlink_bytes / link_rate)
    nic_s = best_nic = nic_residual = 0.0
    if traffic.ib_bytes:
        share, nic_residual = read(f"ep.nic_fraction.{kernels}", nodes)
        nic_s = traffic.ib_bytes / (share * links.nic_bytes_per_s)
        best_nic = traffic.ib_bytes / links.nic_bytes_per_s
    best = max(best_nic, traffic.nvlink_bytes / links.scale_up_bytes_per_s)
    residual = max(sm_residual, link_residual, nic_residual) + slowdown_residual
    return TransferTime(
        launch_s=notify_seconds(links, nodes),
        nic_s=nic_s * slowdown,
        scale_up_s=scale_up_s * slowdown,
        best_s=best,
        worst_s=max(nic_s, scale_up_s) * slowdown * (1.0 + residual),
        curve_ids=tuple(used),
        extrapolations=tuple(notes),
    )


def of_generation(profile: CalibrationProfile, curve_id: str, kernels: str) -> MeasuredCurve:
    """The curve `<curve_id>.<kernels>` where the profile has it, else `curve_id`; InputError without both."""
    own = f"{curve_id}.{kernels}"
    return profile.curve(own if any(entry.id == own for entry in profile.curves) else curve_id)


def notify_seconds(links: Links, nodes: int) -> float:
    """Latency of the notify kernel once every rank is there: two exchanges over each fabric it spans.

    Source: latency of one exchange from the network description (ISCA 2025 Table 5); eq. X3.
    """
    return NOTIFY_ROUNDS * (links.scale_up_latency_s + (links.nic_latency_s if nodes > 1 else 0.0))


def send_seconds(
    payload_bytes: float, links: Links, profile: CalibrationProfile, *, across_nodes: bool
) -> float:
    """Seconds of one point-to-point send between neighbouring pipeline ranks, alone (eq. X4)."""
    kind, rate, latency = (
        ("nic", links.nic_bytes_per_s, links.nic_latency_s)
        if across_nodes
        else ("scale_up", links.scale_up_bytes_per_s, links.scale_up_latency_s)
    )
    share = profile.curve(f"p2p.{kind}_fraction").curve.at(payload_bytes).value
    return latency + payload_bytes / (share * rate)


def ring_bytes(total_bytes: float, ranks: int, ranks_per_node: int) -> tuple[float, float]:
    """(NIC, scale-up) bytes that one GPU sends in the ring collective of `ring_seconds` (eq. X5)."""
    if ranks <= 1:
        return 0.0, 0.0
    moved = total_bytes * (ranks - 1) / ranks
    return (
        moved / ranks_per_node if ranks > ranks_per_node else 0.0,
        moved if ranks_per_node > 1 else 0.0,
    )


def ring_seconds(
    total_bytes: float, ranks: int, ranks_per_node: int, links: Links, profile: CalibrationProfile
) -> float:
    """Seconds of a reduce-scatter or all-gather of `total_bytes` over `ranks`, `ranks_per_node` a node.

    Rings through all NICs of a node: every GPU's NVLink carries (n-1)/n of the buffer, its NIC that
    divided by the members on its node; the slower one decides, plus one latency a ring step
    (docs/model.md, eq. X5; nccl-tests doc/PERFORMANCE.md for the (n-1)/n factor).
    """
    if ranks <= 1 or total_bytes <= 0.0:
        return 0.0
    nic_bytes, scale_up_bytes = ring_bytes(total_bytes, ranks, ranks_per_node)
    nodes = -(-ranks // ranks_per_node)
    steps_s = (ranks_per_node - 1) * links.scale_up_latency_s
    seconds = 0.0
    if ranks_per_node > 1:
        share = profile.curve("collective.scale_up_fraction").curve.at(total_bytes / ranks).value
        seconds = scale_up_bytes / (share * links.scale_up_bytes_per_s)
    if nodes > 1:
        share = profile.curve("collective.nic_fraction").curve.at(nodes).value
        seconds = max(seconds, nic_bytes / (share * links.nic_bytes_per_s))
        steps_s += (nodes - 1) * links.nic_latency_s
    return seconds + steps_s
