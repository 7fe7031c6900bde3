"""Finds the critical path: walks back from the end of the step through the work that decides its duration."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import CompiledTask
from moesim.simulator.engine.records import Execution, StepRecord


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of the critical path on one pipeline rank, nanoseconds."""

    rank: int
    step: str
    cause: str
    begin_ns: int
    end_ns: int
    task: CompiledTask | None = None
    """The task that ran; None for sends, the notify part of a transfer and the end of the step."""
    payload: bool = False
    """Whether the segment is the payload of a transfer rather than compute."""
    member: int = 0
    """The member that computed."""
    place: tuple[int, int] | None = None
    """(position of the action on its rank, number of `task` in the action)."""


def critical_path(execution: Execution) -> list[Segment]:
    """Segments from time 0 to the end of the step, in order and without gaps.

    At a barrier the path continues with the member that arrived last, at a wait with the rank that sent.
    """
    walker = _Walker(execution)
    return walker.walk()[::-1]


def seconds_by_cause(path: list[Segment]) -> list[tuple[str, float]]:
    """Seconds of the path per cause, largest first (ties by name)."""
    total: defaultdict[str, int] = defaultdict(int)
    for segment in path:
        total[segment.cause] += segment.end_ns - segment.begin_ns
    return sorted(((c, ns / NS) for c, ns in total.items() if ns), key=lambda row: (-row[1], row[0]))


class _Walker:
    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.path: list[Segment] = []
        self.producers: dict[tuple[str, int, int], tuple[int, int, int | None]] = {}
        for rank, records in enumerate(execution.ranks):
            for position, record in enumerate(records):
                code, (forward, backward) = record.step.code, record.step.stages
                fmb, bmb = record.step.microbatches
                if forward >= 0:
                    self.producers["F", forward + 1, fmb] = (rank, position, code.forward_out)
                if backward >= 0 and code.kind != "W":
                    self.producers["B", backward - 1, bmb] = (rank, position, code.backward_out)

    def walk(self) -> list[Segment]:
        rank, time = self._end_of_step()
        position = len(self.execution.ranks[rank]) - 1
        member = int(self.execution.ranks[rank][position].free.argmax()) if position >= 0 else 0
        while position >= 0 and time > 0:
            record = self.execution.ranks[rank][position]
            if int(record.free[member]) == time:  # the rank waited for its own sends
                self._add(Segment(rank, record.step.label, "pipeline send", int(record.end[member]), time))
                time = int(record.end[member])
            tasks = [n for n, e in enumerate(record.ends) if int(e[member]) == time]
            if tasks:
                member, time = self._tasks(rank, position, tasks[-1], member)
            rank, position, time = self._before(rank, position, record, member, time)
        return self.path

    def _add(self, segment: Segment) -> None:
        if segment.end_ns > segment.begin_ns:
            self.path.append(segment)

    def _end_of_step(self) -> tuple[int, int]:
        syncs = self.execution.syncs
        rank = max(range(len(syncs)), key=lambda r: syncs[r].gather[1])
        last = syncs[rank]
        self._add(Segment(rank, "end", "parameter gather", *last.gather))
        self._add(Segment(rank, "end", "optimizer", *last.optimizer))
        self._add(Segment(rank, "end", "gradient norm", *last.norm))
        rank = max(range(len(syncs)), key=lambda r: syncs[r].reduce[1])
        self._add(Segment(rank, "end", "gradient reduction", *syncs[rank].reduce))
        ready = syncs[rank].reduce[0]
        schedule = self.execution.program.schedule
        rank = max(schedule.holders(rank), key=lambda r: syncs[r].ready_ns)
        return rank, ready

    def _tasks(self, rank: int, position: int, number: int, member: int) -> tuple[int, int]:
        """Walk back inside one action; return the member and the time at its start."""
        record = self.execution.ranks[rank][position]
        label, code = record.step.label, record.step.code
        while True:
            task, end = code.tasks[number], int(record.ends[number][member])
            place = (position, number)
            row_of = task.rows_ns[record.step.microbatches[task.side]]
            before = [*task.deps, *self._stream_before(record, number)]
            if task.transfer is not None:
                meet = record.begins[number]
                launch = meet + task.transfer.launch_ns
                self._add(Segment(rank, label, task.phase, launch, end, task, payload=True, place=place))
                self._add(Segment(rank, label, "notify", meet, min(launch, end)))
                ready = record.start
                for d in before:
                    ready = np.maximum(ready, record.ends[d])
                ready = ready + row_of
                member = int(ready.argmax())
                end = int(ready[member])
            row = int(row_of[member])
            begin = end - row
            self._add(Segment(rank, label, task.phase, begin, end, task, member=member, place=place))
            follow = [d for d in before if int(record.ends[d][member]) == begin]
            if not follow:
                return member, begin
            number = follow[-1]

    @staticmethod
    def _stream_before(record: StepRecord, number: int) -> list[int]:
        """The previous task on the same stream, if there is one."""
        before = record.step.code.before[number]
        return [] if before is None else [before]

    def _before(
        self, rank: int, position: int, record: StepRecord, member: int, time: int
    ) -> tuple[int, int, int]:
        """(rank, position, time) of the action, its own or a neighbour's, that an action waited for."""
        records = self.execution.ranks[rank]
        if position > 0 and int(records[position - 1].free[member]) == time:
            return rank, position - 1, time
        (forward, backward), (fmb, bmb) = record.step.stages, record.step.microbatches
        keys = []
        if forward > 0:
            keys.append(("F", forward, fmb))
        if backward >= 0 and record.step.code.kind != "W":
            keys.append(("B", backward, bmb))
        best: tuple[int, int, int] | None = None
        for key in keys:
            if key in self.producers:
                source, at, out = self.producers[key]
                sender = self.execution.ranks[source][at]
                left = int((sender.end if out is None else sender.ends[out])[member])
                if best is None or left > best[2]:
                    best = (source, at, left)
        if best is None or best[2] > time:
            return rank, -1, 0
        self._add(Segment(rank, record.step.label, "pipeline send", best[2], time))
        return best
