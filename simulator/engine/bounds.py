"""Lower and upper bound of a step, from the same programs that the engine runs (pure).

Both bounds read the engine's inputs: the duration of every task with its member's speed, jitter, faults and
received rows, the link map with the bandwidth that faults left, and the slow-downs of sends and of the end of
the step. They therefore hold for every scenario (docs/model.md, eq. B1 to B4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.engine.contention import LinkContention
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import TRANSFER_STREAMS, CompiledTask, CompiledTemplate, Program
from moesim.simulator.schedules import Step, longest_path, makespan
from moesim.simulator.schedules.template import Stream

ROUNDING_NS = 1.0
"""The engine rounds to whole nanoseconds, so a transfer may end this much earlier or later than priced."""


def lower_bound_s(programs: Sequence[Program]) -> float:
    """Seconds that the busiest resource needs at its best-case rates (docs/model.md, eq. B1).

    `programs`: the programs of all groups. The resources are every GPU's compute and every rank's
    streams of transfers, over all actions; the slowest optimizer at its best-case rate follows.
    """
    busiest = max(_busiest_ns(program) for program in programs)
    return (busiest + max(_optimizer_ns(program) for program in programs)) / NS


def upper_bound_s(programs: Sequence[Program]) -> float:
    """Seconds with everything in series at worst-case rates, skew and shared links included (eq. B2 to B4).

    `programs`: the programs of all groups. An action lasts as long as its phases on its slowest member plus
    its own sends; actions keep the schedule's order (longest path). Every transfer includes the time that
    transfers of other groups occupy its links; the time of sends on those links is added once. The end of
    the step follows.
    """
    contention = LinkContention.of(programs)
    last = max(_in_series_ns(program, number, contention) for number, program in enumerate(programs))
    return (last + _end_ns(programs)) / NS


# -- best case ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Least:
    """Nanoseconds of one side of a template at best-case rates."""

    compute: FloatArray
    """[micro-batches, members]"""
    streams: Mapping[Stream, FloatArray]
    """Each stream of transfers [micro-batches]."""


def _busiest_ns(program: Program) -> float:
    by_template: dict[int, tuple[_Least, _Least]] = {}
    most = 0.0
    for steps in program.ranks:
        compute, streams = np.zeros(program.members), dict.fromkeys(TRANSFER_STREAMS, 0.0)
        for step in steps:
            sides = by_template.get(id(step.code))
            if sides is None:
                sides = by_template[id(step.code)] = (
                    _least(program, step.code, 0),
                    _least(program, step.code, 1),
                )
            for side, microbatch in zip(sides, step.microbatches, strict=True):
                if microbatch >= 0:
                    compute += side.compute[microbatch]
                    for name, least in side.streams.items():
                        streams[name] += float(least[microbatch])
        most = max(most, float(compute.max()), *streams.values())
    return most


def _least(program: Program, code: CompiledTemplate, side: int) -> _Least:
    count = program.schedule.microbatches
    compute = np.zeros((count, program.members))
    streams: dict[Stream, FloatArray] = {name: np.zeros(count) for name in TRANSFER_STREAMS}
    for task in code.tasks:
        if task.side != side:
            continue
        # Best-case prices are for load 1: scale the engine's durations by best price over price.
        own = task.rows_ns * _best_share(task)
        if task.transfer is None:
            compute += own
            continue
        cost = task.transfer.cost
        share = _share(cost.best_s, max(cost.nic_s, cost.scale_up_s))
        payload = np.maximum(np.array(task.transfer.payload_ns) * share - ROUNDING_NS, 0.0)
        streams[task.stream] += own.min(axis=1) + task.transfer.launch_ns + payload
    return _Least(compute, streams)


def _best_share(task: CompiledTask) -> float:
    return _share(task.price.best_s, task.price.fixed_s + task.price.row_s)


def _share(best_s: float, seconds: float) -> float:
    return min(1.0, best_s / seconds) if seconds > 0.0 else 1.0


def _optimizer_ns(program: Program) -> float:
    """The norm is a barrier, so the slowest rank's optimizer starts after the busiest rank's actions."""
    return max(min(float(round(s.optimizer_s * NS)), s.best_s * NS) for s in program.costs.sync)


# -- worst case --------------------------------------------------------------------------------------


def _in_series_ns(program: Program, number: int, contention: LinkContention) -> float:
    """End of a group's last action with everything in series, plus the time that sends occupy its links."""
    worst: dict[int, tuple[FloatArray, FloatArray]] = {}
    costs: dict[tuple[int, Step], float] = {}
    for rank, (steps, placed) in enumerate(zip(program.schedule.ranks, program.ranks, strict=True)):
        for step, place in zip(steps, placed, strict=True):
            sides = worst.get(id(place.code))
            if sides is None:
                sides = worst[id(place.code)] = _worst(program, number, rank, place.code, contention)
            costs[rank, step] = sum(
                float(side[m]) for side, m in zip(sides, place.microbatches, strict=True) if m >= 0
            ) + sum(contention.send_ns(number, *hop) + ROUNDING_NS for hop in program.hops(rank, place))
    times = longest_path(program.schedule, lambda rank, step: costs[rank, step])
    return makespan(times) + contention.others_sends_ns(number)


def _worst(
    program: Program, number: int, rank: int, code: CompiledTemplate, contention: LinkContention
) -> tuple[FloatArray, FloatArray]:
    """Nanoseconds of all phases of each side in series, for the slowest member, by micro-batch."""
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
            shared = contention.transfer_ns(number, rank, task.phase, task.transfer)
            payload = np.where(alone > 0.0, np.maximum(alone, shared) + ROUNDING_NS, 0.0)
            total[task.side][:] += task.transfer.launch_ns + payload
    return total


def _growth(worst_s: float, seconds: float) -> float:
    return max(1.0, worst_s / seconds) if seconds > 0.0 else 1.0


def _end_ns(programs: Sequence[Program]) -> float:
    """Reduction, norm, optimizer and gather at their worst, with the faults of every group (eq. E5).

    Because the norm is a barrier, one rank's reduction may delay the optimizer of another.
    """
    reduce_ns = rest_ns = 0.0
    for rank, sync in enumerate(programs[0].costs.sync):
        growth = _growth(sync.worst_s, sync.total_s) * NS
        slow = max(program.link_map.sync_slowness(rank) for program in programs)
        reduce_ns = max(reduce_ns, sync.reduce_s * slow * growth)
        rest_ns = max(rest_ns, (sync.norm_s + sync.optimizer_s + sync.gather_s * slow) * growth)
    return reduce_ns + rest_ns + 4.0 * ROUNDING_NS
