"""Prices of one block by phase and mode: what the table of a scenario and a plan search are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.simulator.chunk import EP_PHASES
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.evidence import GEMM_CLASSES
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.layer_collectives import LayerCollectives
from moesim.simulator.model.operator import BlockKind, Operator, Phase

if TYPE_CHECKING:
    from moesim.simulator.pricing import Pricer


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
    """Compute of a block, collectives of tensor and context parallelism included (eq. X6, O2, O3)."""
    if not _cuts(pricer, kind):
        return {(kind, phase, mode): cost for (phase, mode), cost in bare.compute.items()}
    exposed = LayerCollectives(pricer.scenario, pricer.links, pricer.profile).exposed(
        pricer.shape, pricer.tokens, bare.products
    )
    return {(kind, ph, mode): _later(cost, exposed.get(ph, 0.0)) for (ph, mode), cost in bare.compute.items()}


def _cuts(pricer: Pricer, kind: BlockKind) -> bool:
    plan = pricer.scenario.parallel
    return kind in ("dense", "moe", "mtp") and plan.tp * plan.cp > 1


def _later(cost: PhaseCost, exposed_s: float) -> PhaseCost:
    if not exposed_s:
        return cost
    return PhaseCost(cost.fixed_s + exposed_s, cost.row_s, exposed_s, cost.best_s, cost.worst_s + exposed_s)


def block_transfers(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]
) -> dict[tuple[BlockKind, Phase, Mode], TransferCost]:
    """Expert-parallel transfers of a block; they have no quiet mode."""
    if pricer.scenario.parallel.ep == 1:
        return {}
    phases = [phase for phase in pricer.operators(kind) if phase in EP_PHASES]
    return {(kind, ph, mode): pricer.ep_phase(ph, mode) for ph in phases for mode in modes if mode != "quiet"}


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
