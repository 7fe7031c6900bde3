"""Everything that one GPU of every pipeline rank does in a step, as columns in nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from moesim.hwmodels.arrays import BoolArray, IntArray
from moesim.simulator.engine.critical import Segment, critical_path
from moesim.simulator.engine.program import NS
from moesim.simulator.engine.records import Execution, SendRecord, last_group
from moesim.simulator.predict.step import run_step
from moesim.simulator.predict.trace import (
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

# -- event list --------------------------------------------------------------------------------------
# Columns of events, and a list that they are gathered in (pure).


class Events(Struct, frozen=True, eq=False):
    """Events as columns of equal length, nanoseconds from the start of the step.

    `name`: number in `names`. `action`, `task` and `block`: -1 where there is none; `task` is the number of
    the task in its action. `critical`: whether the event is on the critical path.
    """

    names: tuple[str, ...]
    rank: IntArray
    stream: IntArray
    name: IntArray
    begin_ns: IntArray
    end_ns: IntArray
    action: IntArray
    task: IntArray
    block: IntArray
    critical: BoolArray

    def __len__(self) -> int:
        """Number of events."""
        return len(self.rank)

    def where(self, chosen: BoolArray | IntArray) -> Events:
        """Some of the events: a mask, or their numbers in the order in which they are wanted."""
        return Events(self.names, *(getattr(self, column)[chosen] for column in (*COLUMNS, "critical")))


COLUMNS = ("rank", "stream", "name", "begin_ns", "end_ns", "action", "task", "block")


class EventList(Struct):
    """Gathers events in parts of one stream and one name."""

    _names: dict[str, int] = field(default_factory=dict)
    _parts: list[IntArray] = field(default_factory=list)

    def add(
        self,
        stream: int,
        name: str,
        rank: IntArray | int,
        begin_ns: IntArray,
        end_ns: IntArray,
        action: IntArray | int = -1,
        task: int = -1,
        block: int = -1,
    ) -> None:
        """Add events; those that take no time are left out, as in a trace."""
        number = self._names.setdefault(name, len(self._names))
        columns = np.broadcast_arrays(rank, stream, number, begin_ns, end_ns, action, task, block)
        self._parts.append(np.array(columns, dtype=np.int64)[:, end_ns > begin_ns])

    def sorted(self) -> Events:
        """All events by rank, stream and begin."""
        columns = np.concatenate([np.zeros((len(COLUMNS), 0), dtype=np.int64), *self._parts], axis=1)
        order = np.lexsort((columns[3], columns[1], columns[0]))
        chosen = dict(zip(COLUMNS, columns[:, order], strict=True))
        return Events(tuple(self._names), **chosen, critical=np.zeros(len(order), dtype=bool))


# -- task slices -------------------------------------------------------------------------------------
# The tasks inside actions as events on their streams, for all actions of a template at once (pure).


def add_tasks(events: EventList, execution: Execution, member: int) -> None:
    """Add every task of a member of each pipeline rank.

    A compute task ends with its exposed collectives. A transfer begins with its small kernels and the wait
    for the other members.
    """
    table = execution.table
    for code, actions in table.of_code():
        for number, task in enumerate(code.tasks):
            at = table.first_task[actions] + number
            end = execution.times.ends[at, member]
            own_ns = task.rows_ns[table.microbatches[actions, task.side], member]
            if task.transfer is None:
                rank = table.rank[actions]
                waits = np.minimum(own_ns, round(task.price.exposed_s * NS))
                events.add(COMPUTE, task.phase, rank, end - own_ns, end - waits, actions, number, task.block)
                events.add(INSIDE, task.phase, rank, end - waits, end, actions, number, task.block)
            else:  # a member can begin when its stream is free and its inputs are there
                before, begin = code.before[number], execution.times.start[actions, member]
                for other in task.deps if before is None else (*task.deps, before):
                    ended = execution.times.ends[table.first_task[actions] + other, member]
                    begin = np.maximum(begin, ended)
                ready = begin + own_ns
                launch = np.minimum(end, execution.times.begins[at] + task.transfer.launch_ns)
                stream = SHARDING if task.stream == "sharding" else COMMUNICATION
                place = actions, number, task.block
                events.add(stream, f"prepare {task.phase}", table.rank[actions], begin, ready, *place)
                events.add(stream, f"wait for {task.phase}", table.rank[actions], ready, launch, *place)
                events.add(stream, task.phase, table.rank[actions], launch, end, *place)


# -- overlap spans -----------------------------------------------------------------------------------
# When a GPU communicates beside its computing, and when its compute SMs wait (pure).

NO_TRANSFER, OWN_SENDS = -1, -2


class Spans(Struct, frozen=True, eq=False):
    """Spans of time as columns, in order; `action`: -1 for none.

    `name`: of the transfer; OWN_SENDS for the wait after an action, NO_TRANSFER where none runs.
    """

    begin_ns: IntArray
    end_ns: IntArray
    name: IntArray
    action: IntArray


def communication_spans(
    compute: Events, transfers: Sequence[Events], start_ns: IntArray, end_ns: IntArray, free_ns: IntArray
) -> tuple[Spans, Spans]:
    """(hidden, exposed) communication of one GPU.

    Hidden: a transfer runs, its wait for others included, and the compute SMs work. Exposed: an action runs
    or waits for its own sends, or a transfer at the end of the step runs, and the compute SMs do not work
    (docs/model.md, eq. T2). `transfers`: events of each stream without overlap, the one that names a span
    first. `start_ns`, `end_ns` and `free_ns` [actions]: each action, and when the next may start.
    """
    ends = [np.append(compute.begin_ns, compute.end_ns), np.concatenate([start_ns, end_ns, free_ns])]
    ends += [np.append(stream.begin_ns, stream.end_ns) for stream in transfers]
    points = np.unique(np.concatenate(ends))
    if len(points) < 2:
        none = np.zeros(0, dtype=np.int64)
        return Spans(none, none, none, none), Spans(none, none, none, none)
    begin = points[:-1]
    name = np.full(len(begin), NO_TRANSFER, dtype=np.int64)
    moves = np.zeros(len(begin), dtype=bool)
    of_step = np.zeros(len(begin), dtype=bool)
    for stream in transfers:
        at, runs = _running(stream.begin_ns, stream.end_ns, begin)
        name = np.where(runs & ~moves, stream.name[at] if len(stream) else NO_TRANSFER, name)
        moves |= runs
        of_step |= runs & ((stream.action[at] < 0) & (stream.task[at] < 0) if len(stream) else False)
    action, acts = _running(start_ns, free_ns, begin)
    computes = _running(compute.begin_ns, compute.end_ns, begin)[1]
    after = acts & ~_running(start_ns, end_ns, begin)[1]
    name = np.where((name == NO_TRANSFER) & after, OWN_SENDS, name)
    action = np.where(acts, action, -1)
    hidden = _joined(points, moves & computes, name, action)
    return hidden, _joined(points, (acts | of_step) & ~computes, name, action)


def _running(begin: IntArray, end: IntArray, at: IntArray) -> tuple[IntArray, BoolArray]:
    """(the last of some intervals without overlap that began by each time, whether it still runs then)."""
    if not len(begin):
        return np.zeros(len(at), dtype=np.int64), np.zeros(len(at), dtype=bool)
    last = np.searchsorted(begin, at, side="right") - 1
    return np.maximum(last, 0), (last >= 0) & (end[last] > at)


def _joined(points: IntArray, chosen: BoolArray, name: IntArray, action: IntArray) -> Spans:
    """The chosen pieces between points; neighbours of one name and action become one span."""
    at = np.flatnonzero(chosen)
    if not len(at):
        none = np.zeros(0, dtype=np.int64)
        return Spans(none, none, none, none)
    same = (np.diff(at) == 1) & (np.diff(name[at]) == 0) & (np.diff(action[at]) == 0)
    first = np.append(0, np.flatnonzero(~same) + 1)
    last = np.append(first[1:] - 1, len(at) - 1)
    return Spans(points[at[first]], points[at[last] + 1], name[at[first]], action[at[first]])


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


class Actions(Struct, frozen=True, eq=False):
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


class CriticalPath(Struct, frozen=True, eq=False):
    """The critical path from 0 to the end of the step, one entry a segment; `action` is -1 after the last.

    `cause`: what ran, or what the step waited for. `member`: the GPU of the pipeline rank that computed.
    """

    rank: IntArray
    cause: tuple[str, ...]
    action: IntArray
    member: IntArray
    begin_ns: IntArray
    end_ns: IntArray


class StepEvents(Struct, frozen=True, eq=False):
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
    drawn = EventList()
    start, end = times.start[:, member], times.end[:, member]
    for kind in dict.fromkeys(code.kind for code in table.codes):
        of_kind = np.array([code.kind == kind for code in table.codes], dtype=bool)
        own = np.flatnonzero(of_kind[table.code])
        drawn.add(SCHEDULE, kind, table.rank[own], start[own], end[own], own)
    add_tasks(drawn, execution, member)
    _add_sends(drawn, execution)
    for rank, sync in enumerate(execution.syncs):
        for key, name in SYNC.items():  # on the row of actions and on its stream
            begin, ended = getattr(sync, key)
            for stream in (SCHEDULE, COMPUTE if key == "optimizer" else DATA_PARALLEL):
                drawn.add(stream, name, rank, np.array([begin]), np.array([ended]))
    hidden_ns, exposed_ns = _add_communication(drawn, execution, member)
    events, first = drawn.sorted(), table.first_action
    # (actions that the path goes through, numbers of its (action, task)).
    places = {(int(first[s.rank]) + s.place[0], s.place[1]) for s in path if s.place is not None}
    actions, tasks = (
        np.array(sorted({action for action, _ in places}), dtype=np.int64),
        np.array(sorted(action * _MOST_TASKS + task for action, task in places), dtype=np.int64),
    )
    # Events of the end of the step have no action: (rank, name) of those that the path goes through.
    numbers = {name: number for number, name in enumerate(events.names)}
    ends = [s.rank * len(numbers) + numbers[s.cause] for s in path if s.step == "end" and s.cause in numbers]
    events = replace(
        events,
        critical=np.where(
            events.action < 0,
            np.isin(events.rank * len(events.names) + events.name, ends),
            np.where(
                events.stream == SCHEDULE,
                np.isin(events.action, actions),
                np.isin(events.action * _MOST_TASKS + events.task, tasks) & (events.task >= 0),
            ),
        ),
    )
    return StepEvents(
        end_ns=execution.end_ns,
        ranks=len(execution.syncs),
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
        path=_path(path, first),
    )


_MOST_TASKS = 1 << 20
"""More tasks than an action has, to number (action, task)."""


def _path(path: Sequence[Segment], first_action: IntArray) -> CriticalPath:
    rows = [
        (s.rank, int(first_action[s.rank]) + s.place[0] if s.place else -1, s.member, s.begin_ns, s.end_ns)
        for s in path
    ]
    rank, action, member, begin, end = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return CriticalPath(rank, tuple(segment.cause for segment in path), action, member, begin, end)


def _add_sends(events: EventList, execution: Execution) -> None:
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
                labels = [map(int, send.label.split(letter)) for send in sends]  # such as "3F12"
                posted = [producers.get((side, stage, micro), -1) for stage, micro in labels]
                events.add(
                    FIRST_SEND + lane,
                    SENDS[side],
                    rank,
                    np.array([send.start for send in sends], dtype=np.int64),
                    np.array([send.end for send in sends], dtype=np.int64),
                    np.array(posted, dtype=np.int64),
                )


PRIORITY = (COMMUNICATION, SHARDING, INSIDE, DATA_PARALLEL)
"""Streams whose event names a span of communication, the first that has one; sends come after them."""


def _add_communication(drawn: EventList, execution: Execution, member: int) -> tuple[IntArray, IntArray]:
    """Add the hidden and the exposed communication of every rank; return its sums by action."""
    table, times = execution.table, execution.times
    events, actions = drawn.sorted(), len(table.steps)
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
                drawn.add(stream, name, rank, span.begin_ns[mine], span.end_ns[mine], at[mine])
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
