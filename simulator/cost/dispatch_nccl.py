"""Prices dispatch and combine by NCCL's collectives: the all-to-all and the all-gather of Megatron core."""

from __future__ import annotations

from dataclasses import replace

from moesim.simulator.cost.communication import EpOperation, notify_seconds
from moesim.simulator.cost.library_collectives import all_to_all_transfer, ring_price
from moesim.simulator.cost.price_evidence import PriceEvidence
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.model.operator import Phase

SMALL_CALLS: dict[Phase, int] = {"dispatch F": 2, "dispatch B": 1}
"""Further exchanges of a phase: the counts of the experts and the weights of the rows, and the gradients of
the weights (NVIDIA/Megatron-LM@d98e8a64 token_dispatcher.py)."""
SMALL_CALL = "nccl.all_to_all.call_time"


def nccl_transfer(pricer: Pricer, phase: Phase) -> TransferCost:
    """Price of NCCL's all-to-all, which sends each chosen expert its own copy of a row in BF16 (eq. O6)."""
    assert pricer.shape.moe is not None
    sent = pricer.ep_tokens * pricer.shape.moe.routed_rows * pricer.shape.routed_width * 2.0
    ranks = pricer.scenario.parallel.ep
    transfer = all_to_all_transfer(sent, ranks, pricer.ep_nodes, pricer.links, pricer.profile)
    calls = SMALL_CALLS.get(phase, 0)
    curve = next((c for c in pricer.profile.curves if c.id == SMALL_CALL), None)
    if curve is None or not calls:
        return transfer
    reading = curve.curve.at(ranks)
    evidence = PriceEvidence.of(
        [curve.id], [reading.note] if reading.extrapolated else [], [(curve.id, float(ranks))]
    )
    return replace(
        transfer,
        launch_s=transfer.launch_s + calls * reading.value,
        evidence=transfer.evidence | evidence,
    )


def all_gather_transfer(pricer: Pricer, operation: EpOperation) -> TransferCost:
    """Price of gathering all ranks' tokens, or of reducing and scattering their sums, in BF16 (eq. O16)."""
    ranks, nodes = pricer.scenario.parallel.ep, pricer.ep_nodes
    local, links = ranks // nodes, pricer.links
    total = pricer.ep_tokens * ranks * pricer.shape.routed_width * 2.0
    price = ring_price(
        "all_gather" if operation == "dispatch" else "reduce_scatter",
        total,
        ranks,
        local,
        links,
        pricer.profile,
    )
    scale_up = total * (ranks - 1) / ranks
    nic = total * (nodes - 1) / nodes / local  # each rank carries its share of what other nodes have
    best = max(scale_up / links.scale_up_bytes_per_s, nic / links.nic_bytes_per_s if nic else 0.0)
    residual = max(
        (pricer.profile.curve(id_).residual.relative for id_ in price.evidence.entries), default=0.0
    )
    return TransferCost(
        launch_s=notify_seconds(links, nodes),
        nic_s=price.seconds if nodes > 1 else 0.0,
        scale_up_s=price.seconds if nodes == 1 else 0.0,
        nic_bytes=nic,
        scale_up_bytes=scale_up,
        best_s=min(best, price.seconds),
        worst_s=price.seconds * (1.0 + residual),
        evidence=price.evidence,
    )
