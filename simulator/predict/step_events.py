"""Everything that one GPU of every pipeline rank does in a step, as columns in nanoseconds.

The events are the slices of the trace (`trace_events`), computed for all actions of a template at once, with
three things beside them: which of them lie on the critical path, and which communication computing hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import BoolArray, IntArray
from moesim.simulator.engine.critical import Segment, critical_path
from moesim.simulator.engine.records import Execution, SendRecord, SyncRecord, last_group
from moesim.simulator.predict.event_list import EventList, Events
from moesim.simulator.predict.overlap_spans import NO_TRANSFER, OWN_SENDS, communication_spans
from moesim.simulator.predict.step import run_step
from moesim.simulator.predict.task_slices import add_tasks
from moesim.simulator.predict.trace_events import (
    COMMUNICATION,
    COMPUTE,
    DATA_PARALLEL,
    FIRST_SEND,
    INSIDE,
    SCHEDULE,
    SHARDING,
    THREADS,
    send_lanes,
)
from moesim.simulator.scenario import Scenario

HIDDEN, EXPOSED = 6, 7
"""Streams of derived events: communication beside busy compute SMs, and the time that they wait for it."""

SYNC = {
    "reduce": "gradient reduction",
    "norm": "gradient norm",
    "optimizer": "optimizer",
    "gather": "parameter gather",
}
SENDS = ("send activation", "send gradient")
"""Names of pipeline sends, by side."""


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The schedule actions in the order of pipeline ranks, nanoseconds from the start of the step.

    `kind[a]`: F, B, I, W, F&B or F&I. `stages[a]` and `microbatches[a]`: (forward, backward), -1 where the
    side is absent. `hidden_ns[a]`: communication of the GPU beside its computing. `exposed_ns[a]`: time in
    which its compute SMs wait, for its own sends after the action too. `critical[a]`: whether the critical
    path goes through the action.
    """

    rank: IntArray
    kind: tuple[str, ...]
    stages: IntArray
    microbatches: IntArray
    start_ns: IntArray
    end_ns: IntArray
    hidden_ns: IntArray
    exposed_ns: IntArray
    critical: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """The critical path from 0 to the end of the step, one entry a segment; `action` is -1 after the last.

    `cause`: what ran, or what the step waited for. `member`: the GPU of the pipeline rank that computed.
    """

    rank: IntArray
    cause: tuple[str, ...]
    action: IntArray
    member: IntArray
    begin_ns: IntArray
    end_ns: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """All events of one GPU of every pipeline rank; `events` are ordered by rank, stream and begin."""

    end_ns: int
    ranks: int
    actions: Actions
    events: Events
    path: CriticalPath


def step_events(scenario: Scenario, member: int = 0) -> StepEvents:
    """Run a step and return its events. Raises InputError for an illegal scenario and for a fleet."""
    scenario.machine  # noqa: B018 - names of GPUs need one cluster: refuses a fleet with the remedy
    executions = run_step(scenario).executions
    return execution_events(executions[0], critical_path(last_group(executions)), member)


def execution_events(execution: Execution, path: Sequence[Segment], member: int = 0) -> StepEvents:
    """The events of a member of every pipeline rank, and the path that is marked on them.

    The path goes through the members that the step waits for, and in full resolution through the group that
    ends last. What it runs through is marked on the member that is shown.
    """
    table, times = execution.table, execution.times
    ranks = len(execution.syncs)
    found = EventList()
    start, end = times.start[:, member], times.end[:, member]
    for kind in dict.fromkeys(code.kind for code in table.codes):
        of_kind = np.array([code.kind == kind for code in table.codes], dtype=bool)
        own = np.flatnonzero(of_kind[table.code])
        found.add(SCHEDULE, kind, table.rank[own], start[own], end[own], own)
    add_tasks(found, execution, member)
    _add_sends(found, execution)
    for rank, sync in enumerate(execution.syncs):
        _add_end(found, rank, sync)
    hidden_ns, exposed_ns = _add_communication(found, execution, member)
    events, first = found.sorted(), table.first_action
    actions, tasks = _marked(path, first)
    events = events.with_critical(
        np.where(
            events.action < 0,
            _ends_marked(events, path),
            np.where(
                events.stream == SCHEDULE,
                np.isin(events.action, actions),
                np.isin(events.action * _MOST_TASKS + events.task, tasks) & (events.task >= 0),
            ),
        )
    )
    return StepEvents(
        end_ns=execution.end_ns,
        ranks=ranks,
        actions=Actions(
            rank=table.rank,
            kind=tuple(step.code.kind for step in table.steps),
            stages=table.stages,
            microbatches=table.microbatches,
            start_ns=start,
            end_ns=end,
            hidden_ns=hidden_ns,
            exposed_ns=exposed_ns,
            critical=np.isin(np.arange(len(table.steps)), actions),
        ),
        events=events,
        path=_path(path, execution),
    )


_MOST_TASKS = 1 << 20
"""More tasks than an action has, to number (action, task)."""


def _marked(path: Sequence[Segment], first_action: IntArray) -> tuple[IntArray, IntArray]:
    """(actions that the path goes through, numbers of its (action, task))."""
    places = {(int(first_action[s.rank]) + s.place[0], s.place[1]) for s in path if s.place is not None}
    return (
        np.array(sorted({action for action, _ in places}), dtype=np.int64),
        np.array(sorted(action * _MOST_TASKS + task for action, task in places), dtype=np.int64),
    )


def _ends_marked(events: Events, path: Sequence[Segment]) -> BoolArray:
    """Which events of the end of the step the path goes through."""
    marked = {(segment.rank, segment.cause) for segment in path if segment.step == "end"}
    numbers = {name: number for number, name in enumerate(events.names)}
    keys = [rank * len(events.names) + numbers[cause] for rank, cause in marked if cause in numbers]
    return np.asarray(np.isin(events.rank * len(events.names) + events.name, keys))


def _path(path: Sequence[Segment], execution: Execution) -> CriticalPath:
    first = execution.table.first_action
    rows = [
        (
            segment.rank,
            -1 if segment.place is None else int(first[segment.rank]) + segment.place[0],
            segment.member,
            segment.begin_ns,
            segment.end_ns,
        )
        for segment in path
    ]
    rank, action, member, begin, end = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return CriticalPath(rank, tuple(segment.cause for segment in path), action, member, begin, end)


def _add_sends(found: EventList, execution: Execution) -> None:
    """Pipeline sends, on as many lanes as overlap."""
    table = execution.table
    producers: dict[tuple[int, int, int], int] = {}
    for side in (0, 1):
        rows = zip(table.stages[:, side].tolist(), table.microbatches[:, side].tolist(), strict=True)
        for action, (stage, microbatch) in enumerate(rows):
            if stage >= 0 and table.steps[action].code.kind != "W":
                producers[side, stage, microbatch] = action
    sends_of: list[list[SendRecord]] = [[] for _ in execution.syncs]
    for send in execution.sends:
        sends_of[send.source].append(send)
    for rank, sent in enumerate(sends_of):
        own = send_lanes(sent)
        for lane in range(1 + max((lane for _, lane in own), default=-1)):
            for side, letter in enumerate("FB"):
                sends = [send for send, at in own if at == lane and letter in send.label]
                places = [_place(send.label, letter) for send in sends]
                found.add(
                    FIRST_SEND + lane,
                    SENDS[side],
                    rank,
                    np.array([send.start for send in sends], dtype=np.int64),
                    np.array([send.end for send in sends], dtype=np.int64),
                    np.array([producers.get((side, *place), -1) for place in places], dtype=np.int64),
                )


def _place(label: str, letter: str) -> tuple[int, int]:
    """(stage, micro-batch) of a send such as "3F12"."""
    stage, microbatch = label.split(letter)
    return int(stage), int(microbatch)


def _add_end(found: EventList, rank: int, sync: SyncRecord) -> None:
    """The end of the step, on the row of actions and on its streams."""
    for key, name in SYNC.items():
        begin, end = getattr(sync, key)
        for stream in (SCHEDULE, COMPUTE if key == "optimizer" else DATA_PARALLEL):
            found.add(stream, name, rank, np.array([begin]), np.array([end]))


PRIORITY = (COMMUNICATION, SHARDING, INSIDE, DATA_PARALLEL)
"""Streams whose event names a span of communication, the first that has one; sends come after them."""


def _add_communication(found: EventList, execution: Execution, member: int) -> tuple[IntArray, IntArray]:
    """Add the hidden and the exposed communication of every rank; return its sums by action."""
    table, times = execution.table, execution.times
    events, actions = found.sorted(), len(table.steps)
    sums = [np.zeros(actions, dtype=np.int64), np.zeros(actions, dtype=np.int64)]
    for rank in range(len(execution.syncs)):
        own = events.where(events.rank == rank)
        first = slice(int(table.first_action[rank]), int(table.first_action[rank + 1]))
        sends = sorted({int(stream) for stream in own.stream if stream >= FIRST_SEND})
        spans = communication_spans(
            compute=own.where(own.stream == COMPUTE),
            transfers=[own.where(own.stream == stream) for stream in (*PRIORITY, *sends)],
            start_ns=times.start[first, member],
            end_ns=times.end[first, member],
            free_ns=times.free[first, member],
        )
        for stream, span, total in zip((HIDDEN, EXPOSED), spans, sums, strict=True):
            at = np.where(span.action >= 0, span.action + first.start, -1)
            inside = at >= 0
            np.add.at(total, at[inside], (span.end_ns - span.begin_ns)[inside])
            for number in np.unique(span.name).tolist():
                mine = span.name == number
                name = events.names[number] if number >= 0 else WAITS[number]
                found.add(stream, name, rank, span.begin_ns[mine], span.end_ns[mine], at[mine])
    return sums[0], sums[1]


WAITS = {NO_TRANSFER: "other waiting", OWN_SENDS: "wait for own sends"}
"""Names of exposed time in which no transfer of the GPU runs."""


def stream_names(streams: Sequence[int]) -> Mapping[int, str]:
    """The names of streams, in the words of the trace."""
    derived = {HIDDEN: "hidden communication", EXPOSED: "exposed communication"}
    known = {**THREADS, **derived}
    return {
        stream: known.get(stream, f"pipeline send {stream - FIRST_SEND}") for stream in sorted(set(streams))
    }
