"""Lower and upper bound of a step, from the same programs that the engine runs (pure).

Both read what the engine reads: durations of every task with its member's speed, jitter, faults and
received rows, the links of the link_map with what faults left of them, and the slow-downs of sends and of the
end of the step. So they hold whatever a scenario states (docs/model.md, eq. B1 to B4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.engine.crowding import Crowding
from moesim.simulator.engine.program import NS, CompiledTask, CompiledTemplate, Program
from moesim.simulator.schedules import Step, longest_path, makespan

ROUNDING_NS = 1.0
"""The engine counts whole nanoseconds: a transfer may end that much earlier or later than its prices say."""


def lower_bound_s(programs: Sequence[Program]) -> float:
    """Seconds that the busiest resource needs at its best-case rates (docs/model.md, eq. B1).

    `programs`: those of all groups. The resources are every GPU's compute and every rank's communication
    stream, over all actions; then comes the slowest optimizer at its best.
    """
    busiest = max(_busiest_ns(program) for program in programs)
    return (busiest + max(_optimizer_ns(program) for program in programs)) / NS


def upper_bound_s(programs: Sequence[Program]) -> float:
    """Seconds with everything in series at worst-case rates, skew and shared links included (eq. B2 to B4).

    `programs`: those of all groups. Every action costs the sum of its phases for its slowest member and of
    its own sends; actions keep the schedule's order (longest path). What other groups' transfers take of a
    link is part of every transfer, what sends take of it is added once. The end of the step comes after.
    """
    crowding = Crowding.of(programs)
    last = max(_in_series_ns(program, number, crowding) for number, program in enumerate(programs))
    return (last + _end_ns(programs)) / NS


# -- best case ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Least:
    """Nanoseconds of one side of a template at best-case rates."""

    compute: FloatArray
    """[micro-batches, members]"""
    stream: FloatArray
    """Communication stream [micro-batches]."""


def _busiest_ns(program: Program) -> float:
    found: dict[int, tuple[_Least, _Least]] = {}
    most = 0.0
    for steps in program.ranks:
        compute, stream = np.zeros(program.members), 0.0
        for step in steps:
            sides = found.get(id(step.code))
            if sides is None:
                sides = found[id(step.code)] = _least(program, step.code, 0), _least(program, step.code, 1)
            for side, microbatch in zip(sides, step.microbatches, strict=True):
                if microbatch >= 0:
                    compute += side.compute[microbatch]
                    stream += float(side.stream[microbatch])
        most = max(most, float(compute.max()), stream)
    return most


def _least(program: Program, code: CompiledTemplate, side: int) -> _Least:
    count = program.schedule.microbatches
    compute, stream = np.zeros((count, program.members)), np.zeros(count)
    for task in code.tasks:
        if task.side != side:
            continue
        # Best-case rates are those of load 1: they are to the engine's as the prices are.
        own = task.rows_ns * _best_share(task)
        if task.transfer is None:
            compute += own
            continue
        cost = task.transfer.cost
        share = _share(cost.best_s, max(cost.nic_s, cost.scale_up_s))
        payload = np.maximum(np.array(task.transfer.payload_ns) * share - ROUNDING_NS, 0.0)
        stream += own.min(axis=1) + task.transfer.launch_ns + payload
    return _Least(compute, stream)


def _best_share(task: CompiledTask) -> float:
    return _share(task.price.best_s, task.price.fixed_s + task.price.row_s)


def _share(best_s: float, seconds: float) -> float:
    return min(1.0, best_s / seconds) if seconds > 0.0 else 1.0


def _optimizer_ns(program: Program) -> float:
    """The norm is a barrier, so the slowest rank's optimizer comes after the busiest rank's actions."""
    return max(min(float(round(s.optimizer_s * NS)), s.best_s * NS) for s in program.costs.sync)


# -- worst case --------------------------------------------------------------------------------------


def _in_series_ns(program: Program, number: int, crowding: Crowding) -> float:
    """End of a group's last action with everything in series, and what sends take of its links."""
    worst: dict[int, tuple[FloatArray, FloatArray]] = {}
    costs: dict[tuple[int, Step], float] = {}
    for rank, (steps, placed) in enumerate(zip(program.schedule.ranks, program.ranks, strict=True)):
        for step, place in zip(steps, placed, strict=True):
            sides = worst.get(id(place.code))
            if sides is None:
                sides = worst[id(place.code)] = _worst(program, number, rank, place.code, crowding)
            costs[rank, step] = sum(
                float(side[m]) for side, m in zip(sides, place.microbatches, strict=True) if m >= 0
            ) + sum(crowding.send_ns(number, *hop) + ROUNDING_NS for hop in program.hops(rank, place))
    times = longest_path(program.schedule, lambda rank, step: costs[rank, step])
    return makespan(times) + crowding.others_sends_ns(number)


def _worst(
    program: Program, number: int, rank: int, code: CompiledTemplate, crowding: Crowding
) -> tuple[FloatArray, FloatArray]:
    """All phases of each side in series, for the slowest member, by micro-batch."""
    count = program.schedule.microbatches
    total = np.zeros(count), np.zeros(count)
    for task in code.tasks:
        price = task.price
        slowest = task.rows_ns.max(axis=1)
        total[task.side][:] += slowest * _growth(price.worst_s, price.fixed_s + price.row_s)
        if task.transfer is not None:
            cost = task.transfer.cost
            alone = np.array(task.transfer.payload_ns) * _growth(
                cost.worst_s, max(cost.nic_s, cost.scale_up_s)
            )
            shared = crowding.transfer_ns(number, rank, task.phase, task.transfer)
            payload = np.where(alone > 0.0, np.maximum(alone, shared) + ROUNDING_NS, 0.0)
            total[task.side][:] += task.transfer.launch_ns + payload
    return total


def _growth(worst_s: float, seconds: float) -> float:
    return max(1.0, worst_s / seconds) if seconds > 0.0 else 1.0


def _end_ns(programs: Sequence[Program]) -> float:
    """Reduction, norm, optimizer and gather at their worst, with the faults of every group (eq. E5).

    The norm is a barrier: one rank's reduction may be followed by another's optimizer.
    """
    reduce_ns = rest_ns = 0.0
    for rank, sync in enumerate(programs[0].costs.sync):
        growth = _growth(sync.worst_s, sync.total_s) * NS
        slow = max(program.link_map.sync_slowness(rank) for program in programs)
        reduce_ns = max(reduce_ns, sync.reduce_s * slow * growth)
        rest_ns = max(rest_ns, (sync.norm_s + sync.optimizer_s + sync.gather_s * slow) * growth)
    return reduce_ns + rest_ns + 4.0 * ROUNDING_NS
