"""Prices a job's dispatch and combine by its dispatcher, or by the engine that moves collectives."""

from __future__ import annotations

from moesim.simulator.cost.communication import (
    EpKernels,
    EpOperation,
    engine_transfer,
    ep_transfer,
)
from moesim.simulator.cost.dispatch_direct import direct_transfer
from moesim.simulator.cost.dispatch_domain import DomainGroup, domain_transfer
from moesim.simulator.cost.dispatch_nccl import all_gather_transfer, nccl_transfer
from moesim.simulator.cost.laws import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.profile_use import communication_law
from moesim.simulator.cost.table import Mode, TransferCost
from moesim.simulator.layout.routing import direct_bytes, transfer_bytes
from moesim.simulator.model.dispatchers import dispatcher
from moesim.simulator.model.operator import Phase
from moesim.simulator.model.precision import Format, row_bytes

EP_OPERATION: dict[Phase, EpOperation] = {
    "dispatch F": "dispatch",
    "combine B": "dispatch",  # the backward of a combine sends rows out again
    "combine F": "combine",
    "dispatch B": "combine",
}


def expert_transfer(pricer: Pricer, phase: Phase, mode: Mode) -> TransferCost:
    """Price of one dispatch or combine of a micro-batch."""
    operation, communication = EP_OPERATION[phase], pricer.scenario.communication
    transport = dispatcher(communication.kernels).transport
    if transport == "all-to-all":
        return nccl_transfer(pricer, phase)
    if transport == "all-gather":
        return all_gather_transfer(pricer, operation)
    recipe = pricer.scenario.recipe
    wire = recipe.dispatch if operation == "dispatch" else recipe.combine
    row = row_bytes(pricer.shape.routed_width, wire)
    moved = transfer_bytes(pricer.targets(), pricer.ep_tokens, row)
    if pricer.cluster.accelerator.communication_engine is not None:
        return engine_transfer(moved, pricer.links, pricer.profile, nodes=pricer.ep_nodes)
    kernels = EpKernels(
        communication.sms,
        communication.kernels,
        _slow_down(pricer, mode),
        tokens=pricer.ep_tokens,
        row_bytes=row,
    )
    if transport == "direct":
        assert pricer.shape.moe is not None
        ranks, nodes = pricer.scenario.parallel.ep, pricer.ep_nodes
        moved = direct_bytes(pricer.ep_tokens, pricer.shape.moe.routed_rows, ranks, ranks // nodes, row)
        return direct_transfer(operation, moved, pricer.links, pricer.profile, kernels, nodes=nodes)
    if transport == "domain":
        group = _domain_group(pricer, phase, wire)
        return domain_transfer(operation, moved, pricer.links, pricer.profile, kernels, group)
    return ep_transfer(operation, moved, pricer.links, pricer.profile, kernels, nodes=pricer.ep_nodes)


def _domain_group(pricer: Pricer, phase: Phase, wire: Format) -> DomainGroup:
    """The group of a transfer by Hybrid-EP; only a forward dispatch has no routing of an earlier call."""
    moe, ranks = pricer.shape.moe, pricer.scenario.parallel.ep
    assert moe is not None
    fused = pricer.scenario.communication.fused_permutation
    return DomainGroup(
        ranks,
        pricer.ep_nodes,
        wire,
        written_rows=moe.routed_rows / pricer.targets().distinct_gpus if fused else 1.0,
        routing_map_bytes=pricer.ep_tokens * moe.experts if phase == "dispatch F" else 0.0,
    )


def _slow_down(pricer: Pricer, mode: Mode) -> SlowDown:
    """Slow-down of an expert-parallel kernel beside compute."""
    if mode == "alone":
        return NO_SLOW_DOWN
    law = communication_law(pricer.profile)
    if law is None:
        name = pricer.profile.name
        note = f"profile {name}: no law for communication beside compute, no slow-down priced"
        return SlowDown(assumed=note)
    reading = law.curve.at(pricer.scenario.communication.sms)
    return SlowDown(
        reading.value, law.residual.relative, law.id, reading.note if reading.extrapolated else ""
    )
