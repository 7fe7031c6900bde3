"""Seconds of one block's actions, and the part of a plan that decides them."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

from moesim.simulator.cost.table import CostTable
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.template import EP_PHASES

ACTIONS = ("F", "I", "W")

PHASES_OF: dict[str, tuple[Phase, ...]] = {
    "F": ("attn F", "dispatch F", "mlp F", "combine F"),
    "I": ("combine B", "mlp I", "dispatch B", "attn I"),
    "W": ("mlp W", "attn W"),
}


ROUTED: frozenset[Phase] = frozenset(
    {"mlp F", "mlp I", "mlp W", "dispatch F", "combine F", "combine B", "dispatch B"}
)
NOT_ROUTED: frozenset[Phase] = frozenset({"attn F", "attn I", "attn W"})
"""Phases of a MoE block that do, and do not, depend on the expert-parallel degree."""


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The part of a plan that decides the operators of one GPU, apart from precision and recompute."""

    tp: int
    cp: int
    ep: int
    expert_tp: int
    microbatch: int

    @classmethod
    def of(cls, plan: ParallelPlan) -> LayerSplit:
        """The layer split of a plan."""
        return cls(plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.microbatch)


def action_seconds(table: CostTable, kind: BlockKind, kept: float = 1.0) -> dict[str, tuple[float, float]]:
    """Seconds (compute, small kernels of transfers) of a block's F, I and W on all SMs, without transfers.

    `kept`: share of the routed rows that are computed.
    """
    found = {}
    for action in ACTIONS:
        costs = [(phase, table.compute.get((kind, phase, "alone"))) for phase in PHASES_OF[action]]
        found[action] = tuple(
            fsum(
                c.fixed_s + kept * c.row_s
                for phase, c in costs
                if c is not None and (phase in EP_PHASES) == small
            )
            for small in (False, True)
        )
    return found  # type: ignore[return-value]
