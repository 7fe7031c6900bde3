"""Finds the critical path: walks back from the end of the step through the work that decides its duration."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import NamedTuple

import numpy as np

from moesim.simulator.engine.program import NS, CompiledTask, CompiledTemplate, PlacedStep
from moesim.simulator.engine.records import Execution, barriers


class Segment(NamedTuple):
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


_segment = partial(tuple.__new__, Segment)
"""A segment from a tuple of all its fields, in half the time."""


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
    """Walks from action to action by their numbers in the execution's table."""

    def __init__(self, execution: Execution) -> None:
        self.execution, self.times = execution, execution.times
        self.steps = execution.table.steps
        self.first_action = execution.table.first_action.tolist()
        self.first_task = execution.table.first_task.tolist()
        self.rank_of = execution.table.rank.tolist()
        self.last_member = barriers(execution).last_member
        self.path: list[Segment] = []
        self.before: dict[int, list[tuple[int, ...]]] = {}
        # Actions that run forward (0) and backward (1) of each stage [sides, stages, micro-batches], or -1.
        table, schedule = execution.table, execution.program.schedule
        producers = np.full(
            (2, schedule.n_stages + 1, schedule.microbatches), -1
        )  # one stage beyond the last
        given = np.array([code.kind != "W" for code in table.codes], dtype=bool)[table.code]
        for side, has in enumerate((table.stages[:, 0] >= 0, (table.stages[:, 1] >= 0) & given)):
            actions = np.flatnonzero(has)
            producers[side, table.stages[actions, side], table.microbatches[actions, side]] = actions
        self.producers = producers

    def walk(self) -> list[Segment]:
        """The path from its end to its begin."""
        rank, time = self._end_of_step()
        action = self.first_action[rank + 1] - 1
        member = int(self.times.free[action].argmax()) if action >= self.first_action[rank] else 0
        while action >= self.first_action[rank] and time > 0:
            step = self.steps[action]
            if int(self.times.free[action, member]) == time:  # the rank waited for its own sends
                end = int(self.times.end[action, member])
                self._add(Segment(rank, step.label, "pipeline send", end, time))
                time = end
            ends = self._ends(action, member)
            last = next((n for n in range(len(ends) - 1, -1, -1) if ends[n] == time), None)
            if last is not None:
                member, time = self._tasks(rank, action, last, member, ends)
            before, time = self._before(rank, action, step, member, time)
            if before is None:
                break
            action, rank = before, self.rank_of[before]
        return self.path

    def _add(self, segment: Segment) -> None:
        if segment.end_ns > segment.begin_ns:
            self.path.append(segment)

    def _ends(self, action: int, member: int) -> list[int]:
        """When the tasks of an action ended for a member."""
        tasks = slice(self.first_task[action], self.first_task[action + 1])
        ends: list[int] = self.times.ends[tasks, member].tolist()
        return ends

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

    def _tasks(self, rank: int, action: int, number: int, member: int, ends: list[int]) -> tuple[int, int]:
        """Walk back inside one action; return the member and the time at its start."""
        step, first = self.steps[action], self.first_task[action]
        label, code, position = step.label, step.code, action - self.first_action[rank]
        tasks, before, microbatches = code.tasks, self._before_tasks(code), step.microbatches
        begins, last, add = self.times.begins, self.last_member, self.path.append
        while True:
            task, end = tasks[number], ends[number]
            phase, side, transfer, place = task.phase, task.side, task.transfer, (position, number)
            if transfer is not None:
                meet = begins.item(first + number)
                launch = meet + transfer.launch_ns
                self._add(Segment(rank, label, phase, launch, end, task, True, 0, place))
                self._add(Segment(rank, label, "notify", meet, min(launch, end)))
                end, latest = meet, last.item(first + number)
                if latest != member:
                    member, ends = latest, self._ends(action, latest)
                begin = end - task.compute.item(microbatches[side], member)
            elif before[number]:  # compute begins when the last of these has ended
                begin = max([ends[earlier] for earlier in before[number]])
            else:
                begin = self.times.start.item(action, member)
            if end > begin:
                add(_segment((rank, label, phase, begin, end, task, False, member, place)))
            reached = next((earlier for earlier in before[number] if ends[earlier] == begin), None)
            if reached is None:
                return member, begin
            number = reached

    def _before_tasks(self, code: CompiledTemplate) -> list[tuple[int, ...]]:
        """The tasks that each task of a template waits for, the last one first."""
        known = self.before.get(id(code))
        if known is None:
            known = self.before[id(code)] = [
                (*(() if previous is None else (previous,)), *reversed(task.deps))
                for task, previous in zip(code.tasks, code.before, strict=True)
            ]
        return known

    def _before(
        self, rank: int, action: int, step: PlacedStep, member: int, time: int
    ) -> tuple[int | None, int]:
        """(action, time) that an action waited for on its own rank or a neighbour; None at the begin."""
        if action > self.first_action[rank] and int(self.times.free[action - 1, member]) == time:
            return action - 1, time
        forward, backward = step.stages
        sources = []
        if forward > 0:
            sources.append((0, forward - 1))
        if backward >= 0 and step.code.kind != "W":
            sources.append((1, backward + 1))
        best: tuple[int, int] | None = None
        for side, stage in sources:
            source = int(self.producers[side, stage, step.microbatches[side]])
            if source >= 0:
                left = self._left(source, side, member)
                if best is None or left > best[1]:
                    best = (source, left)
        if best is None or best[1] > time:
            return None, 0
        self._add(Segment(rank, step.label, "pipeline send", best[1], time))
        return best

    def _left(self, action: int, side: int, member: int) -> int:
        """When an action had the activation (side 0) or gradient (side 1) that it sends."""
        code = self.steps[action].code
        out = code.backward_out if side else code.forward_out
        if out is None:
            return int(self.times.end[action, member])
        return int(self.times.ends[self.first_task[action] + out, member])
