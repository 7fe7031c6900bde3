"""Prices transfers: expert-parallel dispatch and combine, pipeline sends, data-parallel collectives.

Pure functions of bytes, links and a calibration profile; the engine adds contention between transfers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.scale_up_shares import SWITCHED, ScaleUpShares
from moesim.simulator.cost.laws import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.price_evidence import PriceEvidence
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.layout.routing import LinkBytes
from moesim.simulator.scenario.sections import InNetwork

EpOperation = Literal["dispatch", "combine"]

NOTIFY_ROUNDS = 2
"""Latency-bound exchanges before every payload: the counts, then a barrier (DeepEP notify_dispatch)."""


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
    curves: str = ""
    """Prefix of the ids of the share curves: "engine." where a dedicated engine moves the payload."""
    wiring: ScaleUpShares = SWITCHED
    """Shares of `scale_up_bytes_per_s` that a group can use."""
    in_network: InNetwork = "none"
    """Where switches add up all-reduces (`communication.in_network`)."""
    architecture: str = ""
    """Architecture of the GPUs, for figures of the library that depend on it."""
    ep_per_node: int = 1
    """Members of an expert-parallel group on one node."""


@dataclass(frozen=True, slots=True)
class EpKernels:
    """Expert-parallel kernels: communication SMs, generation, and their slow-down beside compute."""

    sms: int
    generation: str
    """Generation whose NIC curve is read; the other curves too, where the profile has them for it."""
    slow_down: SlowDown = NO_SLOW_DOWN


def ep_transfer(
    operation: EpOperation,
    traffic: LinkBytes,
    links: Links,
    profile: CalibrationProfile,
    kernels: EpKernels,
    *,
    nodes: int,
) -> TransferCost:
    """Seconds of a dispatch or combine of expert-parallel kernels, alone on its links.

    payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate, row bytes / SM rate) * slow-down. The
    rates come from the profile's curves; the row bytes include the rank's own rows (docs/model.md, eq. X2).
    Raises InputError where a curve is missing, and for 0 SMs where the generation needs some (its SM curve
    does not begin at 0).
    """
    sms, curves = kernels.sms, _CurveReader(profile, kernels.generation)
    sm_rate, sm_residual = _sm_rate(operation, sms, curves)
    # Below 20 SMs the SM curve is the limit; the link share was measured with enough SMs.
    fraction, link_residual = curves.read(f"ep.{operation}.scale_up_fraction", max(20, sms))
    link_rate = fraction * links.wiring.all_to_all(links.ep_per_node) * links.scale_up_bytes_per_s
    scale_up_s = max(traffic.logical_nvlink_bytes / sm_rate, traffic.nvlink_bytes / link_rate)
    nic_s = best_nic = nic_residual = 0.0
    if traffic.ib_bytes:
        share, nic_residual = curves.read(f"ep.nic_fraction.{kernels.generation}", nodes)
        nic_s = traffic.ib_bytes / (share * links.nic_bytes_per_s)
        best_nic = traffic.ib_bytes / links.nic_bytes_per_s
    slow_down = kernels.slow_down
    residual = max(sm_residual, link_residual, nic_residual) + slow_down.residual
    return TransferCost(
        launch_s=notify_seconds(links, nodes),
        nic_s=nic_s * slow_down.factor,
        scale_up_s=scale_up_s * slow_down.factor,
        nic_bytes=traffic.ib_bytes,
        scale_up_bytes=traffic.nvlink_bytes,
        best_s=max(best_nic, traffic.nvlink_bytes / links.scale_up_bytes_per_s),
        worst_s=max(nic_s, scale_up_s) * slow_down.factor * (1.0 + residual),
        evidence=PriceEvidence.of(
            [*curves.used, slow_down.id],
            [*curves.notes, slow_down.extrapolated, slow_down.assumed],
            curves.reads,
        ),
    )


class _CurveReader:
    """Reads the curves of a generation of kernels, and records the curves and notes it used."""

    def __init__(self, profile: CalibrationProfile, generation: str) -> None:
        self.profile, self.generation = profile, generation
        self.used: list[str] = []
        self.reads: list[tuple[str, float]] = []
        self.notes: list[str] = []

    def curve(self, curve_id: str) -> MeasuredCurve:
        """The curve that `read` uses for an id."""
        return curve_of_generation(self.profile, curve_id, self.generation)

    def read(self, curve_id: str, x: float, note: str = "") -> tuple[float, float]:
        """Value at x and the curve's relative error; `note` replaces the usual text for an extrapolation."""
        curve = self.curve(curve_id)
        reading = curve.curve.at(x)
        self.used.append(curve.id)
        self.reads.append((curve.id, x))
        if reading.extrapolated:
            self.notes.append(note or reading.note)
        return reading.value, curve.residual.relative


def _sm_rate(operation: EpOperation, sms: int, curves: _CurveReader) -> tuple[float, float]:
    """Bytes/s that the communication SMs move, and the relative error of that rate.

    Below the fewest measured SMs the rate is proportional to their number, and a note says so.
    """
    name = f"ep.{operation}.sm_rate"
    rate = curves.curve(name)
    fewest = rate.curve.xs[0]
    if sms < 1 and fewest > 0.0:
        raise InputError(
            f"communication.sms={sms}: expert-parallel kernels need at least 1 communication SM "
            "(DeepEP uses 20 to 24); set communication.sms, or parallel.ep=1"
        )
    if sms >= fewest:
        return curves.read(name, sms)
    note = (
        f"{rate.id}: {sms} communication SMs are below the measured {fewest:g}; each is taken to move as "
        f"much as one of {fewest:g}"
    )
    held, residual = curves.read(name, sms, note)  # the rate of more SMs, which would be too high
    return held * (sms / fewest), residual


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
    nic_s = best_nic = 0.0
    if traffic.ib_bytes:
        ids.append("engine.ep.nic_fraction")
        nic_s, nic_residual = seconds(ids[1], traffic.ib_bytes, links.nic_bytes_per_s)
        residual = max(residual, nic_residual)
        best_nic = traffic.ib_bytes / links.nic_bytes_per_s
    return TransferCost(
        launch_s=notify_seconds(links, nodes),
        nic_s=nic_s,
        scale_up_s=scale_up_s,
        nic_bytes=traffic.ib_bytes,
        scale_up_bytes=traffic.nvlink_bytes,
        best_s=max(best_nic, traffic.nvlink_bytes / links.scale_up_bytes_per_s),
        worst_s=max(nic_s, scale_up_s) * (1.0 + residual),
        evidence=PriceEvidence.of(ids),
    )


def curve_of_generation(profile: CalibrationProfile, curve_id: str, kernels: str) -> MeasuredCurve:
    """The curve `<curve_id>.<kernels>` or, without it, `curve_id`; raises InputError without either."""
    own = f"{curve_id}.{kernels}"
    return profile.curve(own if any(entry.id == own for entry in profile.curves) else curve_id)


def notify_seconds(links: Links, nodes: int) -> float:
    """Latency of the notify kernel after the last rank arrived: two exchanges over each fabric it spans.

    Source: latency of one exchange from the network description (ISCA 2025 Table 5); eq. X3.
    """
    return NOTIFY_ROUNDS * (links.scale_up_latency_s + (links.nic_latency_s if nodes > 1 else 0.0))


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
