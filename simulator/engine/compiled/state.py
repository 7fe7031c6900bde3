"""The programs of a step and the state of a run as arrays, and the table of addresses by which compiled code
finds them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesim.hwmodels.arrays import FloatArray, IntArray

ShortArray = NDArray[np.int32]

# -- the programs of a step ------------------------------------------------------------------------

COMPUTE, COMMUNICATION, SHARDING = 0, 1, 2
"""Kinds of a task: on the compute stream, or a transfer on one of the two transfer streams."""

BY_PATTERN, BY_ROW = -1, -2
"""Instead of the number of a demand: the demand follows an exchange pattern, or is listed by micro-batch."""


class StepSizes(NamedTuple):
    """StepSizes of a step, and two of its properties.

    `sends_take_time`: whether sends between pipeline ranks use links. `few_links`: which of the two link
    pools SimPy takes for as many links.
    """

    members: int
    groups: int
    ranks: int
    stages: int
    microbatches: int
    sends_take_time: bool
    few_links: bool
    actions: int
    tasks: int
    wait_rows: int
    """Transfers of templates, and one more, where the waits of members are added up; 0 where they are not."""


class Tables(NamedTuple):
    """All groups of a step. Actions, tasks, keys and processes of group g follow those of group g - 1.

    A process is a pipeline rank of a group. `action_*`: one entry an action. `code_*`: one a template; -1
    where an output does not leave inside the action. `task_*`: one a task of a template; `task_rows`,
    `task_payload`, `task_member`, `task_load` and `task_node_load` are memory addresses of [micro-batches,
    members] arrays (of payloads [micro-batches]), so that no duration is copied. Where `task_rows` is 0, the
    loop works durations out from the task's `Formula`: `task_fixed_s`, `task_row_s`, `task_cv`, and the
    addresses `task_received` (relative rows), `task_draws` and `task_clock`; where `task_member` is 0, a
    payload from `task_nic_s`, `task_scale_up_s` and both loads. `task_transfer`: row in `RunState.waits`.
    `demand_*`: links and bytes of every constant demand, row by row. `pattern_*`: exchange patterns; link n
    of pattern p carries entries `pattern_link_first[m]` to `pattern_link_first[m + 1]`, m = `pattern_row[p]`
    + n (patterns that differ only in the numbers of their links share them), each a share of what a member
    receives over the scale-out hop (source = member) or the scale-up hop (source = members + member).
    `pair_*` [group, source, target]: sends.
    """

    rank_of: IntArray
    process_first: IntArray
    action_code: IntArray
    action_stages: IntArray
    action_microbatches: IntArray
    action_waits: IntArray
    action_first_task: IntArray
    code_first: IntArray
    code_forward_out: IntArray
    code_backward_out: IntArray
    code_posts_forward: IntArray
    code_posts_backward: IntArray
    code_takes_gradient: IntArray
    task_kind: IntArray
    task_side: IntArray
    task_dep_first: IntArray
    task_deps: IntArray
    task_rows: IntArray
    task_fixed_s: FloatArray
    task_row_s: FloatArray
    task_cv: FloatArray
    task_received: IntArray
    task_draws: IntArray
    task_clock: IntArray
    task_transfer: IntArray
    task_launch: IntArray
    task_payload: IntArray
    task_member: IntArray
    task_demand: IntArray
    task_first_row: IntArray
    task_pattern: IntArray
    task_nic_s: FloatArray
    task_scale_up_s: FloatArray
    task_nic_bytes: FloatArray
    task_scale_up_bytes: FloatArray
    task_load: IntArray
    task_node_load: IntArray
    task_load_rows: IntArray
    row_demand: IntArray
    demand_first: IntArray
    demand_links: ShortArray
    demand_bytes: FloatArray
    pattern_first_link: IntArray
    pattern_links: ShortArray
    pattern_row: IntArray
    pattern_link_first: IntArray
    pattern_source: ShortArray
    pattern_share: FloatArray
    pair_alone: FloatArray
    pair_demand: IntArray
    pair_slow: IntArray
    pair_slow_most: FloatArray
    capacity: FloatArray
    unit: FloatArray


# -- memory that is kept ---------------------------------------------------------------------------

MOST_BYTES = 64_000_000
"""Largest memory that is kept; a larger run, such as full resolution, takes and returns its own."""


class SpareMemory:
    """One block of integers, handed out again when nothing refers to it any more."""

    def __init__(self, kind: type[np.signedinteger[Any]]) -> None:
        """Nothing is kept before the first run."""
        self._kind = kind
        self._block: NDArray[Any] | None = None

    def take(self, rows: int, columns: int) -> NDArray[Any]:
        """An array of arbitrary numbers [rows, columns], in the kept block if it is free and large enough."""
        size = rows * columns
        if size * self._kind().nbytes > MOST_BYTES:
            return np.empty((rows, columns), dtype=self._kind)
        block, self._block = self._block, None
        # Every view of a block refers to it, so a block with one name left (and the argument) is free.
        if block is None or len(block) < size or sys.getrefcount(block) > 2:
            block = np.empty(size, dtype=self._kind)
        self._block = block
        return block[:size].reshape(rows, columns)


SPARE, SPARE_SHORT = SpareMemory(np.int64), SpareMemory(np.int32)


# -- the state of a run ----------------------------------------------------------------------------

NOW, SEQUENCE, EVENTS, FLOWS, ERROR, SENDS, FREE_SLOTS, STAMP, SERIAL = range(9)
"""Places in `RunState.counters`: the time in ns, the number of the last event, events in the queue, flows
that are alive, the error that stopped the run, sends that have ended, slots that are free, the last stamp,
and the flows so far."""

SIZES = (
    *StepSizes._fields,
    "most_events",
    "most_users",
    "most_slots",
    "most_flows",
    "constant_entries",
    "widest",
    "links",
    "clock_first",
    "ring",
)
"""Names of the numbers in `RunState.sizes`: those of `StepSizes` and `Room`, the entries of
`RunState.pool_links` that constant demands take and that each slot takes, the links of the cluster, and the
row that is first in `RunState.clock`: 0, or that of the first start if `RunState.ticks` has the ends of
tasks, and the rows of that a process has for its action, or 0 if all tasks have one."""

NEXT, INPUTS, TASKS, TRANSFER, ENDING, SENDING, DONE = range(7)
"""Where a rank is (`RunState.process_state`): before an action, at its inputs, at a task, inside a transfer,
at the end of the tasks, at the sends that it waits for, after the last action."""

QUEUE_FULL, USERS_FULL, SLOTS_FULL, FLOWS_FULL, DEAD_LINK, TOO_LONG = 1, 2, 3, 4, 5, 6
"""Errors. All but a dead link go away with more room; an action is too long for times in 32 bits."""


class RunState(NamedTuple):
    """Arrays that the loop changes; numbers of actions, tasks, keys and processes as in `Tables`.

    `clock`: vectors of the members' clocks [rows, members], first the ends of all tasks, then the starts,
    ends and free times of all actions. Where no action takes more than `MOST_TICKS`, the ends of tasks are in
    `ticks` instead, in 32 bits from the `action_base` of their action, its earliest start, at the number of
    the task less `process_row`: of all tasks, or of the actions that run where all would take too much
    memory; `short_starts` [processes, members] are the starts of the actions that run, from the same base.
    `payload_begins` [tasks]: when a payload began. `waits` [transfers, members]: waits at barriers, summed
    over all passes; `held_up` [processes, members]: time in which a member alone kept the others waiting.
    `queue_*`: a binary heap of events by (time, order), and what each event is in a place of its own.
    `process_*`: one entry a pipeline rank of a group. `actor_*`: whoever runs a transfer, the processes and
    then, where there is a sharding stream, every task. `key_*`: outputs on their way, by (group, F or B,
    receiving stage, micro-batch); `arrivals` holds when each member has one. `flow_*`: transfers that are on
    links or whose end is not processed yet; `flow_places` lists those that are alive, then those that are
    free. `pool_*`: links and bytes of all demands, constant ones first, then `slots` rows for those that
    follow a pattern, with the load that these offer. `received`: bytes of each member over both hops.
    `durations`: those of the members in the task that starts. `link_*`:
    offered load, carried bytes, and the flows on every link in order of arrival (`link_users` [places,
    links]).
    """

    sizes: IntArray
    counters: IntArray
    clock: IntArray
    ticks: ShortArray
    short_starts: ShortArray
    action_base: IntArray
    begins: IntArray
    payload_begins: IntArray
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
    process_row: IntArray
    process_at: IntArray
    process_compute: IntArray
    process_communication: IntArray
    process_sharding: IntArray
    process_sends: IntArray
    process_sent: IntArray
    actor_stage: IntArray
    actor_task: IntArray
    actor_flow: IntArray
    beside_state: IntArray
    beside_before: IntArray
    beside_owner: IntArray
    beside_waiters: IntArray
    key_arrived: IntArray
    key_waiter: IntArray
    key_begin: IntArray
    key_end: IntArray
    key_sent: IntArray
    key_sent_waiter: IntArray
    key_order: IntArray
    arrivals: IntArray
    waits: IntArray
    held_up: IntArray
    flow_places: IntArray
    flow_serial: IntArray
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
    pool_links: ShortArray
    pool_bytes: FloatArray
    slots: IntArray
    pool_offered: IntArray
    received: FloatArray
    durations: IntArray
    link_load: IntArray
    link_bytes: FloatArray
    link_users: ShortArray
    link_count: ShortArray
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
    flows that are alive."""

    events: int
    users: int
    slots: int
    flows: int
    short: bool = True
    """Whether the ends of tasks take 32 bits."""

    def more(self, error: int) -> Room:
        """Twice the room of what was full."""
        return Room(
            self.events * (2 if error == QUEUE_FULL else 1),
            self.users * (2 if error == USERS_FULL else 1),
            self.slots * (2 if error == SLOTS_FULL else 1),
            self.flows * (2 if error == FLOWS_FULL else 1),
            self.short and error != TOO_LONG,
        )


def initial_room(sizes: StepSizes) -> Room:
    """Room that suffices for nearly every step."""
    processes = sizes.groups * sizes.ranks
    return Room(64 * processes + 1024, users=16, slots=2 * processes + 16, flows=4 * processes + 64)


_SIZE_OF = {
    "queue": "events",
    "process": "processes",
    "action": "actions",
    "actor": "actors",
    "beside": "besides",
    "key": "keys",
    "flow": "flows",
    "link": "links",
    "entry": "entries",
    **dict.fromkeys(("begins", "payload_begins", "finishes", "last_member", "ready_total"), "tasks"),
    **dict.fromkeys(("slope", "used", "reach", "held", "touched"), "links"),
    **dict.fromkeys(("group", "rates", "caps", "largest", "levels", "active"), "flows"),
    "freed": "longest",
    "received": "received",
    "durations": "members",
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
    besides = tasks if bool((tables.task_kind == SHARDING).any()) else 0
    count = {
        "events": room.events,
        "processes": processes,
        "actions": sizes.actions,
        "actors": processes + besides,
        "besides": besides,
        "keys": keys,
        "flows": room.flows,
        "links": len(tables.capacity),
        "tasks": tasks,
        "longest": longest,
        "entries": room.flows * longest,
        "received": 2 * members,
        "members": members,
    }
    pool = constant + room.slots * widest
    short = tasks if room.short else 0
    ring = int(np.diff(tables.code_first).max(initial=1)) if 4 * short * members > MOST_BYTES else 0
    given: dict[str, Any] = {
        "sizes": np.array(
            [*sizes, *room[:4], constant, widest, len(tables.capacity), short, ring], dtype=np.int64
        ),
        "counters": np.zeros(9, dtype=np.int64),
        "clock": SPARE.take(tasks - short + 3 * sizes.actions, members),
        "ticks": SPARE_SHORT.take(processes * ring or short, members),
        "short_starts": np.zeros((processes, members), dtype=np.int32),
        "arrivals": np.empty((keys, members), dtype=np.int64),
        "waits": np.zeros((sizes.wait_rows, members), dtype=np.int64),
        "held_up": np.zeros((processes, members), dtype=np.int64),
        "queue_places": np.arange(room.events),
        "flow_places": np.arange(room.flows),
        "process_action": tables.process_first[:-1].copy(),
        "slots": np.arange(room.slots),
        "pool_links": np.empty(pool, dtype=np.int32),
        "pool_bytes": np.empty(pool),
        "pool_offered": np.empty(pool, dtype=np.int64),
        "link_users": np.zeros((room.users, len(tables.capacity)), dtype=np.int32),
    }
    given["counters"][FREE_SLOTS] = room.slots
    given["pool_links"][:constant], given["pool_bytes"][:constant] = tables.demand_links, tables.demand_bytes
    fields: dict[str, Any] = {n: given[n] if n in given else _vector(n, count) for n in RunState._fields}
    return RunState(**fields)


def _vector(name: str, count: Mapping[str, int]) -> FloatArray | IntArray:
    size = count[_SIZE_OF.get(name) or _SIZE_OF[name.split("_")[0]]] * _ROWS_OF.get(name, 1)
    if name in _NONE_YET:
        return np.full(size, -1)
    return np.zeros(size, dtype=STEP_LAYOUT.dtype_of(name))


# -- requests through replicas ---------------------------------------------------------------------


class ServingSizes(NamedTuple):
    """Numbers of a served load: its pool, the policy of `serving.scheduler`, what the step model reads.

    `capacity`: -1 for no limit. `most_ends`: sequences that can decode on one rank. `by_load`: requests go to
    the least loaded rank, else to each in turn. `tabulated`: step times come from the tables below.
    """

    replicas: int
    ranks: int
    requests: int
    most: int
    tokens: int
    block: int
    capacity: int
    mixed: int
    chunked: int
    ahead: int
    units: int
    gain: int
    size: int
    most_ends: int
    by_load: int
    closed: int
    tabulated: int
    graph_prefill: int
    buckets: int
    points: int


class ServingArrays(NamedTuple):
    """State and tables of a served load, named as in `serving.replicas`, `scheduler` and `terms`.

    One entry a request: `arrival` to `end_place`; `next` and `previous` link the only list in which it is: a
    queue, prompts under way, or sequences that decode. One a rank: `queue_first` to `peak`, with `phase`,
    `ends` and `batch` several each. One a replica: `begun` to `pace_steps`. One an event, of which a replica
    has two: `event_*` and `heap`. The rest are tables of the step model, NaN where nothing is priced yet.
    """

    sizes: IntArray
    counters: IntArray
    reals: FloatArray
    arrival: IntArray
    inputs: IntArray
    outputs: IntArray
    scheduled: IntArray
    first: IntArray
    last: IntArray
    rank_of: IntArray
    generated: IntArray
    next: IntArray
    previous: IntArray
    computed: IntArray
    length: IntArray
    owed: IntArray
    blocks: IntArray
    chunk: IntArray
    until: IntArray
    end_place: IntArray
    queue_first: IntArray
    queue_last: IntArray
    queued: IntArray
    fresh_first: IntArray
    fresh_last: IntArray
    fresh_queued: IntArray
    prompt_first: IntArray
    prompt_last: IntArray
    prompts: IntArray
    decode_last: IntArray
    decodes: IntArray
    fresh: IntArray
    ended: IntArray
    load: IntArray
    told: IntArray
    planned: IntArray
    unseen: IntArray
    decoding: IntArray
    chunks: IntArray
    cached: IntArray
    preemptions: IntArray
    step: IntArray
    positions: IntArray
    untils: IntArray
    others: IntArray
    peak: IntArray
    phase: IntArray
    ends: IntArray
    batch: IntArray
    lasts: IntArray
    begun: IntArray
    steps: IntArray
    stretch: IntArray
    asleep: IntArray
    stepping: IntArray
    all_steps: IntArray
    busy: IntArray
    pace_first: FloatArray
    pace_growth: FloatArray
    pace_steps: IntArray
    event_time: IntArray
    event_order: IntArray
    event_place: IntArray
    heap: IntArray
    points_at: FloatArray
    bucket_rows: IntArray
    exact: FloatArray
    exact_launches: FloatArray
    whole: FloatArray
    whole_launches: FloatArray
    logits: FloatArray
    logits_launches: FloatArray
    decode_plane: FloatArray
    prompt_plane: FloatArray
    core_launches: FloatArray
    ratios: FloatArray


SERVED, WANTS_PACE, WANTS_SAMPLE, GOES_ON = range(4)
"""Why `serve` returns: nothing is left to happen; it needs the pace of the replica in `counters[AT]`; it has
counted sequences; so many events are over that the caller may look at other things."""
SAMPLED = -2
"""In `counters[RESUMED]`: the caller has taken a sample; a replica's number: it has written the pace."""
(
    TIME, ORDER, IN_HEAP, LEFT, NEXT_ARRIVAL, NEXT_CLOSED, TURN, RESUMED, AT, EVERY, STARTED,
    RUNNING, WAITING, DECODING, FULLEST,
) = range(15)  # fmt: skip
"""Places in `ServingArrays.counters`; the last four are what a sample counts."""
RESERVE_NEW, RESERVE_RUNNING, CACHED_SHARE, EXPOSED_HOST_S, HOST_S, LAUNCH_S = range(6)
"""Places in `ServingArrays.reals`."""
BATCH = 5
"""Numbers of a rank's batch."""

# -- addresses -------------------------------------------------------------------------------------


class ArrayLayout:
    """Names of the arrays of a run in the order of their addresses, and of the numbers in `sizes`.

    `floats`: fields of floating-point numbers; `shorts`: of 32-bit integers; all others hold 64-bit ones.
    """

    def __init__(self, name: str, sizes: tuple[str, ...], *parts: Any) -> None:
        """`parts`: classes of named tuples whose fields are the arrays."""
        kinds = [item for part in parts for item in part.__annotations__.items()]
        self.name, self.sizes = name, sizes
        self.fields = tuple(field for field, _ in kinds)
        self.floats = frozenset(field for field, kind in kinds if "Float" in str(kind))
        self.shorts = frozenset(field for field, kind in kinds if "Short" in str(kind))

    def dtype_of(self, field: str) -> type:
        """The numbers of a field."""
        return np.float64 if field in self.floats else np.int32 if field in self.shorts else np.int64

    def addresses(self, *parts: tuple[Any, ...]) -> IntArray:
        """The address of every array, in the order of `fields`; the arrays must outlive the table.

        Raises TypeError for an array that is not contiguous or has another type of number than its field.
        """
        arrays = [array for part in parts for array in part]
        for name, array in zip(self.fields, arrays, strict=True):
            wanted = self.dtype_of(name)
            if array.dtype != wanted or not array.flags.c_contiguous:
                raise TypeError(f"{name} is {array.dtype}; it must be contiguous, of {wanted.__name__}")
        return np.array([address_of(array) for array in arrays], dtype=np.int64)


STEP_LAYOUT = ArrayLayout("step", SIZES, Tables, RunState)
SERVING_LAYOUT = ArrayLayout("serving", ServingSizes._fields, ServingArrays)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])
