"""Prices of one block by phase and mode: what the table of a scenario and a plan search are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.simulator.chunk import EP_PHASES
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.model.operator import BlockKind, Phase

if TYPE_CHECKING:
    from moesim.simulator.pricing import Pricer


def block_compute(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...], only: frozenset[Phase] | None = None
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block; `only` some phases."""
    layer = kind in ("dense", "moe", "mtp")
    compute: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    for phase, operators in pricer.operators(kind).items():
        if only is None or phase in only:
            exposed = pricer.tensor_parallel_s(phase) if layer else 0.0
            compute |= {(kind, phase, mode): pricer.phase(operators, mode, exposed) for mode in modes}
    return compute


def block_transfers(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]
) -> dict[tuple[BlockKind, Phase, Mode], TransferCost]:
    """Expert-parallel transfers of a block; they have no quiet mode."""
    if pricer.scenario.parallel.ep == 1:
        return {}
    phases = [phase for phase in pricer.operators(kind) if phase in EP_PHASES]
    return {(kind, ph, mode): pricer.ep_phase(ph, mode) for ph in phases for mode in modes if mode != "quiet"}
