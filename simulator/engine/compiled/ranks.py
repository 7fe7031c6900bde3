"""What a pipeline rank does: the actions of its schedule in order, each on up to three streams, with
transfers of a group and pipeline sends (compiled).
"""

from __future__ import annotations

import numpy as np

from moesim.simulator.engine.compiled.links import SOMEBODY_WAITS, begin_flow, exchange
from moesim.simulator.engine.compiled.memory import (
    BESIDE_ENDED,
    INPUT,
    LAUNCH,
    RESUME,
    SENT,
    START,
    Run,
    Vector,
    add_waits,
    after,
    arrival_of,
    check_ticks,
    clock_of,
    compiled,
    copy,
    copy_shifted,
    fetch_row,
    first_with,
    floats_at,
    is_short,
    largest,
    payloads,
    raise_shifted,
    raise_to,
    row_of,
    schedule,
    set_ready,
    shorten,
    smallest,
    ticks_of,
    total_of,
)
from moesim.simulator.engine.compiled.state import (
    BY_PATTERN,
    BY_ROW,
    COMPUTE,
    DONE,
    ENDING,
    ERROR,
    FREE_SLOTS,
    INPUTS,
    NEXT,
    NOW,
    SENDING,
    SENDS,
    SHARDING,
    SLOTS_FULL,
    TASKS,
    TRANSFER,
)

# -- transfers and sends ---------------------------------------------------------------------------

IDLE, AT_LAUNCH, AT_DEADLINE, AT_ARRIVAL, AT_TURN = range(5)
"""What an actor waits for (`RunState.actor_stage`): nothing; the end of the launch; the first deadline of its
flow; the last byte of its flow; the collective before its own on the sharding stream."""


@compiled
def begin_transfer(run: Run, actor: int, task: int, row: int, microbatch: int) -> bool:
    """Begin a transfer whose inputs are ready at the task's clocks; return whether it has ended at once.

    `task`: number of the task in the step; `row`: its row in the template tables. All members wait for the
    slowest one, then for the launch.
    """
    process = _process_of(run, actor)
    if is_short(run, task):
        base = run.action_base[run.process_action[process]]
        meet = _note_ready(run, process, task, row, ticks_of(run, process, task), base)
    else:
        meet = _note_ready(run, process, task, row, clock_of(run, task), 0)
    run.actor_task[actor] = task
    if run.task_member[row] != 0:
        fetch_row(run, run.task_member[row], microbatch, 8)
    else:
        fetch_row(run, run.task_load[row], microbatch % run.task_load_rows[row], 8)
    wait = meet + run.task_launch[row] - run.counters[NOW]
    if wait > 0:
        run.actor_stage[actor] = AT_LAUNCH
        after(run, wait, RESUME, actor, 0)
        return False
    return _begin_payload(run, actor, row, microbatch)


@compiled
def _note_ready(run: Run, process: int, task: int, row: int, ready: Vector, base: int) -> int:
    """Write down how the members reached a barrier; return when the last one did."""
    most = largest(ready, run.members)
    run.begins[task] = most + base
    run.last_member[task] = first_with(ready, most)
    run.ready_total[task] = total_of(ready, run.members) + base * run.members
    if run.wait_rows > 0:
        add_waits(run, process, run.task_transfer[row], ready, run.last_member[task])
    return most + base


@compiled
def _process_of(run: Run, actor: int) -> int:
    """The process whose transfer an actor runs."""
    processes = run.groups * run.ranks
    return actor if actor < processes else run.beside_owner[actor - processes]


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
    run.payload_begins[run.actor_task[actor]] = run.counters[NOW]
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
            first, width = exchange(run, slot, row, microbatch)
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
def _end_transfer(run: Run, actor: int, row: int, microbatch: int) -> None:
    run.actor_stage[actor] = IDLE
    run.finishes[run.actor_task[actor]] = run.counters[NOW]
    set_payload_ends(run, _process_of(run, actor), run.actor_task[actor], row, microbatch)


@compiled
def set_payload_ends(run: Run, process: int, task: int, row: int, microbatch: int) -> None:
    """Write down when each member has the payload of a transfer that has finished."""
    begin, now = run.payload_begins[task], run.finishes[task]
    alone = floats_at(run.task_payload[row])[microbatch]
    ends = payloads(run, row, microbatch)
    if now - begin != int(np.rint(alone)):  # other flows shared its links: stretch every member alike
        stretch, stretched = (now - begin) / alone, run.durations
        for m in range(run.members):
            stretched[m] = int(np.rint(ends[m] * stretch))
        ends = stretched
    if is_short(run, task):
        base = run.action_base[run.process_action[process]]
        check_ticks(run, shorten(ticks_of(run, process, task), ends, begin - base, run.members))
    else:
        copy_shifted(clock_of(run, task), ends, begin, run.members)


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
    receiver, short = run.rank_of[target * run.microbatches + microbatch], is_short(run, ready)
    arrival = arrival_of(run, key)
    if short:
        base = run.action_base[run.process_action[process]]
        copy_shifted(arrival, ticks_of(run, process, ready), base, run.members)
    else:
        copy(arrival, clock_of(run, ready), run.members)
    if receiver == rank or not run.sends_take_time:
        _deliver(run, key)
        return -1
    after(run, max(0, largest(arrival, run.members) - run.counters[NOW]), LAUNCH, key, process)
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
    arrival = arrival_of(run, key)
    if run.pair_slow[pair] == 0:
        for m in range(run.members):
            arrival[m] += took
    else:
        slow, each = floats_at(run.pair_slow[pair]), took / run.pair_slow_most[pair]
        for m in range(run.members):
            arrival[m] += int(np.rint(slow[m] * each))
    _deliver(run, key)
    run.key_sent[key] = 1
    after(run, 0, SENT, key, 0)


@compiled
def _deliver(run: Run, key: int) -> None:
    """Hand an input over, and wake up the process that waits for it."""
    run.key_arrived[key] = 1
    if run.key_waiter[key] >= 0:
        after(run, 0, INPUT, key, 0)


# -- actions of a rank -----------------------------------------------------------------------------

RUNNING, ENDED, SEEN = 1, 2, 3
"""States of a collective of the sharding stream: it runs, it has ended, and its end has been processed."""

PROCESSED = 2
"""State of a send whose end has been processed (`RunState.key_sent`)."""


@compiled
def go(run: Run, process: int) -> None:
    """Run a rank until it waits for something or has done its last action."""
    running = True
    while running:
        state = run.process_state[process]
        if state == NEXT:
            running = _next_action(run, process)
        elif state == INPUTS:
            running = _inputs(run, process)
        elif state == TASKS:
            running = _task(run, process)
        elif state == TRANSFER:
            run.process_communication[process] = _task_number(run, process)
            running = _left(run, process)
        elif state == ENDING:
            running = _ending(run, process)
        elif state == SENDING:
            running = _sending(run, process)
        else:
            running = False


@compiled
def _start_row(run: Run, action: int) -> int:
    """Row of `RunState.clock` with the starts of an action."""
    return run.tasks + action


@compiled
def _end_row(run: Run, action: int) -> int:
    return run.tasks + run.actions + action


@compiled
def _free_row(run: Run, action: int) -> int:
    return run.tasks + 2 * run.actions + action


@compiled
def _task_number(run: Run, process: int) -> int:
    """Number in the step of the task that a rank is at."""
    return run.action_first_task[run.process_action[process]] + run.process_task[process]


@compiled
def _next_action(run: Run, process: int) -> bool:
    action = run.process_action[process]
    if action == run.process_first[process + 1]:
        run.process_state[process] = DONE
        return False
    start = clock_of(run, _start_row(run, action))
    if action == run.process_first[process]:
        for m in range(run.members):
            start[m] = 0
    else:
        copy(start, clock_of(run, _free_row(run, action - 1)), run.members)
    run.process_at[process] = 0
    run.process_state[process] = INPUTS
    return True


@compiled
def _input_key(run: Run, group: int, action: int, direction: int) -> int:
    """Key of the activation (0) or the gradient (1) that an action needs; -1 where it needs none."""
    stage, microbatch = (
        run.action_stages[2 * action + direction],
        run.action_microbatches[2 * action + direction],
    )
    if direction == 0:
        return key_of(run, group, 0, stage, microbatch) if stage > 0 else -1
    if 0 <= stage < run.stages - 1 and run.code_takes_gradient[run.action_code[action]] == 1:
        return key_of(run, group, 1, stage, microbatch)
    return -1


@compiled
def _inputs(run: Run, process: int) -> bool:
    """Take the inputs of an action one by one; stop at the first that has not arrived."""
    action = run.process_action[process]
    start = _start_row(run, action)
    while run.process_at[process] < 2:
        key = _input_key(run, process // run.ranks, action, run.process_at[process])
        if key >= 0:
            if run.key_arrived[key] == 0:
                run.key_waiter[key] = process
                return False
            raise_to(clock_of(run, start), arrival_of(run, key), run.members)
        run.process_at[process] += 1
    begin_tasks(run, process)
    run.process_state[process] = TASKS
    return True


@compiled
def begin_tasks(run: Run, process: int) -> None:
    """Begin the tasks of an action whose start is known."""
    action = run.process_action[process]
    start = _start_row(run, action)
    if run.ring > 0:
        run.process_row[process] = run.action_first_task[action] - process * run.ring
    if run.clock_first > 0:
        first = clock_of(run, start)
        base = smallest(first, run.members)
        run.action_base[action] = base
        check_ticks(run, shorten(row_of(run.short_starts, process, run.members), first, -base, run.members))
    run.process_compute[process] = start
    run.process_communication[process] = start
    run.process_sharding[process] = -1
    run.process_task[process] = run.process_at[process] = 0
    run.process_sent[process] = 0
    run.process_sends[2 * process + 0] = -1
    run.process_sends[2 * process + 1] = -1


@compiled
def _waits_for(run: Run, waiter: int, task: int) -> bool:
    """Whether an actor must wait for a collective of the sharding stream; it is then woken up at its end."""
    if run.beside_state[task] == SEEN:
        return False
    at = 0 if run.beside_waiters[2 * task + 0] < 0 else 1
    run.beside_waiters[2 * task + at] = waiter
    return True


@compiled
def _task(run: Run, process: int) -> bool:
    """Start the next task of an action when all tasks that it depends on have ended."""
    action, number = run.process_action[process], run.process_task[process]
    code = run.action_code[action]
    row = run.code_first[code] + number
    if row == run.code_first[code + 1]:
        run.process_at[process] = 0
        run.process_state[process] = ENDING
        _join_streams(run, process)
        return True
    first = run.action_first_task[action]
    deps, last = run.task_dep_first[row], run.task_dep_first[row + 1]
    while deps + run.process_at[process] < last:
        dep = run.task_deps[deps + run.process_at[process]]
        if run.task_kind[run.code_first[code] + dep] == SHARDING and _waits_for(run, process, first + dep):
            return False
        run.process_at[process] += 1
    run.process_at[process] = 0
    task, kind = first + number, run.task_kind[row]
    microbatch = run.action_microbatches[2 * action + run.task_side[row]]
    if row + 1 < run.code_first[code + 1]:
        later = run.action_microbatches[2 * action + run.task_side[row + 1]]
        if run.task_rows[row + 1] != 0:
            fetch_row(run, run.task_rows[row + 1], later, 8)
        elif run.task_draws[row + 1] != 0:
            fetch_row(run, run.task_draws[row + 1], later, 4)
    set_ready(run, process, task, row, microbatch)
    if kind == COMPUTE:
        run.process_compute[process] = task
    elif kind == SHARDING:
        _start_beside(run, process, task)
    else:
        run.process_state[process] = TRANSFER
        return begin_transfer(run, process, task, row, microbatch)
    return _left(run, process)


@compiled
def _left(run: Run, process: int) -> bool:
    """Send what leaves after the task that a rank is at, and go on to the next one."""
    action, number = run.process_action[process], run.process_task[process]
    code, task = run.action_code[action], _task_number(run, process)
    for direction in range(2):
        out = run.code_forward_out[code] if direction == 0 else run.code_backward_out[code]
        if number == out:
            _send(run, process, direction, task)
    run.process_task[process] = number + 1
    run.process_state[process] = TASKS
    return True


@compiled
def _send(run: Run, process: int, direction: int, ready: int) -> None:
    """Send an output, and remember a send that takes time."""
    action = run.process_action[process]
    stage, microbatch = (
        run.action_stages[2 * action + direction],
        run.action_microbatches[2 * action + direction],
    )
    key = send(run, process, direction, stage, microbatch, ready)
    if key >= 0:
        run.process_sends[2 * process + run.process_sent[process]] = key
        run.process_sent[process] += 1


@compiled
def _join_streams(run: Run, process: int) -> None:
    """The tasks of the compute and the communication stream have ended."""
    action = run.process_action[process]
    end, base = clock_of(run, _end_row(run, action)), run.action_base[action]
    copy(end, clock_of(run, _start_row(run, action)), run.members)
    for row in (run.process_compute[process], run.process_communication[process]):
        if is_short(run, row):
            raise_shifted(end, ticks_of(run, process, row), base, run.members)
        else:
            raise_to(end, clock_of(run, row), run.members)


@compiled
def _ending(run: Run, process: int) -> bool:
    """Wait for the collectives of the sharding stream, then post what leaves at the end of the action."""
    action = run.process_action[process]
    code = run.action_code[action]
    end = _end_row(run, action)
    first, count = run.action_first_task[action], run.code_first[code + 1] - run.code_first[code]
    while run.process_at[process] < count:
        number = run.process_at[process]
        if run.task_kind[run.code_first[code] + number] == SHARDING:
            if _waits_for(run, process, first + number):
                return False
            if is_short(run, first + number):
                ticks = ticks_of(run, process, first + number)
                raise_shifted(clock_of(run, end), ticks, run.action_base[action], run.members)
            else:
                raise_to(clock_of(run, end), clock_of(run, first + number), run.members)
        run.process_at[process] += 1
    copy(clock_of(run, _free_row(run, action)), clock_of(run, end), run.members)
    if run.code_posts_forward[code] == 1:
        _send(run, process, 0, end)
    if run.code_posts_backward[code] == 1:
        _send(run, process, 1, end)
    run.process_at[process] = 0
    run.process_state[process] = SENDING
    return True


@compiled
def _sending(run: Run, process: int) -> bool:
    """Where the schedule says so, wait for the sends of the action; then go on to the next action."""
    action = run.process_action[process]
    free = clock_of(run, _free_row(run, action))
    while run.action_waits[action] == 1 and run.process_at[process] < run.process_sent[process]:
        key = run.process_sends[2 * process + run.process_at[process]]
        if run.key_sent[key] != PROCESSED:
            run.key_sent_waiter[key] = process
            return False
        raise_to(free, arrival_of(run, key), run.members)
        run.process_at[process] += 1
    run.process_action[process] = action + 1
    run.process_state[process] = NEXT
    return True


@compiled
def _start_beside(run: Run, process: int, task: int) -> None:
    """Start a collective of the sharding stream, which runs beside the rank's other work."""
    run.beside_before[task] = run.process_sharding[process]
    run.beside_state[task] = RUNNING
    run.process_sharding[process] = task
    actor = run.groups * run.ranks + task
    run.actor_task[actor] = task
    run.beside_owner[task] = process
    run.actor_stage[actor] = AT_TURN
    schedule(run, run.counters[NOW], START, actor, 0, True)


@compiled
def go_beside(run: Run, task: int, process: int) -> None:
    """Run a collective of the sharding stream until it waits for something or has ended."""
    actor = run.groups * run.ranks + task
    action = run.process_action[process]
    row = run.code_first[run.action_code[action]] + task - run.action_first_task[action]
    microbatch = run.action_microbatches[2 * action + run.task_side[row]]
    if run.actor_stage[actor] == AT_TURN:
        before = run.beside_before[task]
        if before >= 0:
            if _waits_for(run, actor, before):
                return
            if is_short(run, task):
                raise_to(ticks_of(run, process, task), ticks_of(run, process, before), run.members)
            else:
                raise_to(clock_of(run, task), clock_of(run, before), run.members)
        run.actor_stage[actor] = IDLE
        ended = begin_transfer(run, actor, task, row, microbatch)
    else:
        ended = go_on(run, actor, row, microbatch)
    if ended:
        run.beside_state[task] = ENDED
        after(run, 0, BESIDE_ENDED, task, 0)
