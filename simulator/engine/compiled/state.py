"""The state of a run of the compiled event loop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.compiled.tables import SHARDING, Sizes, Tables

NOW, SEQUENCE, EVENTS, FLOWS, ERROR, SENDS, FREE_SLOTS, STAMP = range(8)
"""Places in `State.counters`: the time in ns, the number of the last event, events in the queue, flows so
far, the error that stopped the run, sends that have ended, slots that are free, and the last stamp."""

SIZES = (
    *Sizes._fields,
    "most_events",
    "most_users",
    "most_slots",
    "most_coupled",
    "constant_entries",
    "widest",
)
"""Names of the numbers in `State.sizes`: those of `Sizes` and `Room`, and the entries of `State.pool_links`
that constant demands take and that each slot takes."""

QUEUE_FULL, USERS_FULL, SLOTS_FULL, GROUP_FULL, DEAD_LINK = 1, 2, 3, 4, 5
"""Errors. All but a dead link go away with more room."""


class State(NamedTuple):
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


def initial_room(sizes: Sizes) -> Room:
    """Room that suffices for nearly every step."""
    processes = sizes.groups * sizes.ranks
    return Room(64 * processes + 1024, users=16, slots=2 * processes + 16, coupled=4 * processes + 64)


def new_state(tables: Tables, sizes: Sizes, room: Room) -> State:
    """The state before the first event: every link idle, every process about to start."""
    t, members, flows = tables, sizes.members, sizes.flows
    processes, actions, tasks = sizes.groups * sizes.ranks, sizes.actions, sizes.tasks
    keys = sizes.groups * 2 * sizes.stages * sizes.microbatches
    besides = tasks if bool((t.task_kind == SHARDING).any()) else 0
    links, constant = len(t.capacity), len(t.demand_links)
    widest = int(np.diff(t.pattern_first_link).max(initial=0))
    longest = max(widest, int(np.diff(t.demand_first).max(initial=0)), 1)
    together = min(flows, room.coupled) + 1

    def ints(*shape: int, value: int = 0) -> IntArray:
        return np.zeros(shape, dtype=np.int64) if value == 0 else np.full(shape, value, dtype=np.int64)

    pool_links = np.empty(constant + room.slots * widest, dtype=np.int64)
    pool_bytes = np.empty(constant + room.slots * widest)
    pool_links[:constant], pool_bytes[:constant] = t.demand_links, t.demand_bytes
    counters = ints(8)
    counters[FREE_SLOTS] = room.slots
    return State(
        sizes=np.array([*sizes, *room, constant, widest], dtype=np.int64),
        counters=counters,
        clock=np.empty((tasks + 3 * actions, members), dtype=np.int64),
        begins=ints(tasks, value=-1),
        finishes=ints(tasks, value=-1),
        queue_time=ints(room.events),
        queue_order=ints(room.events),
        queue_what=ints(room.events),
        queue_extra=ints(room.events),
        queue_places=np.arange(room.events),
        process_state=ints(processes),
        process_action=t.process_first[:-1].copy(),
        process_task=ints(processes),
        process_at=ints(processes),
        process_compute=ints(processes),
        process_communication=ints(processes),
        process_sharding=ints(processes),
        process_sends=ints(processes, 2),
        process_sent=ints(processes),
        actor_stage=ints(processes + besides),
        actor_task=ints(processes + besides),
        actor_begin=ints(processes + besides),
        actor_flow=ints(processes + besides),
        beside_state=ints(besides),
        beside_before=ints(besides, value=-1),
        beside_owner=ints(besides),
        beside_waiters=ints(besides, 2, value=-1),
        key_arrived=ints(keys),
        key_waiter=ints(keys, value=-1),
        key_ready=ints(keys),
        key_begin=ints(keys),
        key_end=ints(keys),
        key_sent=ints(keys),
        key_sent_waiter=ints(keys, value=-1),
        key_order=ints(keys),
        arrivals=np.empty((keys, members), dtype=np.int64),
        flow_owner=ints(flows),
        flow_version=ints(flows),
        flow_waits=ints(flows),
        flow_first=ints(flows),
        flow_links=ints(flows),
        flow_width=ints(flows),
        flow_slot=ints(flows),
        flow_alone=np.zeros(flows),
        flow_remaining=np.zeros(flows),
        flow_rate=np.zeros(flows),
        flow_updated=ints(flows),
        pool_links=pool_links,
        pool_bytes=pool_bytes,
        slots=np.arange(room.slots),
        pool_offered=np.empty(len(pool_links), dtype=np.int64),
        received=np.zeros(2 * members),
        link_load=ints(links),
        link_bytes=np.zeros(links),
        link_users=ints(links, room.users),
        link_count=ints(links),
        flow_seen=ints(flows),
        flow_stamp=ints(flows),
        link_stamp=ints(links),
        freed=ints(longest),
        group=ints(together),
        rates=np.zeros(together),
        caps=np.zeros(together),
        largest=np.zeros(together),
        levels=np.zeros(together),
        active=ints(together),
        slope=np.zeros(links),
        used=np.zeros(links),
        reach=np.zeros(links),
        held=ints(links),
        touched=ints(links),
        entry_link=ints(together * longest),
        entry_flow=ints(together * longest),
        entry_share=np.zeros(together * longest),
    )
