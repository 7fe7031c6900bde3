"""Transfers of a group and pipeline sends, each a barrier, a launch and a flow on the links (compiled)."""

from __future__ import annotations

import numpy as np

from moesim.simulator.engine.compiled.jit import compiled
from moesim.simulator.engine.compiled.links import SOMEBODY_WAITS, begin_flow
from moesim.simulator.engine.compiled.memory import Run, floats_at, ints_at, row_of
from moesim.simulator.engine.compiled.queue import INPUT, LAUNCH, RESUME, SENT, after
from moesim.simulator.engine.compiled.state import (
    ERROR,
    FREE_SLOTS,
    NOW,
    SENDS,
    SLOTS_FULL,
)
from moesim.simulator.engine.compiled.tables import BY_PATTERN, BY_ROW
from moesim.simulator.engine.compiled.vectors import (
    arrival_of,
    clock_of,
    copy,
    copy_shifted,
    fetch_row,
    first_with,
    largest,
    total_of,
)

IDLE, AT_LAUNCH, AT_DEADLINE, AT_ARRIVAL, AT_TURN = range(5)
"""What an actor waits for (`RunState.actor_stage`): nothing; the end of the launch; the first deadline of its
flow; the last byte of its flow; the collective before its own on the sharding stream."""


@compiled
def begin_transfer(run: Run, actor: int, task: int, row: int, microbatch: int) -> bool:
    """Begin a transfer whose inputs are ready at the task's clocks; return whether it has ended at once.

    `task`: number of the task in the step; `row`: its row in the template tables. All members wait for the
    slowest one, then for the launch.
    """
    ready = clock_of(run, task)
    meet = largest(ready, run.members)
    run.begins[task] = meet
    run.last_member[task] = first_with(ready, meet)
    run.ready_total[task] = total_of(ready, run.members)
    run.actor_task[actor] = task
    fetch_row(run, run.task_member[row], microbatch)
    wait = meet + run.task_launch[row] - run.counters[NOW]
    if wait > 0:
        run.actor_stage[actor] = AT_LAUNCH
        after(run, wait, RESUME, actor, 0)
        return False
    return _begin_payload(run, actor, row, microbatch)


@compiled
def go_on(run: Run, actor: int, row: int, microbatch: int) -> bool:
    """Continue a transfer after the event that its actor waited for; return whether it has ended."""
    if run.actor_stage[actor] == AT_LAUNCH:
        return _begin_payload(run, actor, row, microbatch)
    flow = run.actor_flow[actor]
    if run.actor_stage[actor] == AT_DEADLINE and run.flow_remaining[flow] > 0.0:  # others slowed it down
        run.flow_waits[flow] = SOMEBODY_WAITS
        run.actor_stage[actor] = AT_ARRIVAL
        return False
    _end_transfer(run, actor, row, microbatch)
    return True


@compiled
def _begin_payload(run: Run, actor: int, row: int, microbatch: int) -> bool:
    run.actor_begin[actor] = run.counters[NOW]
    alone = floats_at(run.task_payload[row])[microbatch]
    if alone > 0.0:  # a group of one has nothing to move
        demand, slot = run.task_demand[row], -1
        if demand == BY_ROW:
            demand = run.row_demand[run.task_first_row[row] + microbatch % run.task_load_rows[row]]
        if demand == BY_PATTERN:
            if run.counters[FREE_SLOTS] == 0:
                run.counters[ERROR] = SLOTS_FULL
                return False
            run.counters[FREE_SLOTS] += -1
            slot = run.slots[run.counters[FREE_SLOTS]]
            first, width = _exchange(run, slot, row, microbatch)
        else:
            first = run.demand_first[demand]
            width = run.demand_first[demand + 1] - first
        flow = begin_flow(run, actor, alone, first, width, slot)
        run.actor_flow[actor] = flow
        run.actor_stage[actor] = AT_ARRIVAL if run.flow_waits[flow] == SOMEBODY_WAITS else AT_DEADLINE
        return False
    _end_transfer(run, actor, row, microbatch)
    return True


@compiled
def _exchange(run: Run, slot: int, row: int, microbatch: int) -> tuple[int, int]:
    """Write the links and bytes of an exchange of routed rows into a slot; return (first, number of links).

    The arithmetic of `ExchangePattern.demand` (docs/model.md, eq. G1); links without bytes are dropped.
    """
    pattern = run.task_pattern[row]
    at = microbatch % run.task_load_rows[row]
    load = row_of(floats_at(run.task_load[row]), at, run.members)
    node_load = row_of(floats_at(run.task_node_load[row]), at, run.members)
    received = run.received
    for m in range(run.members):
        received[m] = run.task_nic_bytes[row] * node_load[m]
        received[run.members + m] = run.task_scale_up_bytes[row] * load[m]
    first = run.constant_entries + slot * run.widest
    links, amounts, shares, sources = run.pool_links, run.pool_bytes, run.pattern_share, run.pattern_source
    bounds, named = run.pattern_link_first, run.pattern_links
    width = 0
    for n in range(run.pattern_first_link[pattern], run.pattern_first_link[pattern + 1]):
        amount = 0.0
        for e in range(bounds[n], bounds[n + 1]):
            amount += shares[e] * received[sources[e]]
        if amount > 0.0:
            links[first + width] = named[n]
            amounts[first + width] = amount
            width += 1
    return first, width


@compiled
def _end_transfer(run: Run, actor: int, row: int, microbatch: int) -> None:
    """Write down when each member has its payload."""
    task, begin, now = run.actor_task[actor], run.actor_begin[actor], run.counters[NOW]
    run.actor_stage[actor] = IDLE
    run.finishes[task] = now
    alone = floats_at(run.task_payload[row])[microbatch]
    ends = row_of(ints_at(run.task_member[row]), microbatch, run.members)
    clock = clock_of(run, task)
    if now - begin != int(np.rint(alone)):  # other flows shared its links: stretch every member alike
        stretch = (now - begin) / alone
        for m in range(run.members):
            clock[m] = int(np.rint(ends[m] * stretch)) + begin
    else:
        copy_shifted(clock, ends, begin, run.members)


@compiled
def key_of(run: Run, group: int, direction: int, stage: int, microbatch: int) -> int:
    """Number of the input (0: activation, 1: gradient) that a stage receives for a micro-batch."""
    return ((group * 2 + direction) * run.stages + stage) * run.microbatches + microbatch


@compiled
def send(run: Run, process: int, direction: int, stage: int, microbatch: int, ready: int) -> int:
    """Send the output of a stage, ready at row `ready` of the clock, to the next stage.

    Returns the key of a send that takes time; -1 where nothing is sent or the next stage is on this rank.
    """
    group, rank = process // run.ranks, process % run.ranks
    target = stage + 1 if direction == 0 else stage - 1
    if target < 0 or target >= run.stages:
        return -1
    key = key_of(run, group, direction, target, microbatch)
    receiver = run.rank_of[target * run.microbatches + microbatch]
    if receiver == rank or not run.sends_take_time:
        copy(arrival_of(run, key), clock_of(run, ready), run.members)
        _deliver(run, key)
        return -1
    run.key_ready[key] = ready
    last = largest(clock_of(run, ready), run.members)
    after(run, max(0, last - run.counters[NOW]), LAUNCH, key, process)
    return key


@compiled
def _pair(run: Run, group: int, source: int, target: int) -> int:
    return (group * run.ranks + source) * run.ranks + target


@compiled
def launch_send(run: Run, key: int, process: int) -> None:
    """Put a send on its links when its last member is ready."""
    group, source = process // run.ranks, process % run.ranks
    stage, microbatch = key // run.microbatches % run.stages, key % run.microbatches
    target = run.rank_of[stage * run.microbatches + microbatch]
    run.key_begin[key] = run.counters[NOW]
    pair = _pair(run, group, source, target)
    demand, alone = run.pair_demand[pair], run.pair_alone[pair]
    first = run.demand_first[demand]
    flow = begin_flow(run, -1 - key, alone, first, run.demand_first[demand + 1] - first, -1)
    run.flow_waits[flow] = SOMEBODY_WAITS


@compiled
def end_send(run: Run, key: int) -> None:
    """Deliver a send whose last byte has arrived; each member's send ends with its own NICs."""
    now = run.counters[NOW]
    took = now - run.key_begin[key]
    run.key_end[key] = now
    run.key_order[run.counters[SENDS]] = key
    run.counters[SENDS] += 1
    group = key // (2 * run.stages * run.microbatches)
    stage, microbatch = key // run.microbatches % run.stages, key % run.microbatches
    direction = key // (run.stages * run.microbatches) % 2
    sender = stage - 1 if direction == 0 else stage + 1
    source, target = (
        run.rank_of[sender * run.microbatches + microbatch],
        run.rank_of[stage * run.microbatches + microbatch],
    )
    pair = _pair(run, group, source, target)
    ready, arrival = clock_of(run, run.key_ready[key]), arrival_of(run, key)
    if run.pair_slow[pair] == 0:
        copy_shifted(arrival, ready, took, run.members)
    else:
        slow, each = floats_at(run.pair_slow[pair]), took / run.pair_slow_most[pair]
        for m in range(run.members):
            arrival[m] = ready[m] + int(np.rint(slow[m] * each))
    _deliver(run, key)
    run.key_sent[key] = 1
    after(run, 0, SENT, key, 0)


@compiled
def _deliver(run: Run, key: int) -> None:
    """Hand an input over, and wake up the process that waits for it."""
    run.key_arrived[key] = 1
    if run.key_waiter[key] >= 0:
        after(run, 0, INPUT, key, 0)
