"""What an engine returns: when every task, transfer, send and end of step of a program ran.

Times are integer nanoseconds from the start of the step; vectors have one value a member. No engine is known
here, so whatever reads an execution works with every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.program import NS, PlacedStep, Program


@dataclass(slots=True)
class StepRecord:
    """When one schedule step ran: nanoseconds, one value a member."""

    step: PlacedStep
    start: IntArray
    end: IntArray
    """When the last task of the action had ended."""
    free: IntArray
    """When the next action may start: later than `end` where the rank waits for its own sends."""
    ends: list[IntArray]
    """End of every task of the template."""
    begins: list[int]
    """When the last member reached the barrier of each transfer; -1 for compute tasks."""
    finishes: list[int]
    """When the slowest member had its payload; -1 for compute tasks."""


@dataclass(slots=True)
class SyncRecord:
    """End of the step on one pipeline rank: when each part began and ended (nanoseconds)."""

    ready_ns: int
    reduce: tuple[int, int]
    norm: tuple[int, int]
    optimizer: tuple[int, int]
    gather: tuple[int, int]


@dataclass(slots=True)
class SendRecord:
    """One pipeline send: from rank to rank, nanoseconds of its payload on the wire."""

    source: int
    target: int
    label: str
    start: int
    end: int


@dataclass(slots=True)
class Execution:
    """What happened to one group of a step (`engine/protocol.py` says what an engine promises of it).

    `ranks[r]`: one record for every step of `program.ranks[r]`, in that order. `syncs[r]`: the end of the
    step on pipeline rank r. `sends`: every pipeline send between ranks. `carried_bytes`: bytes that crossed
    each link of the cluster. `events`: tasks that ran. `end_ns`, `syncs` and `carried_bytes` are those of
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
    """When a pipeline rank was free after its last action; 0 for a rank without any."""
    return int(records[-1].free.max()) if records else 0


def step_time_s(executions: Sequence[Execution]) -> float:
    """Seconds of the step that all groups make together."""
    return executions[0].end_ns / NS


def last_group(executions: Sequence[Execution]) -> Execution:
    """The group whose last action ended last (the first of those that end together)."""
    return max(executions, key=lambda execution: execution.last_ns)
