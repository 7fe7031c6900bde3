"""Cached prices of a job's phases, and the price of a phase as the sum of its operators' prices."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.price_evidence import combined
from moesim.simulator.cost.table import Mode, PhaseCost
from moesim.simulator.model.operator import BlockKind, Operator, Phase

PhaseKey: TypeAlias = tuple[BlockKind, Phase, Mode]


@dataclass(frozen=True, slots=True)
class PhaseMemo:
    """Cached prices of the phases of a job, and the entries of the profile that they depend on."""

    costs: dict[PhaseKey, tuple[OperatorCost, ...]] = field(default_factory=dict)
    phases: dict[PhaseKey, PhaseCost] = field(default_factory=dict)
    dependencies: dict[PhaseKey, frozenset[str]] = field(default_factory=dict)
    loads: dict[PhaseKey, Mapping[Hashable, tuple[float, float]]] = field(default_factory=dict)
    """Seconds by the load that they put on the board (`load_clock`)."""


def phase_cost(operators: Iterable[Operator], costs: Iterable[OperatorCost]) -> PhaseCost:
    """Sum of operators' prices, split into the part that grows with routed rows and the rest."""
    fixed = row = best = worst = 0.0
    evidence = []
    for operator, cost in zip(operators, costs, strict=True):
        best += cost.best_seconds
        worst += cost.worst_seconds
        if operator.per_received_row:
            row += cost.seconds
        else:
            fixed += cost.seconds
        evidence.append((cost.evidence, 1.0))
    return PhaseCost(fixed, row, 0.0, best, worst, evidence=combined(evidence))
