"""Prices a job's dispatch and combine by kernels on SMs, a dedicated engine, or NCCL's all-to-all."""

from __future__ import annotations

from moesim.simulator.cost.communication import (
    EpKernels,
    EpOperation,
    engine_transfer,
    ep_transfer,
)
from moesim.simulator.cost.laws import NO_SLOW_DOWN, SlowDown
from moesim.simulator.cost.library_collectives import all_to_all_transfer
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.profile_use import communication_law
from moesim.simulator.cost.table import Mode, TransferCost
from moesim.simulator.layout.routing import transfer_bytes
from moesim.simulator.model.operator import Phase
from moesim.simulator.model.precision import row_bytes

EP_OPERATION: dict[Phase, EpOperation] = {
    "dispatch F": "dispatch",
    "combine B": "dispatch",  # the backward of a combine sends rows out again
    "combine F": "combine",
    "dispatch B": "combine",
}


def expert_transfer(pricer: Pricer, phase: Phase, mode: Mode) -> TransferCost:
    """Price of one dispatch or combine of a micro-batch."""
    operation, communication = EP_OPERATION[phase], pricer.scenario.communication
    if communication.by_nccl:
        return _nccl_transfer(pricer)
    recipe = pricer.scenario.recipe
    wire = recipe.dispatch if operation == "dispatch" else recipe.combine
    moved = transfer_bytes(pricer.targets(), pricer.ep_tokens, row_bytes(pricer.shape.routed_width, wire))
    if pricer.cluster.accelerator.communication_engine is not None:
        return engine_transfer(moved, pricer.links, pricer.profile, nodes=pricer.ep_nodes)
    kernels = EpKernels(communication.sms, communication.kernels, _slow_down(pricer, mode))
    return ep_transfer(operation, moved, pricer.links, pricer.profile, kernels, nodes=pricer.ep_nodes)


def _nccl_transfer(pricer: Pricer) -> TransferCost:
    """Price of NCCL's all-to-all, which sends each chosen expert its own copy of a row in BF16 (eq. O6)."""
    assert pricer.shape.moe is not None
    sent = pricer.ep_tokens * pricer.shape.moe.routed_rows * pricer.shape.routed_width * 2.0
    ranks = pricer.scenario.parallel.ep
    return all_to_all_transfer(sent, ranks, pricer.ep_nodes, pricer.links, pricer.profile)


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
