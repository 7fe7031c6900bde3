"""Prices of one block by phase and mode: what the table of a scenario and a plan search are made of."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum
from typing import TYPE_CHECKING

from moesim.simulator.chunk import EP_PHASES
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.evidence import GEMM_CLASSES
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.layer_collectives import LayerCollectives
from moesim.simulator.model.operator import BlockKind, Operator, Phase

if TYPE_CHECKING:
    from moesim.simulator.pricing import Pricer


def block_compute(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...], only: frozenset[Phase] | None = None
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block; `only` some phases."""
    layer = kind in ("dense", "moe", "mtp")
    plan = pricer.scenario.parallel
    by_phase = pricer.operators(kind)
    experts = pricer.shape.moe is not None and kind in ("moe", "mtp")
    split = plan.tp * plan.cp * (plan.expert_tp if experts else 1)
    exposed = exposed_s(pricer, by_phase, experts) if layer and split > 1 else {}
    if experts and pricer.scenario.recompute == "full":
        exposed["mlp I"] = exposed.get("mlp I", 0.0) + _repeated_transfers_s(pricer)
    compute: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    for phase, operators in by_phase.items():
        if only is None or phase in only:
            seconds = exposed.get(phase, 0.0)
            compute |= {(kind, phase, mode): pricer.phase(operators, mode, seconds) for mode in modes}
    return compute


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
    return {(kind, ph, mode): pricer.ep_phase(ph, mode) for ph in phases for mode in modes if mode != "quiet"}


def exposed_s(
    pricer: Pricer, operators: Mapping[Phase, tuple[Operator, ...]], experts: bool
) -> dict[Phase, float]:
    """Collectives of tensor and context parallelism inside the phases of a layer (eq. X6, X14, O2, O3)."""
    seconds = {phase: _products_s(pricer, ops) for phase, ops in operators.items()}
    return LayerCollectives(pricer.scenario, pricer.links, pricer.profile).exposed(
        pricer.shape, pricer.tokens, seconds, experts=experts
    )


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
