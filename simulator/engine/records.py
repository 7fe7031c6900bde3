"""The records that an engine returns: the times of every task, transfer, send and end of step of a program.

Times are integer nanoseconds from the start of the step; vectors have one value a member. This module names
no engine, so code that reads an execution works with every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import PlacedStep, Program


@dataclass(slots=True)
class StepRecord:
    """Times of one schedule step in nanoseconds, one value a member."""

    step: PlacedStep
    start: IntArray
    end: IntArray
    """When the last task of the action had ended."""
    free: IntArray
    """When the next action may start, which is later than `end` where the rank waits for its own sends."""
    ends: list[IntArray]
    """End of every task of the template."""
    begins: list[int]
    """When the last member reached the barrier of each transfer; -1 for compute tasks."""
    finishes: list[int]
    """When the slowest member had its payload; -1 for compute tasks."""


@dataclass(slots=True)
class SyncRecord:
    """End of the step on one pipeline rank, with the begin and end of each part in nanoseconds."""

    ready_ns: int
    reduce: tuple[int, int]
    norm: tuple[int, int]
    optimizer: tuple[int, int]
    gather: tuple[int, int]


@dataclass(slots=True)
class SendRecord:
    """One pipeline send between ranks, with the begin and end of its payload in nanoseconds."""

    source: int
    target: int
    label: str
    start: int
    end: int


@dataclass(slots=True)
class Execution:
    """The execution of one group of a step; `engine/protocol.py` lists what an engine guarantees for it.

    `ranks[r]`: one record for every step of `program.ranks[r]`, in that order. `syncs[r]`: the end of the
    step on pipeline rank r. `sends`: every pipeline send between ranks. `carried_bytes`: bytes that crossed
    each link of the cluster. `events`: number of tasks that ran. `end_ns`, `syncs` and `carried_bytes` cover
    all groups together.
    """

    program: Program
    ranks: list[list[StepRecord]]
    syncs: list[SyncRecord]
    sends: list[SendRecord]
    end_ns: int
    carried_bytes: FloatArray
    events: int

    @property
    def last_ns(self) -> int:
        """When the last action of the group ended and its rank was free again."""
        return max(free_ns(records) for records in self.ranks)


def free_ns(records: Sequence[StepRecord]) -> int:
    """When a pipeline rank was free after its last action; 0 for a rank without actions."""
    return int(records[-1].free.max()) if records else 0


def step_time_s(executions: Sequence[Execution]) -> float:
    """Seconds of the step, which all groups run together."""
    return executions[0].end_ns / NS


def last_group(executions: Sequence[Execution]) -> Execution:
    """The execution of the group whose last action ended last; of equal ones the first."""
    return max(executions, key=lambda execution: execution.last_ns)
