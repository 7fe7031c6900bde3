"""Runs a program, and lists the times of an execution action by action."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.program import PlacedStep, Program
from moesim.simulator.engine.records import Execution
from moesim.simulator.engine.registry import engine_of


def execute(program: Program) -> Execution:
    """The only group of a step, run on the default engine."""
    return engine_of().execute([program])[0]


class StepRecord(NamedTuple):
    """Times of one action, named as in `RecordedTimes`, with those of its tasks."""

    step: PlacedStep
    start: IntArray
    end: IntArray
    free: IntArray
    ends: list[IntArray]
    begins: list[int]
    finishes: list[int]


def records_of(execution: Execution) -> list[list[StepRecord]]:
    """One record for every step of every pipeline rank."""
    table, times = execution.table, execution.times
    begins, finishes, ends = times.begins.tolist(), times.finishes.tolist(), list(times.ends)
    rows = zip(table.steps, times.start, times.end, times.free, strict=True)
    bounds = pairwise(table.first_task.tolist())
    flat = [
        StepRecord(step, start, end, free, ends[a:b], begins[a:b], finishes[a:b])
        for (step, start, end, free), (a, b) in zip(rows, bounds, strict=True)
    ]
    return [flat[a:b] for a, b in pairwise(table.first_action.tolist())]
