"""Prices a job's dispatch and combine by its dispatcher, or by the engine that moves collectives."""

from __future__ import annotations

from dataclasses import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.communication import engine_transfer
from moesim.simulator.cost.compute import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.library_collectives import all_to_all_price, ring_price
from moesim.simulator.cost.moved import Moved
from moesim.simulator.cost.price_evidence import NO_EVIDENCE, PriceEvidence
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import Mode, TransferCost
from moesim.simulator.dispatchers.protocol import (
    Call,
    Collective,
    CollectiveTime,
    Dispatcher,
    LinkBytes,
    Links,
    Meter,
    transfer_bytes,
)
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.model.operator import Phase
from moesim.simulator.model.precision import row_bytes


def expert_transfer(pricer: Pricer, phase: Phase, mode: Mode) -> TransferCost:
    """Price of one dispatch or combine of a micro-batch."""
    kind, call = dispatcher(pricer.scenario.communication.kernels), replace(pricer.call, phase=phase)
    recipe = pricer.scenario.recipe
    wire = recipe.dispatch if call.operation == "dispatch" else recipe.combine
    call = replace(call, wire=wire, row_bytes=row_bytes(call.row, wire))
    if pricer.cluster.accelerator.communication_engine is not None and not kind.by_library:
        moved = transfer_bytes(pricer.targets(), call.tokens, call.row_bytes)
        return engine_transfer(moved, pricer.links, pricer.profile, nodes=call.nodes)
    slow_down = NO_SLOW_DOWN if kind.by_library or mode == "alone" else _slow_down(pricer)
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
        | PriceEvidence.of(
            [*meter.used, slow_down.id],
            [*meter.notes, slow_down.extrapolated, slow_down.assumed],
            meter.reads,
        ),
        moved_before=tuple(Moved(what, part.nic_bytes, part.scale_up_bytes) for what, part in time.before),
    )


class JobMeter(Meter):
    """The `Meter` of a dispatcher on the links of a job, with the evidence of what was read."""

    evidence: PriceEvidence = NO_EVIDENCE
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


def _slow_down(pricer: Pricer) -> SlowDown:
    """Slow-down of an expert-parallel kernel beside compute."""
    law = next((law for law in pricer.profile.laws if law.group == "communication"), None)
    if law is None:
        name = pricer.profile.name
        note = f"profile {name}: no law for communication beside compute, no slow-down priced"
        return SlowDown(assumed=note)
    reading = law.curve.at(pricer.scenario.communication.sms)
    return SlowDown(
        reading.value, law.residual.relative, law.id, reading.note if reading.extrapolated else ""
    )
