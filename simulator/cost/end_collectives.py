"""Exposed seconds of the tensor-parallel collectives of embedding, output head and loss (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesim.simulator.cost.layer_collectives import CoreSeconds
from moesim.simulator.cost.library_collectives import RingOperation, ring_price
from moesim.simulator.cost.moved import TENSOR, Moved, summed
from moesim.simulator.cost.overlap import OverlapSlowDown, exposed_overlapped
from moesim.simulator.cost.price_evidence import PricedSeconds, PriceEvidence, combined
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.model.block import BlockShape
from moesim.simulator.model.operator import Phase

LOSS_REDUCTIONS = 3
"""All-reduces of one FP32 number a token: maximum, logit of the label, sum (NVIDIA/Megatron-LM@core_v0.10.0
`megatron/core/tensor_parallel/cross_entropy.py`)."""


def end_collectives(
    pricer: Pricer, block: BlockShape, gemms: Mapping[Phase, CoreSeconds]
) -> tuple[dict[Phase, float], PriceEvidence, dict[Phase, tuple[Moved, ...]]]:
    """(exposed seconds by phase, evidence, bytes by phase) of an embedding's or head's collectives (eq. X30).

    `gemms`: seconds of the head's GEMMs by phase. The embedding's rows are scattered (or all-reduced) forward
    and their gradients gathered; the head gathers its input in both passes and scatters the gradient.
    """
    plan, links = pricer.scenario.parallel, pricer.links
    tokens = pricer.tokens / plan.cp
    group = (plan.tp, min(plan.tp, links.gpus_per_node))

    def price(operation: RingOperation, size: float) -> PricedSeconds:
        return ring_price(operation, size, *group, links, pricer.profile)

    rows, split = tokens * pricer.shape.hidden * 2.0, plan.sequence_parallel
    gather, scatter = price("all_gather", rows), price("reduce_scatter", rows)
    both = price("all_reduce", rows)
    used = (gather, scatter) if split else (both,)
    if block.is_embedding:
        seconds: dict[Phase, float] = {
            "mlp F": scatter.seconds if split else both.seconds,
            "mlp W": gather.seconds if split else 0.0,
        }
        runs: dict[Phase, list[PricedSeconds]] = {
            "mlp F": [scatter if split else both],
            "mlp W": [gather] if split else [],
        }
        return seconds, combined((part.evidence, 1.0) for part in used), _bytes(runs)
    loss = price("all_reduce", tokens * 4.0)
    hides = pricer.scenario.software.overlap_tensor_parallel != "none"
    slow_down = OverlapSlowDown(pricer.profile.lost_beside_nccl.value)

    def beside(collective: PricedSeconds, phase: Phase) -> float:
        seconds = gemms[phase].gemms_s if hides and phase in gemms else 0.0
        return exposed_overlapped(collective.seconds, seconds, slow_down)

    backward = beside(gather, "mlp I") + beside(scatter, "mlp W") if split else beside(both, "mlp W")
    forward = split * gather.seconds + LOSS_REDUCTIONS * loss.seconds
    runs = {
        "mlp F": [*([gather] if split else []), *[loss] * LOSS_REDUCTIONS],
        "mlp I": list(used),
    }
    return (
        {"mlp F": forward, "mlp I": backward},
        combined((part.evidence, 1.0) for part in (*used, loss)),
        _bytes(runs),
    )


def _bytes(runs: Mapping[Phase, Sequence[PricedSeconds]]) -> dict[Phase, tuple[Moved, ...]]:
    """Bytes of the collectives that run in each phase."""
    return {phase: summed((part.moved(TENSOR), 1.0) for part in parts) for phase, parts in runs.items()}
