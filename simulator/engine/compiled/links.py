"""Links that flows share at max-min fair rates: `LinkPool`, `FewLinks` and `ManyLinks`, compiled."""

from __future__ import annotations

import numpy as np

from moesim.simulator.engine.compiled.jit import compiled
from moesim.simulator.engine.compiled.memory import Run, Vector, row_of
from moesim.simulator.engine.compiled.queue import ARRIVED, DEADLINE, after
from moesim.simulator.engine.compiled.rates import rates_of_few, rates_of_many
from moesim.simulator.engine.compiled.state import (
    DEAD_LINK,
    ERROR,
    FLOWS,
    FREE_SLOTS,
    GROUP_FULL,
    NOW,
    STAMP,
    USERS_FULL,
)
from moesim.simulator.engine.fair_share import TIGHT_LOAD

NOBODY_WAITS, SOMEBODY_WAITS = 0, 1
"""Whether the end of a flow is an event of its own (`RunState.flow_waits`)."""


@compiled
def begin_flow(run: Run, owner: int, alone: float, first: int, width: int, slot: int) -> int:
    """Put a flow on its links now; return its number. Its end is an event if a tight link slows it."""
    flow = run.counters[FLOWS]
    run.counters[FLOWS] = flow + 1
    run.flow_owner[flow], run.flow_slot[flow] = owner, slot
    run.flow_links[flow], run.flow_width[flow] = first, width
    run.flow_alone[flow] = max(alone, 1.0)
    run.flow_remaining[flow] = 1.0
    run.flow_rate[flow] = 0.0
    run.flow_updated[flow] = run.counters[NOW]
    if _join(run, flow):
        count = _coupled_to_flow(run, flow)
        _solve(run, count)
        run.flow_waits[flow] = SOMEBODY_WAITS
    else:
        run.flow_rate[flow] = 1.0 / run.flow_alone[flow]
        _set_deadline(run, flow)
        run.flow_first[flow] = 1
    return flow


@compiled
def _offered(amount: float, unit: float, alone: float) -> int:
    """Load that bytes in so many ns offer to a link, in units of capacity / CAPACITY_UNITS."""
    return int(np.ceil(min(amount * unit / alone, TIGHT_LOAD + 1.0)))


@compiled
def _join(run: Run, flow: int) -> bool:
    """Put a flow on its links; return whether one of them is tight."""
    links, amounts, carried = run.pool_links, run.pool_bytes, run.link_bytes
    loads, counts, users, most = run.link_load, run.link_count, run.link_users, run.most_users
    units, alone, offered, owned = run.unit, run.flow_alone[flow], run.pool_offered, run.flow_slot[flow] >= 0
    first = run.flow_links[flow]
    tight = False
    for e in range(first, first + run.flow_width[flow]):
        link, amount = links[e], amounts[e]
        carried[link] += amount
        at = counts[link]
        if at >= most:
            run.counters[ERROR] = USERS_FULL
            return False
        users[link * most + at] = flow
        counts[link] = at + 1
        part = _offered(amount, units[link], alone)
        if owned:  # nobody else has this row of the pool
            offered[e] = part
        loads[link] += part
        tight = tight or loads[link] > TIGHT_LOAD
    return tight


@compiled
def _set_deadline(run: Run, flow: int) -> None:
    run.flow_version[flow] += 1
    rest = run.flow_remaining[flow] / run.flow_rate[flow]
    after(run, max(0, int(np.rint(rest))), DEADLINE, flow, run.flow_version[flow])


@compiled
def end_flow(run: Run, flow: int) -> None:
    """The last byte of a flow has arrived: take it off its links and solve the flows that it slowed."""
    run.flow_remaining[flow] = 0.0
    links, amounts, loads, units = run.pool_links, run.pool_bytes, run.link_load, run.unit
    counts, users, most = run.link_count, run.link_users, run.most_users
    alone, offered, owned = run.flow_alone[flow], run.pool_offered, run.flow_slot[flow] >= 0
    first = run.flow_links[flow]
    freed = 0
    for e in range(first, first + run.flow_width[flow]):
        link = links[e]
        if loads[link] > TIGHT_LOAD:
            run.freed[freed] = link
            freed += 1
        loads[link] -= offered[e] if owned else _offered(amounts[e], units[link], alone)
        last = counts[link] - 1
        counts[link] = last
        if last > 0:
            _take_off(row_of(users, link, most), last, flow)
    slot = run.flow_slot[flow]
    if slot >= 0:
        run.slots[run.counters[FREE_SLOTS]] = slot
        run.counters[FREE_SLOTS] += 1
    if freed > 0:
        _solve_freed(run, freed)
    if run.flow_waits[flow] == SOMEBODY_WAITS:
        after(run, 0, ARRIVED, flow, 0)


@compiled
def _take_off(users: Vector, last: int, flow: int) -> None:
    """Remove a flow from the users of a link, which keep their order; `last`: the last taken place."""
    at = 0
    while users[at] != flow:
        at += 1
    for n in range(at, last):
        users[n] = users[n + 1]


@compiled
def _solve_freed(run: Run, freed: int) -> None:
    """Solve the flows on links that a flow has left and that were tight.

    Few links: each coupled group by itself, in the order in which its first flow is met. Many links: all as
    one.
    """
    if not run.few_links:
        count = _coupled_to_links(run, freed)
        if count > 0:
            _solve(run, count)
        return
    run.counters[STAMP] += 1
    seen = run.counters[STAMP]
    for n in range(freed):
        link = run.freed[n]
        for at in range(run.link_count[link]):
            user = run.link_users[link * run.most_users + at]
            if run.flow_seen[user] != seen:
                count = _coupled_to_flow(run, user)
                for i in range(count):
                    run.flow_seen[run.group[i]] = seen
                _solve(run, count)


@compiled
def _coupled_to_flow(run: Run, flow: int) -> int:
    """Gather the flows that tight links couple to a flow, itself included; return how many there are."""
    run.counters[STAMP] += 1
    run.flow_stamp[flow] = run.counters[STAMP]
    run.group[0] = flow
    return _spread(run, 1)


@compiled
def _coupled_to_links(run: Run, freed: int) -> int:
    """Gather the flows on the freed links, and those that tight links couple to them."""
    run.counters[STAMP] += 1
    count = 0
    for n in range(freed):
        count = _gather_users(run, run.freed[n], count)
    return _spread(run, count)


@compiled
def _gather_users(run: Run, link: int, count: int) -> int:
    """Append the flows on a link that are not in the group yet; return how many the group then has."""
    stamp = run.counters[STAMP]
    run.link_stamp[link] = stamp
    for at in range(run.link_count[link]):
        user = run.link_users[link * run.most_users + at]
        if run.flow_stamp[user] != stamp:
            run.flow_stamp[user] = stamp
            if count >= run.most_coupled:
                run.counters[ERROR] = GROUP_FULL
                return count
            run.group[count] = user
            count += 1
    return count


@compiled
def _spread(run: Run, count: int) -> int:
    """Follow tight links from the flows of `RunState.group`, then sort the group by serial numbers."""
    stamp, done = run.counters[STAMP], 0
    while done < count:
        flow = run.group[done]
        done += 1
        for e in range(run.flow_links[flow], run.flow_links[flow] + run.flow_width[flow]):
            link = run.pool_links[e]
            if run.link_load[link] > TIGHT_LOAD and run.link_stamp[link] != stamp:
                count = _gather_users(run, link, count)
    for n in range(1, count):
        flow = run.group[n]
        at = n
        while at > 0 and run.group[at - 1] > flow:
            run.group[at] = run.group[at - 1]
            at -= 1
        run.group[at] = flow
    return count


@compiled
def _solve(run: Run, count: int) -> None:
    """Solve the rates of a coupled group; a flow that keeps its rate keeps its deadline."""
    if run.few_links:
        rates_of_few(run, count)
    else:
        rates_of_many(run, count)
    now = run.counters[NOW]
    for n in range(count):
        flow, rate = run.group[n], run.rates[n]
        if rate == run.flow_rate[flow] and run.flow_version[flow] > 0:
            continue
        if not rate > 0.0:
            run.counters[ERROR] = DEAD_LINK
            return
        moved = run.flow_rate[flow] * (now - run.flow_updated[flow])
        run.flow_remaining[flow] = max(0.0, run.flow_remaining[flow] - moved)
        run.flow_updated[flow], run.flow_rate[flow] = now, rate
        _set_deadline(run, flow)
