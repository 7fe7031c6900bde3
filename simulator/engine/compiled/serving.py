"""Requests through replicas of an inference engine, compiled: the events of `serving.replicas` in order.

It equals the SimPy reference to the nanosecond. What it does not do (shared prefixes, a pool of its own for
prompts, waits for ranks, a tokeniser, watchers) the reference does.
"""

from __future__ import annotations

from math import isnan

import numpy as np

from moesim.simulator.engine.compiled import state
from moesim.simulator.engine.compiled.memory import LATER, Run, Vector, as_serving, compiled
from moesim.simulator.engine.compiled.serving_ranks import advance, append, horizon, plan_rank, running

SLICE = 1 << 20
"""Events between two returns."""


@compiled
def serve(address: int) -> int:
    """Go on until nothing is left to happen, or the caller has to do something (`SERVED` to `GOES_ON`)."""
    run = as_serving(address)
    counters, replicas = run.counters, run.replicas
    resumed, counters[state.RESUMED] = counters[state.RESUMED], -1
    if resumed >= 0:
        _begin_step(run, resumed)
    elif resumed == state.SAMPLED and counters[state.LEFT] > 0 and counters[state.IN_HEAP] > 0:
        _schedule(run, 2 * replicas + 1, counters[state.TIME] + counters[state.EVERY], LATER)
    for _ in range(SLICE):
        if counters[state.IN_HEAP] == 0:
            return state.SERVED
        event = _take_event(run)
        if event < replicas:
            if run.stepping[event]:
                _end_step(run, event)
            if not _plan(run, event):
                counters[state.AT] = event
                return state.WANTS_PACE
        elif event < 2 * replicas:
            _cut(run, event - replicas)
        elif event == 2 * replicas:
            _arrivals(run)
        elif counters[state.STARTED] & 2:
            _count(run)
            return state.WANTS_SAMPLE
        else:
            counters[state.STARTED] |= 2
            _schedule(run, event, counters[state.TIME] + counters[state.EVERY], LATER)
    return state.GOES_ON


# -- events: a heap of at most two a replica, one of arrivals and one of samples ---------------------------


@compiled
def _before(run: Run, one: int, other: int) -> bool:
    if run.event_time[one] != run.event_time[other]:
        return run.event_time[one] < run.event_time[other]
    return run.event_order[one] < run.event_order[other]


@compiled
def _sift(run: Run, event: int, at: int) -> None:
    """Put an event where it belongs, from a place of the heap that is free."""
    heap, place = run.heap, run.event_place
    while at > 0 and _before(run, event, heap[(at - 1) >> 1]):
        heap[at] = heap[(at - 1) >> 1]
        place[heap[at]] = at
        at = (at - 1) >> 1
    while 2 * at + 1 < run.counters[state.IN_HEAP]:
        child = 2 * at + 1
        if child + 1 < run.counters[state.IN_HEAP] and _before(run, heap[child + 1], heap[child]):
            child += 1
        if not _before(run, heap[child], event):
            break
        heap[at] = heap[child]
        place[heap[at]] = at
        at = child
    heap[at] = event
    place[event] = at


@compiled
def _schedule(run: Run, event: int, time: int, priority: int) -> None:
    """Put an event into the heap, or move it there; `priority`: 0, or `LATER` for what is not urgent."""
    counters = run.counters
    run.event_time[event] = time
    run.event_order[event] = counters[state.ORDER] + priority
    counters[state.ORDER] += 1
    at = run.event_place[event]
    if at < 0:
        at = counters[state.IN_HEAP]
        counters[state.IN_HEAP] += 1
    _sift(run, event, at)


@compiled
def _take_event(run: Run) -> int:
    counters, heap = run.counters, run.heap
    event = heap[0]
    counters[state.TIME] = run.event_time[event]
    counters[state.IN_HEAP] -= 1
    run.event_place[event] = -1
    if counters[state.IN_HEAP]:
        _sift(run, heap[counters[state.IN_HEAP]], 0)
    return event


# -- arrivals ----------------------------------------------------------------------------------------


@compiled
def _arrivals(run: Run) -> None:
    counters = run.counters
    if run.closed:
        if not counters[state.STARTED] & 1:
            counters[state.STARTED] |= 1
            _schedule(run, 2 * run.replicas, counters[state.TIME], LATER)
            return
        for request in range(min(run.closed, run.requests)):
            _arrive(run, request)
        return
    while counters[state.NEXT_ARRIVAL] < run.requests:
        request = counters[state.NEXT_ARRIVAL]
        if run.arrival[request] > counters[state.TIME]:
            _schedule(run, 2 * run.replicas, run.arrival[request], LATER)
            return
        counters[state.NEXT_ARRIVAL] += 1
        _arrive(run, request)


@compiled
def _arrive(run: Run, request: int) -> None:
    """A request goes to the least loaded rank, or to the next one in turn, and cuts a stretch of decodes."""
    counters, ranks = run.counters, run.replicas * run.ranks
    if run.by_load:
        rank = 0
        for other in range(1, ranks):
            if run.told[other] < run.told[rank]:
                rank = other
    else:
        counters[state.TURN] = (counters[state.TURN] + 1) % ranks
        rank = counters[state.TURN]
    replica = rank // run.ranks
    run.next[request] = -1
    if run.asleep[replica] == 0 and run.ahead:
        append(run, run.fresh_first, run.fresh_last, rank, request)
        run.fresh_queued[rank] += 1
    else:
        append(run, run.queue_first, run.queue_last, rank, request)
        run.queued[rank] += 1
    run.load[rank] += 4
    run.told[rank] = run.load[rank]
    if run.asleep[replica]:
        run.asleep[replica] = 0
        _schedule(run, replica, counters[state.TIME], LATER)
    elif run.stretch[replica] and running(run, rank) < run.most:
        run.stretch[replica] = 0
        _schedule(run, run.replicas + replica, counters[state.TIME], 0)


# -- a replica ---------------------------------------------------------------------------------------


@compiled
def _plan(run: Run, replica: int) -> bool:
    """Plan a replica's next step, or let it sleep; False where the caller has to say what the step takes."""
    first = replica * run.ranks
    while True:
        planned = unseen = 0
        for rank in range(first, first + run.ranks):
            plan_rank(run, rank)
            planned |= run.planned[rank]
            unseen |= run.unseen[rank]
        if planned:
            break
        if not unseen:
            run.asleep[replica] = 1
            run.stepping[replica] = 0
            return True
    if run.tabulated and _tabulated(run, replica):
        _begin_step(run, replica)
        return True
    return False


@compiled
def _begin_step(run: Run, replica: int) -> None:
    """A step, or a stretch of equal decodes, begins; its pace is known."""
    first, steps, unseen = replica * run.ranks, run.pace_steps[replica], 0
    for rank in range(first, first + run.ranks):
        unseen |= run.unseen[rank]
    for rank in range(first, first + run.ranks):
        if run.planned[rank] and not unseen:
            steps = min(steps, horizon(run, rank, run.pace_steps[replica]))
        run.told[rank] = run.load[rank]
    run.steps[replica] = 1 if unseen else steps
    run.begun[replica] = run.counters[state.TIME]
    run.stretch[replica] = 1 if run.steps[replica] > 1 else 0
    run.stepping[replica] = 1
    _schedule(run, replica, run.counters[state.TIME] + _after(run, replica, run.steps[replica]), LATER)


@compiled
def _after(run: Run, replica: int, steps: int) -> int:
    """Nanoseconds of so many steps, at least one each."""
    grown = run.pace_growth[replica] * (steps * (steps - 1) // 2)
    return max(int(np.rint(steps * run.pace_first[replica] + grown)), steps)


@compiled
def _cut(run: Run, replica: int) -> None:
    """A stretch of decodes ends with its present step."""
    gone = run.counters[state.TIME] - run.begun[replica]
    low, high = 0, run.steps[replica] - 1
    while low < high:
        middle = (low + high) // 2
        if gone < _after(run, replica, middle + 1):
            high = middle
        else:
            low = middle + 1
    run.steps[replica] = low + 1
    _schedule(run, replica, run.counters[state.TIME] + _after(run, replica, low + 1) - gone, LATER)


@compiled
def _end_step(run: Run, replica: int) -> None:
    run.stretch[replica] = 0
    run.all_steps[replica] += run.steps[replica]
    run.busy[replica] += run.counters[state.TIME] - run.begun[replica]
    for rank in range(replica * run.ranks, (replica + 1) * run.ranks):
        if run.planned[rank]:
            _end(run, rank, advance(run, rank, run.steps[replica]))


@compiled
def _end(run: Run, rank: int, over: int) -> None:
    """Requests in `lasts` have their last token; in a closed loop others come for them."""
    counters = run.counters
    for n in range(over):
        request, following = run.lasts[n], counters[state.NEXT_CLOSED]
        run.last[request] = counters[state.TIME]
        run.rank_of[request] = rank
        counters[state.LEFT] -= 1
        if run.closed and following < run.requests:
            counters[state.NEXT_CLOSED] += 1
            run.arrival[following] = counters[state.TIME]
            _arrive(run, following)


@compiled
def _count(run: Run) -> None:
    """Running and waiting sequences as engines report them, and those of the fullest rank."""
    counters = run.counters
    for n in (state.RUNNING, state.WAITING, state.DECODING, state.FULLEST):
        counters[n] = 0
    for rank in range(run.replicas * run.ranks):
        now = running(run, rank)
        fresh = run.fresh[rank] if run.queued[rank] == run.fresh[rank] else 0
        begun = min(fresh, run.most - now)
        counters[state.RUNNING] += now + begun
        counters[state.WAITING] += run.queued[rank] - begun
        counters[state.FULLEST] = max(counters[state.FULLEST], now + begun)
    counters[state.DECODING] = counters[state.RUNNING]


# -- step times from the tables of the step model ------------------------------------------------------


@compiled
def _below(run: Run, x: float) -> int:
    """Index of the grid point at or below a number of at least 0."""
    low, high = 0, run.points
    while high - low > 1:
        middle = (low + high) // 2
        if run.points_at[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@compiled
def _at(run: Run, row: Vector, base: int, x: float) -> float:
    """A term over one number (`terms.TableRow.at`); NaN where a point is not priced yet."""
    at = _below(run, x)
    low = run.points_at[at]
    if not x > low:
        return row[base + at]
    return row[base + at] + (x - low) / (run.points_at[at + 1] - low) * (row[base + at + 1] - row[base + at])


@compiled
def _read(run: Run, plane: Vector, x: float, y: float) -> tuple[float, float, float]:
    """A term over two numbers (`terms.Plane.read`): seconds, growth, and how far that law holds."""
    i, j, width = _below(run, x), _below(run, y), run.points
    low, high, left = run.points_at[j], run.points_at[j + 1], run.points_at[i]
    here, there = plane[i * width + j], plane[i * width + j + 1]
    if x > left:
        share = (x - left) / (run.points_at[i + 1] - left)
        here += share * (plane[(i + 1) * width + j] - here)
        there += share * (plane[(i + 1) * width + j + 1] - there)
    growth = (there - here) / (high - low)
    return here + (y - low) * growth, growth, high - y


@compiled
def _layers(run: Run, decodes: int, tokens: int) -> tuple[float, float, bool]:
    """Seconds and launches of layers, experts and exchange, and whether a graph is replayed."""
    rows, base, graph = decodes + tokens, run.points if tokens else 0, False
    if tokens:
        graph = rows <= run.graph_prefill
    else:
        at = 0
        while at < run.buckets and run.bucket_rows[at] < decodes:
            at += 1
        if at < run.buckets:
            return run.exact[at], run.exact_launches[at], True
    return _at(run, run.whole, base, rows), run.whole_launches[base + _below(run, rows)], graph


@compiled
def _tabulated(run: Run, replica: int) -> bool:
    """Write a replica's pace as `StepModel.pace` gives it; False where a table lacks a point."""
    reals, base = run.reals, replica * state.BATCH
    decodes, context, prompts = run.batch[base], run.batch[base + 1], run.batch[base + 2]
    tokens, pairs = run.batch[base + 3], run.batch[base + 4]
    gpu, launches, graph = _layers(run, decodes, tokens)
    gpu += _at(run, run.logits, 0, decodes + prompts)
    growth, room = 0.0, 1.0
    if decodes:
        seconds, growth, room = _read(run, run.decode_plane, decodes, context / decodes)
        gpu += seconds
    if tokens:
        gpu += _read(run, run.prompt_plane, tokens, pairs / tokens)[0]
    waits = reals[state.HOST_S] - gpu
    if not graph:
        launches += run.logits_launches[_below(run, decodes + prompts)]
        launches += run.core_launches[(1 if decodes else 0) + (2 if tokens else 0)]
        waits = launches * reals[state.LAUNCH_S] + reals[state.HOST_S] - gpu
    if isnan(waits):
        return False
    gpu += max(waits, 0.0)
    most = 0
    while decodes >> most:
        most += 1
    ratio = run.ratios[most + (64 if tokens else 0)]
    if isnan(ratio):
        return False
    run.pace_first[replica] = (gpu + reals[state.EXPOSED_HOST_S]) * 1e9 * ratio
    run.pace_growth[replica] = growth * 1e9 * ratio
    run.pace_steps[replica] = max(int(room), 1)
    return True
