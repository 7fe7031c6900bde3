"""The compiled engine, equal to the SimPy engine to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.compiled.addresses import address_of, addresses
from moesim.simulator.engine.compiled.lower import LoweredStep, lower
from moesim.simulator.engine.compiled.native import native
from moesim.simulator.engine.compiled.phase_durations import CompiledPhases
from moesim.simulator.engine.compiled.state import DONE, ERROR, SENDS, RunState, initial_room, new_state
from moesim.simulator.engine.end_of_step import end_of_step
from moesim.simulator.engine.fair_share import CAPACITY_UNITS, MOST_LINKS_IN_STEPS
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.records import Barriers, Execution, RecordedTimes, SendRecord
from moesim.simulator.engine.task_durations import use_for_phases

use_for_phases(CompiledPhases())

EVENTS_A_SLICE = 200_000
"""Events between two looks at whether the run was cancelled: some 20 to 100 ms."""


class CannotRunError(RuntimeError):
    """The compiled loop met a step that it does not run; the SimPy engine runs it or says what is wrong."""


def run_compiled(programs: Sequence[Program]) -> list[Execution]:
    """Run the programs of all groups together, with the records of the SimPy engine.

    Raises CannotRunError where a link has no bandwidth or ranks wait for each other forever.
    """
    few = len(programs[0].link_map.capacity_bytes_per_ns) <= MOST_LINKS_IN_STEPS
    lowered = lower(programs, few, CAPACITY_UNITS)
    state = _run(lowered)
    times = [_times(lowered, state, group) for group in range(len(programs))]
    sends = [SendTimes(lowered, state, group) for group in range(len(programs))]
    free = [
        [int(part.free[end - 1].max()) if end > begin else 0 for begin, end in pairwise(b)]
        for part, b in zip(times, (t.first_action.tolist() for t in lowered.actions), strict=True)
    ]
    syncs, end_ns = end_of_step(programs, free)
    return [
        Execution(program, table, own, syncs, sent, end_ns, state.link_bytes)
        for program, table, own, sent in zip(programs, lowered.actions, times, sends, strict=True)
    ]


def _run(lowered: LoweredStep) -> RunState:
    room = initial_room(lowered.sizes)
    while True:
        state = new_state(lowered.tables, lowered.sizes, room)
        table = addresses(lowered.tables, state)
        code, address = native(), address_of(table)
        code.start(address)
        while code.advance(address, EVENTS_A_SLICE):
            pass
        error = int(state.counters[ERROR])
        if error == 0:
            break
        larger = room.more(error)
        if larger == room:
            raise CannotRunError("a transfer crosses a link without bandwidth")
        room = larger
    if not (state.process_state == DONE).all():
        raise CannotRunError("pipeline ranks wait for each other")
    return state


def _times(lowered: LoweredStep, state: RunState, group: int) -> RecordedTimes:
    """The times of one group, as views of the state's arrays."""
    tables, sizes = lowered.tables, lowered.sizes
    actions, tasks, ranks = sizes.actions, sizes.tasks, sizes.ranks
    first, last = tables.process_first[group * ranks], tables.process_first[(group + 1) * ranks]
    begin, end = tables.action_first_task[first], tables.action_first_task[last]
    starts, ends, frees = (state.clock[tasks + n * actions : tasks + (n + 1) * actions] for n in range(3))
    return RecordedTimes(
        starts[first:last],
        ends[first:last],
        frees[first:last],
        state.clock[begin:end],
        state.begins[begin:end],
        state.finishes[begin:end],
        Barriers(state.last_member[begin:end], state.ready_total[begin:end]),
    )


class SendTimes(Sequence[SendRecord]):
    """The sends of one group in the order of their ends; a record is made when it is read."""

    def __init__(self, lowered: LoweredStep, state: RunState, group: int) -> None:
        """Keep what the records are made of."""
        ended: IntArray = state.key_order[: state.counters[SENDS]]
        sizes = lowered.sizes
        own = ended[ended // (2 * sizes.stages * sizes.microbatches) == group]
        self._keys, self._rank_of, self._sizes = own, lowered.tables.rank_of, sizes
        self._begin, self._end = state.key_begin[own], state.key_end[own]

    def __len__(self) -> int:
        """Number of sends."""
        return len(self._keys)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        """The record at a position, or a list of records."""
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        key, sizes, rank_of = int(self._keys[at]), self._sizes, self._rank_of
        stage, microbatch = key // sizes.microbatches % sizes.stages, key % sizes.microbatches
        forward = key // (sizes.stages * sizes.microbatches) % 2 == 0
        sender = stage - 1 if forward else stage + 1
        source, target = rank_of[sender, microbatch], rank_of[stage, microbatch]
        label = f"{sender}{'F' if forward else 'B'}{microbatch}"
        return SendRecord(int(source), int(target), label, int(self._begin[at]), int(self._end[at]))

    def __iter__(self) -> Iterator[SendRecord]:
        """All records."""
        return (self[n] for n in range(len(self)))
