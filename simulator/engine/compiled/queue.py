"""The queue of events: a binary heap whose order is that of SimPy.

SimPy runs events by time, then urgent before others, then in the order in which they were scheduled. The
compiled engine schedules the same events in the same order, so it needs no rule of its own for ties.
"""

from __future__ import annotations

from moesim.simulator.engine.compiled.jit import compiled
from moesim.simulator.engine.compiled.memory import Run
from moesim.simulator.engine.compiled.state import (
    ERROR,
    EVENTS,
    NOW,
    QUEUE_FULL,
    SEQUENCE,
)

START, RESUME, LAUNCH, DEADLINE, ARRIVED, INPUT, SENT, BESIDE_ENDED = range(8)
"""Kinds of events: an actor starts; an actor goes on after a launch; a send starts; the deadline of a flow;
the last byte of a flow is there; an input is there that a process waits for; a send has ended; a collective
of the sharding stream has ended."""

KINDS = 8
LATER = 1 << 60
"""Added to the order of an event that is not urgent."""


@compiled
def _is_before(run: Run, at: int, time: int, order: int) -> bool:
    """Whether the event at a place in the heap comes before (time, order)."""
    first = run.queue_time[at]
    return first < time or (first == time and run.queue_order[at] < order)


@compiled
def _move(run: Run, to: int, source: int) -> None:
    run.queue_time[to] = run.queue_time[source]
    run.queue_order[to] = run.queue_order[source]
    run.queue_what[to] = run.queue_what[source]
    run.queue_extra[to] = run.queue_extra[source]


@compiled
def schedule(run: Run, time: int, kind: int, subject: int, extra: int, urgent: bool) -> None:
    """Put an event of a subject (actor, key, flow or task) into the queue."""
    at = run.counters[EVENTS]
    if at >= run.most_events:
        run.counters[ERROR] = QUEUE_FULL
        return
    run.counters[EVENTS] = at + 1
    run.counters[SEQUENCE] += 1
    order = run.counters[SEQUENCE] + (0 if urgent else LATER)
    while at > 0:
        parent = (at - 1) >> 1
        if _is_before(run, parent, time, order):
            break
        _move(run, at, parent)
        at = parent
    run.queue_time[at] = time
    run.queue_order[at] = order
    run.queue_what[at] = subject * KINDS + kind
    run.queue_extra[at] = extra


@compiled
def after(run: Run, delay: int, kind: int, subject: int, extra: int) -> None:
    """Schedule an event that is not urgent, `delay` nanoseconds from now."""
    schedule(run, run.counters[NOW] + delay, kind, subject, extra, False)


@compiled
def drop_first(run: Run) -> None:
    """Take the first event out of the queue: the last one sinks from its place."""
    run.counters[EVENTS] -= 1
    count = run.counters[EVENTS]
    time, order = run.queue_time[count], run.queue_order[count]
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count:
            other = run.queue_time[child], run.queue_order[child]
            if _is_before(run, child + 1, other[0], other[1]):
                child += 1
        if not _is_before(run, child, time, order):
            break
        _move(run, at, child)
        at = child
    _move(run, at, count)
