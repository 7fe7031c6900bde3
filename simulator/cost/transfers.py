"""Prices transfers: dispatch and combine by dispatcher or dedicated engine, and pipeline sends.

The simulator's engine adds contention between them.
"""

from __future__ import annotations

from dataclasses import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.compute import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.evidence import NO_EVIDENCE, Evidence, Moved
from moesim.simulator.cost.library_collectives import all_to_all_price, ring_price
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import Mode, PhaseKey, TransferCost
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
