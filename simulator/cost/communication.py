"""Seconds of transfers: expert-parallel dispatch and combine, pipeline sends, data-parallel collectives.

Pure functions of bytes, links and a calibration profile; contention between transfers is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.scale_up_shares import SWITCHED, ScaleUpShares
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.cost.collectives.ring import closed_form_seconds
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
    curves: str = ""
    """Prefix of the ids of the share curves: "engine." where a dedicated engine moves the payload."""
    wiring: ScaleUpShares = SWITCHED
    """What part of `scale_up_bytes_per_s` a group can use."""
    ep_per_node: int = 1
    """Members of an expert-parallel group on one node."""


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
    some (its SM curve does not begin at 0). Below the fewest SMs measured the SM rate is proportional to
    their number, which is flagged.
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
    fewest = rate.curve.xs[0]
    if sms < fewest:  # held, the rate of more SMs would be too high
        sm_rate *= sms / fewest
        notes[-1] = (
            f"{rate.id}: {sms} communication SMs are below the measured {fewest:g}; each is taken to move as "
            f"much as one of {fewest:g}"
        )
    # Below 20 SMs the SM curve is the limit; the link share was measured with enough SMs.
    fraction, link_residual = read(f"ep.{operation}.scale_up_fraction", max(20, sms))
    link_rate = fraction * links.wiring.all_to_all(links.ep_per_node) * links.scale_up_bytes_per_s
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


def engine_transfer(
    traffic: LinkBytes, links: Links, profile: CalibrationProfile, *, nodes: int
) -> TransferTime:
    """Seconds of a dispatch or combine that a dedicated engine moves, no compute unit taking part.

    payload = max(NIC bytes / NIC rate, scale-up bytes / scale-up rate), the rates being shares of the
    nominal ones from the profile's curves engine.ep.* over the number of nodes (docs/model.md, eq. H1).
    Raises InputError where the profile has no such curve.
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
    return TransferTime(
        launch_s=notify_seconds(links, nodes),
        nic_s=nic_s,
        scale_up_s=scale_up_s,
        best_s=max(best_nic, traffic.nvlink_bytes / links.scale_up_bytes_per_s),
        worst_s=max(nic_s, scale_up_s) * (1.0 + residual),
        curve_ids=tuple(ids),
    )


@dataclass(frozen=True, slots=True)
class AllToAllTime(TransferTime):
    """Seconds of an all-to-all and the bytes behind them."""

    nic_bytes: float = 0.0
    scale_up_bytes: float = 0.0


def all_to_all_seconds(
    sent_bytes: float, ranks: int, nodes: int, links: Links, profile: CalibrationProfile
) -> AllToAllTime:
    """NCCL's all-to-all of `sent_bytes` a rank, spread evenly over `ranks` on `nodes` (eq. O6).

    Inside the node at the bus bandwidth that the profile has for this size (nccl.all_to_all.busbw, else that
    of an all-gather), between nodes at the share of the NIC that collectives reach.
    """
    local = ranks // nodes
    scale_up = sent_bytes * (local - 1) / ranks
    nic = sent_bytes * (ranks - local) / ranks
    measured = next((c for c in profile.curves if c.id == "nccl.all_to_all.busbw"), None)
    curve = measured or profile.curve("collective.scale_up_fraction")
    reading = curve.curve.at(sent_bytes)
    rate = reading.value * (1.0 if measured else links.scale_up_bytes_per_s)
    used, notes, nic_s = [curve.id], [reading.note] if reading.extrapolated else [], 0.0
    if nic:
        share = profile.curve("collective.nic_fraction")
        nic_s = nic / (share.curve.at(nodes).value * links.nic_bytes_per_s)
        used.append(share.id)
    best = max(scale_up / links.scale_up_bytes_per_s, nic / links.nic_bytes_per_s if nic else 0.0)
    return AllToAllTime(
        launch_s=notify_seconds(links, nodes),
        nic_s=nic_s,
        scale_up_s=scale_up / rate,
        best_s=best,
        worst_s=max(nic_s, scale_up / rate) * (1.0 + curve.residual.relative),
        curve_ids=tuple(used),
        extrapolations=tuple(notes),
        nic_bytes=nic,
        scale_up_bytes=scale_up,
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
    payload_bytes: float, links: Links, profile: CalibrationProfile, *, across_nodes: bool, shared: int = 1
) -> float:
    """Seconds of one point-to-point send between neighbouring pipeline ranks, alone (eq. X4).

    `shared`: sends of other GPUs of the rank that take the same link at the same time, its own included.
    """
    kind, rate, latency = (
        ("nic", links.nic_bytes_per_s, links.nic_latency_s)
        if across_nodes
        else ("scale_up", links.wiring.pair() * links.scale_up_bytes_per_s, links.scale_up_latency_s)
    )
    share = profile.curve(f"{links.curves}p2p.{kind}_fraction").curve.at(payload_bytes).value
    return latency + payload_bytes * shared / (share * rate)


def ring_seconds(
    total_bytes: float, ranks: int, ranks_per_node: int, links: Links, profile: CalibrationProfile
) -> float:
    """Seconds of a reduce-scatter or all-gather of `total_bytes` over `ranks`, `ranks_per_node` a node.

    Bytes, steps and protocols are those of `collectives.ring` (docs/model.md, eq. X5). The rates are what the
    profile's collectives reached with their largest buffers; how much less small ones reach follows from
    the steps.
    """
    if ranks <= 1 or total_bytes <= 0.0:
        return 0.0
    nodes = -(-ranks // ranks_per_node)
    up_points = profile.curve(f"{links.curves}collective.scale_up_fraction").curve.points
    scale_up = max(y for _, y in up_points) * links.wiring.ring(ranks_per_node)
    nic = 0.0
    if nodes > 1:
        nic = profile.curve(f"{links.curves}collective.nic_fraction").curve.at(nodes).value
    return closed_form_seconds(
        "all_gather",
        total_bytes,
        ranks,
        ranks_per_node,
        load_library(),
        scale_up_bytes_per_s=scale_up * links.scale_up_bytes_per_s,
        nic_bytes_per_s=nic * links.nic_bytes_per_s,
    )


def collective_beside_compute(
    name: str, total_bytes: float, ranks: int, ranks_per_node: int, links: Links, profile: CalibrationProfile
) -> tuple[float, str, str]:
    """Seconds that a ring of NCCL takes longer beside products, where the profile measured it; otherwise 0.

    With it the curve that says so and a note where it was extrapolated ("" for none). The scale-up part of
    `ring_seconds` times the measured ratio (curve nccl.<name>.beside_compute), as far as that is more than
    the whole ring takes alone (eq. O8).
    """
    measured = [c for c in profile.curves if c.id == f"nccl.{name}.beside_compute"]
    if not measured or ranks <= 1 or total_bytes <= 0.0:
        return 0.0, "", ""
    reading = measured[0].curve.at(total_bytes / ranks)
    inside = ring_seconds(total_bytes, ranks, ranks, links, profile)
    alone = ring_seconds(total_bytes, ranks, ranks_per_node, links, profile)
    longer = max(0.0, reading.value * inside - alone)
    return longer, measured[0].id if longer else "", reading.note if longer else ""
