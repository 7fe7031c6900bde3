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
LATER = 1 << 62
"""Added to the order of an event that is not urgent."""
PLACES = 1 << 20
"""An order is the number of the event times this, plus the place where the event is kept."""


@compiled
def _is_before(run: Run, at: int, time: int, order: int) -> bool:
    """Whether the event at a place in the heap comes before (time, order)."""
    first = run.queue_time[at]
    return first < time or (first == time and run.queue_order[at] < order)


@compiled
def schedule(run: Run, time: int, kind: int, subject: int, extra: int, urgent: bool) -> None:
    """Put an event of a subject (actor, key, flow or task) into the queue."""
    at = run.counters[EVENTS]
    if at >= run.most_events:
        run.counters[ERROR] = QUEUE_FULL
        return
    run.counters[EVENTS] = at + 1
    run.counters[SEQUENCE] += 1
    place = run.queue_places[at]  # the first `at` places of this list are taken
    run.queue_what[place] = subject * KINDS + kind
    run.queue_extra[place] = extra
    order = run.counters[SEQUENCE] * PLACES + place + (0 if urgent else LATER)
    times, orders = run.queue_time, run.queue_order
    while at > 0:
        parent = (at - 1) >> 1
        if _is_before(run, parent, time, order):
            break
        times[at] = times[parent]
        orders[at] = orders[parent]
        at = parent
    times[at] = time
    orders[at] = order


@compiled
def after(run: Run, delay: int, kind: int, subject: int, extra: int) -> None:
    """Schedule an event that is not urgent, `delay` nanoseconds from now."""
    schedule(run, run.counters[NOW] + delay, kind, subject, extra, False)


@compiled
def take_first(run: Run) -> int:
    """Take the first event out of the queue and set the clock to its time; return the place that keeps it.

    What is kept there stays until the next event is scheduled.
    """
    times, orders = run.queue_time, run.queue_order
    run.counters[NOW] = times[0]
    taken = orders[0] % PLACES
    run.counters[EVENTS] -= 1
    count = run.counters[EVENTS]
    run.queue_places[count] = taken
    time, order = times[count], orders[count]
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _is_before(run, child + 1, times[child], orders[child]):
            child += 1
        if not _is_before(run, child, time, order):
            break
        times[at] = times[child]
        orders[at] = orders[child]
        at = child
    times[at] = time
    orders[at] = order
    return taken
