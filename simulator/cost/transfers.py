"""Prices transfers: dispatch and combine by dispatcher or dedicated engine, sends, and what crosses tiers.

The simulator's engine adds contention between them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.topologies import NetworkTier
from moesim.simulator.cost.compute import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.evidence import NO_EVIDENCE, CostedSeconds, Evidence, Moved
from moesim.simulator.cost.library_collectives import RingOperation, all_to_all_price, ring_price
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import Mode, PhaseKey, SlowSends, TransferCost
from moesim.simulator.dispatchers.protocol import (
    Call,
    Collective,
    CollectiveTime,
    Dispatcher,
    LinkBytes,
    Links,
    Meter,
    fastest_seconds,
    notify_seconds,
    transfer_bytes,
)
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import row_bytes
from moesim.simulator.schedules.template import EP_PHASES


def block_transfers(pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]) -> dict[PhaseKey, TransferCost]:
    """Expert-parallel transfers of a block; they have no mode `sms_reserved`."""
    if pricer.scenario.parallel.ep == 1:
        return {}
    phases = [phase for phase in pricer.operators(kind) if phase in EP_PHASES]
    return {
        (kind, ph, mode): expert_transfer(pricer, ph, mode)
        for ph in phases
        for mode in modes
        if mode != "sms_reserved"
    }


REPEATED: tuple[Phase, Phase] = ("dispatch F", "combine F")
"""Transfers of the forward, which recompute repeats without overlap (eq. X15)."""


def expert_transfer(pricer: Pricer, phase: Phase, mode: Mode) -> TransferCost:
    """Price of one dispatch or combine of a micro-batch; kernels of SMs slow down beside compute."""
    return pricer.moves(("experts", phase, mode), lambda: _expert_transfer(pricer, phase, mode))


def _expert_transfer(pricer: Pricer, phase: Phase, mode: Mode) -> TransferCost:
    cost = _between_experts(pricer, phase, mode)
    plan, node = pricer.scenario.parallel, pricer.links.gpus_per_node
    for tier in pricer.tiers:
        crossing_s = exchange_seconds(tier, plan.ep * plan.expert_tp, node, cost.nic_bytes)
        if crossing_s is None:
            continue
        cost = dataclasses.replace(
            cost,
            launch_s=cost.launch_s + tier.latency_s,
            nic_s=max(cost.nic_s, crossing_s),
            worst_s=max(cost.worst_s, crossing_s),
            evidence=cost.evidence | Evidence.of([], [_note(tier, "expert-parallel groups")]),
        )
    return cost


def _between_experts(pricer: Pricer, phase: Phase, mode: Mode) -> TransferCost:
    kind, call = dispatcher(pricer.scenario.communication.kernels), replace(pricer.call, phase=phase)
    recipe = pricer.scenario.recipe
    wire = recipe.dispatch if call.operation == "dispatch" else recipe.combine
    call = replace(call, wire=wire, row_bytes=row_bytes(call.row, wire))
    if pricer.cluster.accelerator.communication_engine is not None and not kind.by_library:
        moved = transfer_bytes(pricer.targets(), call.tokens, call.row_bytes)
        return engine_transfer(moved, pricer.links, pricer.profile, nodes=call.nodes)
    slow_down = NO_SLOW_DOWN
    if not kind.by_library and mode != "alone":
        law = next((law for law in pricer.profile.laws if law.group == "communication"), None)
        if law is None:
            name = pricer.profile.name
            note = f"profile {name}: no law for communication beside compute, no slow-down priced"
            slow_down = SlowDown(assumed=note)
        else:
            at = law.curve.at(pricer.scenario.communication.sms)
            note = at.note if at.extrapolated else ""
            slow_down = SlowDown(at.value, law.residual.relative, law.id, note)
    return dispatcher_transfer(kind, call, kind.traffic(call), pricer.links, pricer.profile, slow_down)


def dispatcher_transfer(
    kind: Dispatcher,
    call: Call,
    moved: LinkBytes,
    links: Links,
    profile: CalibrationProfile,
    slow_down: SlowDown = NO_SLOW_DOWN,
) -> TransferCost:
    """Price of a call that moves these bytes, slowed down by compute beside it.

    Raises InputError as `Dispatcher.seconds` does.
    """
    meter = JobMeter(kind, links, profile)
    time = kind.seconds(call, moved, meter)
    payload_s = max(time.nic_s, time.scale_up_s) * slow_down.factor
    return TransferCost(
        launch_s=time.launch_s,
        nic_s=time.nic_s * slow_down.factor,
        scale_up_s=time.scale_up_s * slow_down.factor,
        nic_bytes=moved.ib_bytes,
        scale_up_bytes=moved.nvlink_bytes,
        best_s=time.best_s,
        worst_s=payload_s * (1.0 + time.residual + slow_down.residual) + time.call_error_s,
        evidence=meter.evidence
        | Evidence.of(
            [*meter.used, slow_down.id],
            [*meter.notes, slow_down.extrapolated, slow_down.assumed],
            meter.reads,
        ),
        moved_before=tuple(Moved(what, part.nic_bytes, part.scale_up_bytes) for what, part in time.before),
    )


class JobMeter(Meter):
    """The `Meter` of a dispatcher on the links of a job, with the evidence of what was read."""

    evidence: Evidence = NO_EVIDENCE
    """Of collectives of the library."""

    def collective(self, name: Collective, size: float, call: Call) -> CollectiveTime:
        """A collective of the library, whose ring is on the NICs where the group spans nodes."""
        links, profile = self.links, self._profile
        if name == "all_to_all":
            time, evidence = all_to_all_price(size, call.ranks, call.nodes, links, profile)
            self.evidence |= evidence
            return time
        price = ring_price(name, size, call.ranks, call.local, links, profile)
        self.evidence |= price.evidence
        residual = max((profile.curve(id_).residual.relative for id_ in price.evidence.entries), default=0.0)
        paths = (price.seconds, 0.0) if call.nodes > 1 else (0.0, price.seconds)
        return CollectiveTime(*paths, residual, price.nic_bytes, price.scale_up_bytes)


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
        evidence=Evidence.of(ids),
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


# -- tiers -----------------------------------------------------------------------------------------------
# Transfers over the limited links of a network: oversubscribed switches, links between buildings (eq. N6).
#
# Every GPU of a domain that sends across is taken to send at the same time, as synchronous training does.


def _note(tier: NetworkTier, what: str) -> str:
    return (
        f"{what} cross the {tier.name}: all GPUs that cross are taken to send at once, spread evenly (eq. N6)"
    )


def exchange_seconds(tier: NetworkTier, group: int, node: int, nic_bytes: float) -> float | None:
    """Seconds of the exchanges of all groups of `group` neighbouring GPUs on a tier's links (eq. N6).

    `nic_bytes`: bytes that a GPU sends to the other nodes of its group. None where no group meets the links.
    """
    domain, outside = tier.gpus, max(1, group - node)
    if group <= node or (group <= domain and domain % group == 0):
        return None
    if group < domain:  # one group lies on both sides of a border, at worst half on each
        senders, part = group / 2, group / 2 / outside
    else:
        senders, part = domain, (domain if tier.to_each else group - domain) / outside
    return senders * nic_bytes * min(1.0, part) / tier.bytes_per_s


def domains_met(tier: NetworkTier, layout: Layout, span: int, *, mirrored: bool) -> int:
    """Most domains of a tier that the GPUs of one ring are in (eq. N6).

    `span`: GPUs from the first to the last of a ring on one pipeline rank, which hold whole rings.
    `mirrored`: whether the rings go on over the pipeline rank that holds the same parameters.
    """
    inner, domain, pp = layout.gpus_per_pipeline_rank, tier.gpus, layout.plan.pp
    most = 1
    for rank in range(pp):
        met: set[int] = set()
        for first in range(rank * inner, (rank + 1) * inner, span):
            own = set(range(first // domain, (first + span - 1) // domain + 1))
            most, met = max(most, len(own)), met | own
        if mirrored:
            mirror = (pp - 1 - rank) * inner
            most = max(most, len(met | set(range(mirror // domain, (mirror + inner - 1) // domain + 1))))
    return most


RingPlace = Literal["replicas", "groups", "copies"]
"""GPUs of a ring: replicas of a pipeline rank, the groups of hybrid FSDP, or both holders of a stage."""


def over_tiers(
    pricer: Pricer,
    price: CostedSeconds,
    operation: RingOperation,
    ranks: int,
    apart: int,
    place: RingPlace,
    *,
    mirrored: bool,
) -> CostedSeconds:
    """A ring's price on a network with tiers (eq. N6): each border is crossed once, by all rings at once.

    `ranks`: of the ring; its members are `apart` GPUs from each other.
    """
    if not pricer.tiers or not price.seconds:
        return price
    layout, node = pricer.layout, pricer.links.gpus_per_node
    inner = layout.gpus_per_pipeline_rank
    span = max(1, min(inner, ranks * apart)) if place == "replicas" and not mirrored else inner
    for tier in pricer.tiers:
        met = domains_met(tier, layout, span, mirrored=mirrored)
        if met == 1:
            continue
        together = min(inner, tier.gpus) if place == "copies" else max(apart, node)
        crossing_s = together * price.nic_bytes / tier.bytes_per_s
        rounds = 2 if operation == "all_reduce" else 1
        price = replace(
            price,
            seconds=max(price.seconds, crossing_s) + rounds * met * tier.latency_s,
            evidence=price.evidence | Evidence.of([], [_note(tier, "rings of gradients and parameters")]),
        )
    return price


def sends_over_tiers(pricer: Pricer, send_s: float, size: float) -> SlowSends:
    """Sends between pipeline neighbours that cross a tier's border, and the borders' links (eq. N6).

    `send_s`: seconds of a send of `size` bytes inside a domain. The GPUs of a pipeline rank send at once.
    """
    layout = pricer.layout
    pp, inner = layout.plan.pp, layout.gpus_per_pipeline_rank
    pairs = sorted({(s, (s + step) % pp) for s in range(pp) for step in (1, -1)}) if pp > 1 else []
    alone: dict[tuple[int, int], float] = {}
    by_latency: dict[tuple[int, int], float] = {}
    borders: dict[tuple[int, ...], tuple[float, dict[tuple[int, int], int]]] = {}
    for number, tier in enumerate(pricer.tiers if send_s else ()):
        for pair in pairs:
            own, other = (np.arange(rank * inner, (rank + 1) * inner) // tier.gpus for rank in pair)
            beyond = other if tier.to_each else np.full_like(other, -1)
            ends = np.stack([own, beyond], axis=1)[own != other]
            if not len(ends):
                continue
            met, senders = np.unique(ends, axis=0, return_counts=True)
            crossing_s = float(senders.max()) * size / tier.bytes_per_s
            took = max(send_s, crossing_s) + tier.latency_s
            alone[pair] = max(alone.get(pair, 1.0), took / send_s)
            by_latency[pair] = by_latency.get(pair, 1.0) + tier.latency_s / send_s
            for border, count in zip(met.tolist(), senders.tolist(), strict=True):
                borders.setdefault((number, *border), (tier.bytes_per_s, {}))[1][pair] = count
    crossing: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}
    for index, (_, counts) in enumerate(borders.values()):
        for pair, count in counts.items():
            crossing[pair] = (*crossing.get(pair, ()), (index, count / max(counts.values())))
    rates = tuple(rate / max(counts.values()) for rate, counts in borders.values())
    return SlowSends(alone, by_latency, rates, crossing)
