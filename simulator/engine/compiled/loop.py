"""The compiled functions that Python calls: the event loop, and the durations of a phase."""

from __future__ import annotations

from moesim.simulator.engine.compiled.links import NOBODY_WAITS, end_flow, forget_flow
from moesim.simulator.engine.compiled.memory import (
    ARRIVED,
    BESIDE_ENDED,
    DEADLINE,
    INPUT,
    KINDS,
    LAUNCH,
    RESUME,
    SENT,
    START,
    Run,
    as_run,
    compiled,
    floats_at,
    ints_at,
    largest,
    phase_row,
    raise_to,
    row_of,
    schedule,
    set_ready,
    smallest,
    take_first,
    ticks_of,
    total_of,
)
from moesim.simulator.engine.compiled.ranks import (
    AT_DEADLINE,
    PROCESSED,
    SEEN,
    begin_tasks,
    end_send,
    go,
    go_beside,
    go_on,
    launch_send,
    set_payload_ends,
)
from moesim.simulator.engine.compiled.state import COMPUTE, ERROR, EVENTS, SHARDING

# -- the event loop --------------------------------------------------------------------------------


@compiled
def start(address: int) -> None:
    """Schedule the start of every pipeline rank of every group; `address`: that of the table of addresses."""
    run = as_run(address)
    for process in range(run.groups * run.ranks):
        schedule(run, 0, START, process, 0, True)


@compiled
def advance(address: int, events: int) -> int:
    """Run at most so many events; return how many are left in the queue (0 after an error as well).

    The caller looks at `RunState.counters[ERROR]`, and can stop a long run between two calls.
    """
    run = as_run(address)
    counters = run.counters
    for _ in range(events):
        if counters[EVENTS] == 0 or counters[ERROR] != 0:
            break
        place = take_first(run)
        what, extra = run.queue_what[place], run.queue_extra[place]
        _handle(run, what % KINDS, what // KINDS, extra)
    return 0 if counters[ERROR] != 0 else counters[EVENTS]


@compiled
def _handle(run: Run, kind: int, subject: int, extra: int) -> None:
    if kind == DEADLINE:
        _deadline(run, subject, extra)
    elif kind in (RESUME, START):
        _wake(run, subject)
    elif kind == ARRIVED:
        owner = run.flow_owner[subject]
        if owner >= 0:
            _wake(run, owner)
        else:
            end_send(run, -1 - owner)
        forget_flow(run, subject)
    elif kind == LAUNCH:
        launch_send(run, subject, extra)
    elif kind == INPUT:
        waiter = run.key_waiter[subject]
        run.key_waiter[subject] = -1
        go(run, waiter)
    elif kind == SENT:
        run.key_sent[subject] = PROCESSED
        waiter = run.key_sent_waiter[subject]
        if waiter >= 0:
            go(run, waiter)
    elif kind == BESIDE_ENDED:
        run.beside_state[subject] = SEEN
        for n in range(2):
            waiter = run.beside_waiters[2 * subject + n]
            if waiter >= 0:
                _continue_actor(run, waiter)


@compiled
def _deadline(run: Run, flow: int, version: int) -> None:
    """End a flow at its deadline unless that has moved; its actor looks at the flow at the first deadline."""
    ended, owner = version == run.flow_version[flow], run.flow_owner[flow]
    if ended:
        end_flow(run, flow)
    if version == run.flow_first[flow] and owner >= 0 and run.actor_stage[owner] == AT_DEADLINE:
        _wake(run, owner)
    if ended and run.flow_waits[flow] == NOBODY_WAITS:
        forget_flow(run, flow)


@compiled
def _wake(run: Run, actor: int) -> None:
    """Continue the transfer of an actor, and its rank when the transfer has ended."""
    processes = run.groups * run.ranks
    if actor >= processes or run.actor_stage[actor] == 0:
        _continue_actor(run, actor)
        return
    action = run.process_action[actor]
    row = run.code_first[run.action_code[action]] + run.process_task[actor]
    if go_on(run, actor, row, run.action_microbatches[2 * action + run.task_side[row]]):
        go(run, actor)


@compiled
def _continue_actor(run: Run, actor: int) -> None:
    processes = run.groups * run.ranks
    if actor < processes:
        go(run, actor)
    else:
        go_beside(run, actor - processes, run.beside_owner[actor - processes])


@compiled
def end_times(address: int, group: int) -> int:
    """Work out again when the tasks of a group ended, into `RunState.ticks` [its tasks, members].

    The run, whose other arrays are read, is over. Returns 0.
    """
    run = as_run(address)
    first_task = run.action_first_task[run.process_first[group * run.ranks]]
    for process in range(group * run.ranks, (group + 1) * run.ranks):
        for action in range(run.process_first[process], run.process_first[process + 1]):
            run.process_action[process] = action
            begin_tasks(run, process)
            run.process_row[process] = first_task
            row = run.code_first[run.action_code[action]]
            for task in range(run.action_first_task[action], run.action_first_task[action + 1]):
                _end_again(run, process, task, row)
                row += 1
    return 0


@compiled
def _end_again(run: Run, process: int, task: int, row: int) -> None:
    """Work out again when a task ended whose predecessors are there."""
    kind, before = run.task_kind[row], run.process_sharding[process]
    microbatch = run.action_microbatches[2 * run.process_action[process] + run.task_side[row]]
    set_ready(run, process, task, row, microbatch)
    if kind == COMPUTE:
        run.process_compute[process] = task
        return
    if kind == SHARDING:
        if before >= 0:
            raise_to(ticks_of(run, process, task), ticks_of(run, process, before), run.members)
        run.process_sharding[process] = task
    else:
        run.process_communication[process] = task
    set_payload_ends(run, process, task, row, microbatch)


# -- durations of phases ---------------------------------------------------------------------------


@compiled
def fill_rows(
    fixed_s: float,
    row_s: float,
    load: int,
    draws: int,
    clock: int,
    cv: float,
    microbatches: int,
    members: int,
    rows: int,
    figures: int,
) -> int:
    """Write nanoseconds [micro-batches, members] of a phase (eq. E1) to the address `rows`, and their largest
    and sum by micro-batch to `figures`.

    The other arguments are a `Formula`. Returns 0.
    """
    for microbatch in range(microbatches):
        row = row_of(ints_at(rows), microbatch, members)
        phase_row(row, fixed_s, row_s, load, draws, clock, cv, microbatch, members)
        ints_at(figures)[microbatch] = largest(row, members)
        ints_at(figures)[microbatches + microbatch] = total_of(row, members)
    return 0


@compiled
def fill_figures(
    phases: int,
    numbers: int,
    addresses: int,
    known: int,
    microbatches: int,
    members: int,
    figures: int,
    first_use: int,
    last_use: int,
    use_rank: int,
    weights: int,
    sums: int,
    row: int,
) -> int:
    """Write figures of phases by micro-batch, and add their weighted sums over micro-batches.

    The arguments are addresses: `numbers` [phases, 3] and `addresses` [phases, 3] of `Formula`s; `known`
    [phases]: 1 where the figures are known and stay unwritten; `figures` [phases, 3, micro-batches]: largest,
    smallest and sum over the members. Uses `first_use` to `last_use`
    (exclusive) [phases] of a phase add their `weights` [uses, micro-batches] times its nanoseconds to the row
    `use_rank` [uses] of `sums` [ranks, members]. `row` [members]: room. Returns 0.
    """
    own, value, place = ints_at(row), floats_at(numbers), ints_at(addresses)
    for phase in range(phases):
        at = 3 * phase
        found = row_of(ints_at(figures), at, microbatches)
        first, last = ints_at(first_use)[phase], ints_at(last_use)[phase]
        for microbatch in range(microbatches):
            counts = ints_at(known)[phase] == 0
            for use in range(first, last):
                counts = counts or floats_at(weights)[use * microbatches + microbatch] > 0.0
            if not counts:
                continue
            phase_row(
                own,
                value[at],
                value[at + 1],
                place[at],
                place[at + 1],
                place[at + 2],
                value[at + 2],
                microbatch,
                members,
            )
            if ints_at(known)[phase] == 0:
                found[microbatch] = largest(own, members)
                found[microbatches + microbatch] = smallest(own, members)
                found[2 * microbatches + microbatch] = total_of(own, members)
            for use in range(first, last):
                weight = floats_at(weights)[use * microbatches + microbatch]
                if weight > 0.0:
                    to = row_of(floats_at(sums), ints_at(use_rank)[use], members)
                    for m in range(members):
                        to[m] += weight * own[m]
    return 0
