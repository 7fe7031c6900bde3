"""Prices transfers: expert-parallel dispatch and combine, pipeline sends, data-parallel collectives.

Pure functions of bytes, links and a calibration profile; the engine adds contention between transfers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.scale_up_shares import SWITCHED, ScaleUpShares
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.laws import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.price_evidence import PriceEvidence
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.layout.routing import LinkBytes
from moesim.simulator.model.dispatchers import dispatcher
from moesim.simulator.scenario.sections import InNetwork

EpOperation = Literal["dispatch", "combine"]

DEEPEP = "deepep"
"""Family of kernels whose rates stand for those of a generation that a profile does not know."""

ROW_LAW = ("token_time", "token_rate", "row_time", "row_rate", "ragged_factor")
"""Figures of the law by which the SM time of other rows follows from that of the measured ones (eq. X22)."""

IN_THE_RATE = ("call_time", *ROW_LAW)
"""Figures that the rate of kernels measured as a whole contains."""

WHOLE_ROW_BYTES = 512
"""Bytes that a warp adds up at a time: combines of rows that are no multiple of it take longer."""

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
    tokens: float = 0.0
    """Tokens that the rank sends or gets back."""
    row_bytes: float = 0.0
    """Bytes of one row on the wire; with 0, rows cost nothing beyond their bytes."""


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

    payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate, SM time of the rows) * slow-down, after
    the time of a call. The rates come from the profile's curves; the rows include the rank's own
    (docs/model.md, eq. X2, X22). Raises InputError where a curve is missing, and for 0 SMs where the
    generation needs some (its SM curve does not begin at 0).
    """
    sms, curves = kernels.sms, CurveReader(profile, kernels.generation)
    ranks = links.ep_per_node if nodes == 1 else None
    sm_s, sm_residual = _sm_seconds(operation, traffic.logical_nvlink_bytes, kernels, curves, ranks)
    # Below 20 SMs the SM curve is the limit; the link share was measured with enough SMs.
    fraction, link_residual = curves.read(f"ep.{operation}.scale_up_fraction", max(20, sms))
    link_rate = fraction * links.wiring.all_to_all(links.ep_per_node) * links.scale_up_bytes_per_s
    scale_up_s = max(sm_s, traffic.nvlink_bytes / link_rate)
    own = f"ep.{operation}.nic_fraction"
    curve_id = own if curves.has(own) else f"ep.nic_fraction.{kernels.generation}"
    nic_s, nic_residual = nic_seconds(curve_id, traffic, links, nodes, curves)
    call_s, call_residual = _call_seconds(operation, kernels, curves)
    alone = TransferCost(
        launch_s=notify_seconds(links, nodes) + call_s,
        nic_s=nic_s,
        scale_up_s=scale_up_s,
        nic_bytes=traffic.ib_bytes,
        scale_up_bytes=traffic.nvlink_bytes,
        best_s=fastest_seconds(traffic, links),
        worst_s=call_s * call_residual,
    )
    residual = max(sm_residual, link_residual, nic_residual)
    return slowed_down(alone, residual, kernels.slow_down, curves)


def slowed_down(
    alone: TransferCost, residual: float, slow_down: SlowDown, curves: CurveReader
) -> TransferCost:
    """A transfer beside compute, with what it was read from.

    `residual`: relative error of its payload. `alone.worst_s`: seconds that a call may take longer, which the
    worst case of the payload then holds.
    """
    payload_s = max(alone.nic_s, alone.scale_up_s) * slow_down.factor
    return replace(
        alone,
        nic_s=alone.nic_s * slow_down.factor,
        scale_up_s=alone.scale_up_s * slow_down.factor,
        worst_s=payload_s * (1.0 + residual + slow_down.residual) + alone.worst_s,
        evidence=alone.evidence
        | PriceEvidence.of(
            [*curves.used, slow_down.id],
            [*curves.notes, slow_down.extrapolated, slow_down.assumed],
            curves.reads,
        ),
    )


class CurveReader:
    """Reads the curves of a generation of kernels, and records the curves and notes it used."""

    def __init__(self, profile: CalibrationProfile, generation: str) -> None:
        """Begin without any curve read."""
        self.profile, self.generation = profile, generation
        self.used: list[str] = []
        self.reads: list[tuple[str, float]] = []
        self.notes: list[str] = []

    def curve(self, curve_id: str) -> MeasuredCurve:
        """The curve that `read` uses for an id."""
        return curve_of_generation(self.profile, curve_id, self.generation)

    def has(self, curve_id: str) -> bool:
        """Whether `read` finds a curve for an id."""
        return _curve_id(self.profile, curve_id, self.generation) is not None

    def read(self, curve_id: str, x: float, note: str = "") -> tuple[float, float]:
        """Value at x and the curve's relative error; `note` replaces the usual text for an extrapolation."""
        curve = self.curve(curve_id)
        reading = curve.curve.at(x)
        self.used.append(curve.id)
        self.reads.append((curve.id, x))
        if reading.extrapolated:
            self.notes.append(note or reading.note)
        return reading.value, curve.residual.relative


def nic_seconds(
    curve_id: str, traffic: LinkBytes, links: Links, nodes: int, curves: CurveReader
) -> tuple[float, float]:
    """Seconds of the bytes between nodes at the curve's share of the NIC rate, and its relative error.

    Both are 0 where nothing leaves the node.
    """
    if not traffic.ib_bytes:
        return 0.0, 0.0
    share, residual = curves.read(curve_id, nodes)
    return traffic.ib_bytes / (share * links.nic_bytes_per_s), residual


def fastest_seconds(traffic: LinkBytes, links: Links) -> float:
    """Seconds of a transfer at the nominal rates of its links, of which no kernel is faster."""
    nic_s = traffic.ib_bytes / links.nic_bytes_per_s if traffic.ib_bytes else 0.0
    return max(nic_s, traffic.nvlink_bytes / links.scale_up_bytes_per_s)


def sm_rate(operation: EpOperation, sms: int, curves: CurveReader) -> tuple[float, float]:
    """Bytes/s that the communication SMs move, and the relative error of that rate.

    Below the fewest measured SMs the rate is proportional to their number, and a note says so. Raises
    InputError for 0 SMs where the kernels need some.
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


def _sm_seconds(
    operation: EpOperation,
    received_bytes: float,
    kernels: EpKernels,
    curves: CurveReader,
    ranks: int | None,
) -> tuple[float, float]:
    """Seconds for which the communication SMs move the rows, and its relative error (eq. X22).

    `ranks`: those of the group inside one node; None across nodes, where only the width of a row is carried.
    """
    rate, residual = sm_rate(operation, kernels.sms, curves)
    if not kernels.row_bytes or not curves.has(f"ep.{operation}.token_time"):
        return received_bytes / rate, residual
    curve = curves.curve(f"ep.{operation}.sm_rate")
    most, was = curve.curve.xs[-1], curve.conditions
    if kernels.sms > most:  # a row keeps one SM busy, so more SMs move more rows until the link is full
        rate *= kernels.sms / most
        curves.notes.append(
            f"{curve.id}: {kernels.sms} communication SMs are above the measured {most:g}; each is taken to "
            f"move as much as one of {most:g}, up to the rate of the link"
        )
    if was.row_bytes is None or was.rows_a_token is None or was.ranks is None:
        raise InputError(
            f"{curve.id}: its conditions must state ranks, row_bytes and rows_a_token, because the profile "
            f"has ep.{operation}.token_time, which carries it to other rows"
        )
    rows = received_bytes / kernels.row_bytes
    measured = SentRows(rows / was.rows_a_token, rows, was.row_bytes, was.ranks)
    here = replace(measured, row_bytes=kernels.row_bytes)
    if ranks is not None and kernels.tokens:
        here = replace(here, tokens=kernels.tokens, ranks=ranks)
    seconds = rows * was.row_bytes / rate
    if here.like(measured):
        return seconds, residual
    factor, law_residual = _carried(operation, here, measured, curves)
    note = (
        f"{curve.id}: measured with {was.ranks} ranks and rows of {was.row_bytes:,.0f} bytes, "
        f"{was.rows_a_token:.2f} a token; {here.ranks} ranks and rows of {here.row_bytes:,.0f} bytes, "
        f"{here.rows / here.tokens:.2f} a token, are assumed to follow the law that v1.2.1 showed on H100"
    )
    curves.notes.append(note)
    return seconds * factor, residual + law_residual


@dataclass(frozen=True, slots=True)
class SentRows:
    """Tokens of a rank, the rows that it sends or gets back, and the ranks of its group on a node."""

    tokens: float
    rows: float
    row_bytes: float
    ranks: int

    def like(self, other: SentRows) -> bool:
        """Whether the SMs take as long as for other rows, up to rounding of the published counts."""
        close = math.isclose(self.tokens, other.tokens, rel_tol=2e-3) and self.ranks == other.ranks
        return close and math.isclose(self.row_bytes, other.row_bytes)


def _carried(
    operation: EpOperation, here: SentRows, measured: SentRows, curves: CurveReader
) -> tuple[float, float]:
    """SM time of rows over that of the measured rows by the law, and its relative error."""
    errors = [0.0]

    def read(figure: str, x: float) -> float:
        value, residual = curves.read(f"ep.{operation}.{figure}", x)
        errors.append(residual)
        return value

    def seconds(of: SentRows) -> float:
        a_token = read("token_time", of.ranks)
        if curves.has(f"ep.{operation}.token_rate"):
            a_token += of.row_bytes / read("token_rate", of.ranks)
        a_row = read("row_time", of.ranks) + of.row_bytes / read("row_rate", of.ranks)
        whole = of.tokens * a_token + of.rows * a_row
        if of.row_bytes % WHOLE_ROW_BYTES and curves.has(f"ep.{operation}.ragged_factor"):
            whole *= read("ragged_factor", of.ranks)
        return whole

    return seconds(here) / seconds(measured), max(errors)


def _call_seconds(operation: EpOperation, kernels: EpKernels, curves: CurveReader) -> tuple[float, float]:
    """Seconds of a call beyond its rows, and their relative error; 0 where the profile's rates contain it."""
    name = f"ep.{operation}.call_time"
    if not kernels.tokens or not kernels.sms or not curves.has(name):
        return 0.0, 0.0
    return curves.read(name, kernels.tokens / kernels.sms)


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


def curve_of_generation(profile: CalibrationProfile, curve_id: str, kernels: str) -> MeasuredCurve:
    """The curve of an id for a generation of kernels, else of its family, else of any generation.

    A generation without rates of its own in a profile without general ones is read from DeepEP's. Raises
    InputError without any of them.
    """
    return profile.curve(_curve_id(profile, curve_id, kernels) or curve_id)


def _curve_id(profile: CalibrationProfile, curve_id: str, kernels: str) -> str | None:
    """Id of the first of the curves that `curve_of_generation` looks for, or None without any."""
    family = dispatcher(kernels).curves
    present = _CURVE_IDS.get(Same(profile), lambda: frozenset(entry.id for entry in profile.curves))
    names = [f"{curve_id}.{kernels}", *([f"{curve_id}.{family}"] if family else []), curve_id]
    operation, _, figure = curve_id.removeprefix("ep.").partition(".")
    own_rate = f"ep.{operation}.sm_rate.{kernels}" in present or f"ep.{operation}.sm_rate" in present
    if not family and not (figure in IN_THE_RATE and own_rate):
        names.append(f"{curve_id}.{DEEPEP}")
    return next((name for name in names if name in present), None)


_CURVE_IDS: BoundedCache[frozenset[str]] = BoundedCache(64)
"""Ids of the curves of the profiles that were read before."""


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
