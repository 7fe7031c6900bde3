"""Lower and upper bound of a step, from the same program that the engine runs (pure)."""

from __future__ import annotations

from moesim.simulator.engine.program import CompiledTemplate, PlacedStep, Program
from moesim.simulator.schedules import Step, longest_path, makespan

SENDS_BESIDE_AN_ACTION = 4
"""Activation and gradient, in and out: what may share a NIC with one action."""


def lower_bound_s(program: Program) -> float:
    """Seconds that the busiest resource needs at its best-case rates (docs/model.md, eq. B1).

    Per pipeline rank: its compute at datasheet peaks, or its payload at nominal link rates, whichever is
    longer, over all its actions; plus the optimizer at its best.
    """
    worst = 0.0
    for rank, steps in enumerate(program.ranks):
        compute = sum(_best_compute(program, step) for step in steps)
        payload = sum(_best_payload(program, step) for step in steps)
        worst = max(worst, max(compute, payload) + program.costs.sync[rank].best_s)
    return worst


def _best_compute(program: Program, step: PlacedStep) -> float:
    table = program.costs.compute
    return sum(
        cost.best_s
        for task in step.code.tasks
        if task.transfer is None and (cost := table.get((task.kind, task.phase, "&" in step.code.kind)))
    )


def _best_payload(program: Program, step: PlacedStep) -> float:
    table = program.costs.transfer
    return sum(
        table[task.kind, task.phase, "&" in step.code.kind].best_s
        for task in step.code.tasks
        if task.transfer is not None
    )


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
    return makespan(times) + max((sync.worst_s for sync in program.costs.sync), default=0.0)


def _worst(program: Program, step: PlacedStep) -> float:
    code: CompiledTemplate = step.code
    overlapped = "&" in code.kind
    total = SENDS_BESIDE_AN_ACTION * program.costs.send_s
    for task in code.tasks:
        microbatch = step.microbatches[task.side]
        cost = program.costs.compute.get((task.kind, task.phase, overlapped))
        if cost is not None and cost.fixed_s + cost.row_s > 0.0:
            factor = max(1.0, cost.worst_s / (cost.fixed_s + cost.row_s))
            total += task.most_ns[microbatch] * 1e-9 * factor
        if task.transfer is not None:
            price = program.costs.transfer[task.kind, task.phase, overlapped]
            alone = max(price.nic_s, price.scale_up_s)
            factor = max(1.0, price.worst_s / alone) if alone else 1.0
            total += price.launch_s + float(task.transfer.payload_ns[microbatch]) * 1e-9 * factor
    return total
