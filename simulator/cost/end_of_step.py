"""What a framework hides of the data-parallel collectives at the ends of a step (docs/model.md, eq. O4)."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from moesim.simulator.cost.overlap import Beside, behind_window
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.schedules import Schedule


def behind_compute(
    pricer: Pricer, kinds: Sequence[BlockKind], schedule: Schedule, reduce_s: float, gather_s: float
) -> tuple[float, float]:
    """Seconds left of a rank's reduction behind its last backward and of its gather behind its first forward.

    `kinds`: blocks of the rank; `reduce_s` and `gather_s`: seconds alone (eq. O4).
    """
    plan, recipe = pricer.scenario.parallel, pricer.scenario.recipe
    copies, lost = len(schedule.routes), pricer.profile.lost_beside_nccl.value
    seconds = {kind: passes_s(pricer, kind) for kind in sorted(set(kinds))}
    passes = min(schedule.pp, schedule.microbatches) if plan.vpp > 1 else 1
    forward_s, backward_s = (passes * fsum(seconds[kind][i] for kind in kinds) for i in (0, 1))
    # Without ZeRO the reduction is an all-reduce: both rings over the gradients.
    reductions = ("reduce_scatter", "all_gather") if plan.zero_stage == 0 else ("reduce_scatter",)
    sizes = BYTES_PER_ELEMENT[recipe.gradient_reduce], BYTES_PER_ELEMENT[recipe.parameter_gather]
    reduced = Beside(lost, slower_beside(pricer, reductions, kinds, sizes[0], copies))
    gathered = Beside(lost, slower_beside(pricer, ("all_gather",), kinds, sizes[1], copies))
    return (
        behind_window(reduce_s, backward_s, len(kinds), reduced),
        behind_window(gather_s, forward_s, len(kinds), gathered),
    )


def slower_beside(
    pricer: Pricer, names: Sequence[str], kinds: Sequence[BlockKind], element_bytes: float, copies: int
) -> float:
    """How many times as long data-parallel collectives, block by block, take beside compute (eq. O8).

    1 where the profile has not measured it. Only the rings of the dense parameters were.
    """
    alone = longer = 0.0
    ring = pricer.rings(copies)[0]
    for kind in kinds:
        dense, expert = (held * element_bytes for held in pricer.block_parameters(kind))
        alone += len(names) * pricer.data_parallel_s(dense, expert, copies)
        longer += fsum(pricer.longer_beside(name, dense, ring) for name in names)
    return 1.0 + longer / alone if alone else 1.0


def passes_s(pricer: Pricer, kind: BlockKind) -> tuple[float, float]:
    """(forward, backward) compute of one block and micro-batch alone."""
    priced = {phase: pricer.phase(ops, "alone") for phase, ops in pricer.operators(kind).items()}
    forward = fsum(c.fixed_s + c.row_s for p, c in priced.items() if p.endswith(" F"))
    return forward, fsum(c.fixed_s + c.row_s for c in priced.values()) - forward
