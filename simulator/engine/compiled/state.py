"""The state of a run of the compiled event loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.compiled.spare import SPARE
from moesim.simulator.engine.compiled.tables import SHARDING, StepSizes, Tables

NOW, SEQUENCE, EVENTS, FLOWS, ERROR, SENDS, FREE_SLOTS, STAMP = range(8)
"""Places in `RunState.counters`: the time in ns, the number of the last event, events in the queue, flows so
far, the error that stopped the run, sends that have ended, slots that are free, and the last stamp."""

SIZES = (
    *StepSizes._fields,
    "most_events",
    "most_users",
    "most_slots",
    "most_coupled",
    "constant_entries",
    "widest",
)
"""Names of the numbers in `RunState.sizes`: those of `StepSizes` and `Room`, and the entries of
`RunState.pool_links` that constant demands take and that each slot takes."""

NEXT, INPUTS, TASKS, TRANSFER, ENDING, SENDING, DONE = range(7)
"""Where a rank is (`RunState.process_state`): before an action, at its inputs, at a task, inside a transfer,
at the end of the tasks, at the sends that it waits for, after the last action."""

QUEUE_FULL, USERS_FULL, SLOTS_FULL, GROUP_FULL, DEAD_LINK = 1, 2, 3, 4, 5
"""Errors. All but a dead link go away with more room."""


class RunState(NamedTuple):
    """Arrays that the loop changes; numbers of actions, tasks, keys and processes as in `Tables`.

    `clock`: vectors of the members' clocks [rows, members], first the ends of all tasks, then the starts,
    ends and free times of all actions. `queue_*`: a binary heap of events by (time, order), and what
    each event is in a place of its own. `process_*`: one
    entry a pipeline rank of a group. `actor_*`: whoever runs a transfer, the processes and then, where there
    is a sharding stream, every task. `key_*`: outputs on their way, by (group, F or B, receiving stage,
    micro-batch); `arrivals` holds when each member has one. `flow_*`: transfers on links, by their serial
    number. `pool_*`: links and bytes of all demands, constant ones first, then `slots` rows for those that
    follow a pattern, with the load that these offer. `received`: bytes of each member over both hops.
    `link_*`: offered load, carried bytes, and the flows on every link in order of arrival.
    """

    sizes: IntArray
    counters: IntArray
    clock: IntArray
    begins: IntArray
    finishes: IntArray
    last_member: IntArray
    ready_total: IntArray
    queue_time: IntArray
    queue_order: IntArray
    queue_what: IntArray
    queue_extra: IntArray
    queue_places: IntArray
    process_state: IntArray
    process_action: IntArray
    process_task: IntArray
    process_at: IntArray
    process_compute: IntArray
    process_communication: IntArray
    process_sharding: IntArray
    process_sends: IntArray
    process_sent: IntArray
    actor_stage: IntArray
    actor_task: IntArray
    actor_begin: IntArray
    actor_flow: IntArray
    beside_state: IntArray
    beside_before: IntArray
    beside_owner: IntArray
    beside_waiters: IntArray
    key_arrived: IntArray
    key_waiter: IntArray
    key_ready: IntArray
    key_begin: IntArray
    key_end: IntArray
    key_sent: IntArray
    key_sent_waiter: IntArray
    key_order: IntArray
    arrivals: IntArray
    flow_owner: IntArray
    flow_version: IntArray
    flow_waits: IntArray
    flow_first: IntArray
    flow_links: IntArray
    flow_width: IntArray
    flow_slot: IntArray
    flow_alone: FloatArray
    flow_remaining: FloatArray
    flow_rate: FloatArray
    flow_updated: IntArray
    pool_links: IntArray
    pool_bytes: FloatArray
    slots: IntArray
    pool_offered: IntArray
    received: FloatArray
    link_load: IntArray
    link_bytes: FloatArray
    link_users: IntArray
    link_count: IntArray
    flow_seen: IntArray
    flow_stamp: IntArray
    link_stamp: IntArray
    freed: IntArray
    group: IntArray
    rates: FloatArray
    caps: FloatArray
    largest: FloatArray
    levels: FloatArray
    active: IntArray
    slope: FloatArray
    used: FloatArray
    reach: FloatArray
    held: IntArray
    touched: IntArray
    entry_link: IntArray
    entry_flow: IntArray
    entry_share: FloatArray


class Room(NamedTuple):
    """Sizes that a run may outgrow: events in the queue, flows on one link, demands that follow patterns, and
    flows that links couple."""

    events: int
    users: int
    slots: int
    coupled: int

    def more(self, error: int) -> Room:
        """Twice the room of what was full."""
        return Room(
            self.events * (2 if error == QUEUE_FULL else 1),
            self.users * (2 if error == USERS_FULL else 1),
            self.slots * (2 if error == SLOTS_FULL else 1),
            self.coupled * (2 if error == GROUP_FULL else 1),
        )


def initial_room(sizes: StepSizes) -> Room:
    """Room that suffices for nearly every step."""
    processes = sizes.groups * sizes.ranks
    return Room(64 * processes + 1024, users=16, slots=2 * processes + 16, coupled=4 * processes + 64)


_SIZE_OF = {
    "queue": "events",
    "process": "processes",
    "actor": "actors",
    "beside": "besides",
    "key": "keys",
    "flow": "flows",
    "link": "links",
    "entry": "entries",
    **dict.fromkeys(("begins", "finishes", "last_member", "ready_total"), "tasks"),
    **dict.fromkeys(("slope", "used", "reach", "held", "touched"), "links"),
    **dict.fromkeys(("group", "rates", "caps", "largest", "levels", "active"), "together"),
    "freed": "longest",
    "received": "received",
}
"""Size of every vector that begins empty, by its name or by the first word of its name."""
_ROWS_OF = {"process_sends": 2, "beside_waiters": 2}
"""Numbers an entry of the vectors that have more than one."""
_NONE_YET = frozenset(
    (
        *("begins", "finishes", "last_member", "beside_before", "beside_waiters"),
        *("key_waiter", "key_sent_waiter"),
    )
)
"""Vectors that begin with -1 instead of 0."""


def new_state(tables: Tables, sizes: StepSizes, room: Room) -> RunState:
    """The state before the first event: every link idle, every process about to start."""
    members, processes, tasks = sizes.members, sizes.groups * sizes.ranks, sizes.tasks
    keys = sizes.groups * 2 * sizes.stages * sizes.microbatches
    constant, widest = len(tables.demand_links), int(np.diff(tables.pattern_first_link).max(initial=0))
    longest = max(widest, int(np.diff(tables.demand_first).max(initial=0)), 1)
    together = min(sizes.flows, room.coupled) + 1
    besides = tasks if bool((tables.task_kind == SHARDING).any()) else 0
    count = {
        "events": room.events,
        "processes": processes,
        "actors": processes + besides,
        "besides": besides,
        "keys": keys,
        "flows": sizes.flows,
        "links": len(tables.capacity),
        "tasks": tasks,
        "together": together,
        "longest": longest,
        "entries": together * longest,
        "received": 2 * members,
    }
    pool = constant + room.slots * widest
    given: dict[str, Any] = {
        "sizes": np.array([*sizes, *room, constant, widest], dtype=np.int64),
        "counters": np.zeros(8, dtype=np.int64),
        "clock": SPARE.take(tasks + 3 * sizes.actions, members),
        "arrivals": np.empty((keys, members), dtype=np.int64),
        "queue_places": np.arange(room.events),
        "process_action": tables.process_first[:-1].copy(),
        "slots": np.arange(room.slots),
        "pool_links": np.empty(pool, dtype=np.int64),
        "pool_bytes": np.empty(pool),
        "pool_offered": np.empty(pool, dtype=np.int64),
        "link_users": np.zeros((len(tables.capacity), room.users), dtype=np.int64),
    }
    given["counters"][FREE_SLOTS] = room.slots
    given["pool_links"][:constant], given["pool_bytes"][:constant] = tables.demand_links, tables.demand_bytes
    fields: dict[str, Any] = {n: given[n] if n in given else _vector(n, count) for n in RunState._fields}
    return RunState(**fields)


def _vector(name: str, count: Mapping[str, int]) -> FloatArray | IntArray:
    size = count[_SIZE_OF.get(name) or _SIZE_OF[name.split("_")[0]]] * _ROWS_OF.get(name, 1)
    if "Float" in str(RunState.__annotations__[name]):
        return np.zeros(size)
    return np.full(size, -1, dtype=np.int64) if name in _NONE_YET else np.zeros(size, dtype=np.int64)
