"""Lower and upper bound of a step, from the same program that the engine runs (pure)."""

from __future__ import annotations

from math import fsum

from moesim.simulator.engine.program import PlacedStep, Program
from moesim.simulator.schedules import Step, longest_path, makespan

SENDS_BESIDE_AN_ACTION = 4
"""Activation and gradient, in and out: what may share a NIC with one action."""


def lower_bound_s(program: Program) -> float:
    """Seconds that the busiest resource needs at its best-case rates (docs/model.md, eq. B1).

    Per pipeline rank: its compute at the best credible rates, or its payload at nominal link rates,
    whichever is longer, over all its actions; plus the optimizer at its best.
    """
    most = 0.0
    for rank, steps in enumerate(program.ranks):
        compute = fsum(step.code.best_s[0] for step in steps)
        payload = fsum(step.code.best_s[1] for step in steps)
        most = max(most, max(compute, payload) + program.costs.sync[rank].best_s)
    return most


def upper_bound_s(program: Program) -> float:
    """Seconds with everything of an action in series at worst-case rates, skew included (eq. B2).

    Every action costs the sum of its phases for its slowest member plus the sends that may share its
    NIC; actions keep the schedule's order (longest path), and the end of the step is in series too.
    """
    costs: dict[tuple[int, Step], float] = {}
    for rank, (steps, placed) in enumerate(zip(program.schedule.ranks, program.ranks, strict=True)):
        for step, place in zip(steps, placed, strict=True):
            costs[rank, step] = _worst(program, place)
    times = longest_path(program.schedule, lambda rank, step: costs[rank, step])
    sync = program.costs.sync
    # The norm is a barrier: one rank's reduction may be followed by another's optimizer.
    last = max(s.reduce_s for s in sync) + max(s.worst_s - s.reduce_s for s in sync)
    return makespan(times) + last


def _worst(program: Program, step: PlacedStep) -> float:
    total = SENDS_BESIDE_AN_ACTION * program.costs.send_s
    for side in (0, 1):
        if step.microbatches[side] >= 0:
            total += float(step.code.worst_s[side][step.microbatches[side]])
    return total
