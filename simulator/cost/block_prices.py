"""Prices of one block by phase and mode: what the table of a scenario and a plan search are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum

from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.evidence import GEMM_CLASSES
from moesim.simulator.cost.layer_collectives import LayerCollectives
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.schedules.template import EP_PHASES


@dataclass(frozen=True, slots=True)
class BarePrices:
    """Compute of the phases of a block without what collectives inside them add, and its products.

    `products`: seconds of the matrix products and of the core attention of each phase, alone.
    """

    compute: Mapping[tuple[Phase, Mode], PhaseCost]
    products: Mapping[Phase, tuple[float, float]]


def block_compute(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block."""
    return with_collectives(pricer, kind, bare_prices(pricer, kind, modes))


def bare_prices(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...], only: frozenset[Phase] | None = None
) -> BarePrices:
    """Compute of a block, collectives inside its phases left out; `only` some phases."""
    by_phase = {ph: ops for ph, ops in pricer.operators(kind).items() if only is None or ph in only}
    return BarePrices(
        {(phase, mode): pricer.phase(ops, mode) for phase, ops in by_phase.items() for mode in modes},
        {phase: _products_s(pricer, ops) for phase, ops in by_phase.items()} if _cuts(pricer, kind) else {},
    )


def with_collectives(
    pricer: Pricer, kind: BlockKind, bare: BarePrices
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block with collectives of tensor and context parallelism (eq. X6, X14, X15, O2, O3)."""
    experts = _has_experts(pricer, kind)
    exposed: dict[Phase, float] = {}
    if _cuts(pricer, kind):
        exposed = LayerCollectives(pricer.scenario, pricer.links, pricer.profile).exposed(
            pricer.shape, kind, pricer.tokens, bare.products
        )
    if experts and pricer.scenario.recompute == "full":
        exposed["mlp I"] = exposed.get("mlp I", 0.0) + _repeated_transfers_s(pricer)
    return {(kind, ph, mode): _later(cost, exposed.get(ph, 0.0)) for (ph, mode), cost in bare.compute.items()}


def _cuts(pricer: Pricer, kind: BlockKind) -> bool:
    plan, block = pricer.scenario.parallel, pricer.shape.block(kind)
    return block.layer is not None and plan.tp * plan.cp * (plan.expert_tp if block.routed else 1) > 1


def _has_experts(pricer: Pricer, kind: BlockKind) -> bool:
    return pricer.shape.block(kind).routed


def _later(cost: PhaseCost, exposed_s: float) -> PhaseCost:
    if not exposed_s:
        return cost
    return PhaseCost(cost.fixed_s + exposed_s, cost.row_s, exposed_s, cost.best_s, cost.worst_s + exposed_s)


def _repeated_transfers_s(pricer: Pricer) -> float:
    """Dispatch and combine of the forward that full recompute runs again, in the open (eq. X15)."""
    if pricer.scenario.parallel.ep == 1:
        return 0.0
    twice = [pricer.ep_phase(phase, "alone") for phase in ("dispatch F", "combine F")]
    return fsum(t.launch_s + max(t.nic_s, t.scale_up_s) for t in twice)


def block_transfers(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]
) -> dict[tuple[BlockKind, Phase, Mode], TransferCost]:
    """Expert-parallel transfers of a block; they have no quiet mode."""
    if pricer.scenario.parallel.ep == 1:
        return {}
    phases = [phase for phase in pricer.operators(kind) if phase in EP_PHASES]
    return {
        (kind, ph, mode): pricer.ep_phase(ph, mode)
        for ph in phases
        for mode in modes
        if mode != "sms_reserved"
    }


def _products_s(pricer: Pricer, operators: tuple[Operator, ...]) -> tuple[float, float]:
    """Seconds of the matrix products and of the attention among some operators, alone on all SMs."""
    products = attention = 0.0
    for op in operators:
        if op.recompute or not (op.cls in GEMM_CLASSES or op.cls.startswith("attention")):
            continue
        seconds = operator_seconds(op, pricer.cluster.accelerator, pricer.profile, SmContext()).seconds
        if op.cls in GEMM_CLASSES:
            products += seconds
        else:
            attention += seconds
    return products, attention
