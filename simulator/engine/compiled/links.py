"""Links that flows share at max-min fair rates, compiled (docs/model.md, eq. E3)."""

from __future__ import annotations

import numpy as np

from moesim.simulator.engine.compiled.memory import ARRIVED, DEADLINE, Run, after, compiled, floats_at, row_of
from moesim.simulator.engine.compiled.state import (
    DEAD_LINK,
    ERROR,
    FLOWS,
    FLOWS_FULL,
    FREE_SLOTS,
    NOW,
    SERIAL,
    STAMP,
    USERS_FULL,
)
from moesim.simulator.engine.maxmin import LEVEL_TOLERANCE, TIGHT_LOAD

# -- rates -----------------------------------------------------------------------------------------


@compiled
def rates_of_few(run: Run, count: int) -> None:
    """As `Sharing.rates`: a flow that no tight link slows runs as alone, others rise step by step."""
    if count == 1 and not _on_tight_link(run, run.group[0]):
        run.rates[0] = 1.0 / run.flow_alone[run.group[0]]
        return
    active = 0
    for i in range(count):
        flow = run.group[i]
        most = 0.0
        for e in range(run.flow_links[flow], run.flow_links[flow] + run.flow_width[flow]):
            most = max(most, run.pool_bytes[e])
            run.used[run.pool_links[e]] = 0.0
        run.largest[i], run.caps[i], run.rates[i] = most, most / run.flow_alone[flow], 0.0
        if most > 0.0:
            run.active[active] = i
            active += 1
    while active > 0:
        active = _rise(run, active)
    for i in range(count):
        alone = run.flow_alone[run.group[i]]
        run.rates[i] = run.rates[i] / run.largest[i] if run.largest[i] > 0.0 else 1.0 / alone


@compiled
def _on_tight_link(run: Run, flow: int) -> bool:
    for e in range(run.flow_links[flow], run.flow_links[flow] + run.flow_width[flow]):
        if run.link_load[run.pool_links[e]] > TIGHT_LOAD:
            return True
    return False


@compiled
def _rise(run: Run, active: int) -> int:
    """Raise all active flows until a link is full or a flow at its cap; return how many go on."""
    touched = 0
    for a in range(active):
        flow = run.group[run.active[a]]
        for e in range(run.flow_links[flow], run.flow_links[flow] + run.flow_width[flow]):
            run.slope[run.pool_links[e]] = 0.0
    for a in range(active):
        i = run.active[a]
        flow = run.group[i]
        for e in range(run.flow_links[flow], run.flow_links[flow] + run.flow_width[flow]):
            link = run.pool_links[e]
            if run.slope[link] == 0.0:
                run.touched[touched] = link
                touched += 1
            run.slope[link] += run.pool_bytes[e] / run.largest[i]
    step = -1.0
    for n in range(touched):
        link = run.touched[n]
        room = max(0.0, run.capacity[link] - run.used[link]) / run.slope[link]
        if step < 0.0 or room < step:
            step = room
    for a in range(active):
        i = run.active[a]
        step = min(step, run.caps[i] - run.rates[i])
    for n in range(touched):
        link = run.touched[n]
        run.used[link] += run.slope[link] * step
        room = run.capacity[link] - run.used[link]
        bound = LEVEL_TOLERANCE * run.capacity[link]
        run.held[link] = 1 if room <= bound and bound < float("inf") else 0
    left = 0
    for a in range(active):
        i = run.active[a]
        flow = run.group[i]
        run.rates[i] += step
        blocked = False
        for e in range(run.flow_links[flow], run.flow_links[flow] + run.flow_width[flow]):
            blocked = blocked or run.held[run.pool_links[e]] == 1
        if not blocked and run.rates[i] < run.caps[i] * (1.0 - LEVEL_TOLERANCE):
            run.active[left] = i
            left += 1
    return left


@compiled
def rates_of_many(run: Run, count: int) -> None:
    """As `Sharing.rates`: only tight links hold flows, and links settle by rounds (`fair_bandwidths`)."""
    entries = 0
    for i in range(count):
        flow = run.group[i]
        first, last = run.flow_links[flow], run.flow_links[flow] + run.flow_width[flow]
        run.rates[i] = 1.0 / run.flow_alone[flow]
        most = 0.0
        for e in range(first, last):
            most = max(most, run.pool_bytes[e])
        run.largest[i], run.caps[i] = most, most / run.flow_alone[flow]
        for e in range(first, last):
            link = run.pool_links[e]
            if run.link_load[link] > TIGHT_LOAD:
                run.entry_link[entries], run.entry_flow[entries] = link, i
                run.entry_share[entries] = run.pool_bytes[e] / most
                run.used[link] = 0.0
                run.reach[link] = 0.0
                entries += 1
    while entries > 0:
        entries = _settle(run, count, entries)


@compiled
def _settle(run: Run, count: int, entries: int) -> int:
    """One round: settle the flows whose lowest link is the lowest for all its flows; return the entries left.

    During the rounds `RunState.active[i]` counts the entries of flow i that a link holds up.
    """
    for e in range(entries):
        run.slope[run.entry_link[e]] = 0.0
        run.held[run.entry_link[e]] = 0
    for e in range(entries):
        run.slope[run.entry_link[e]] += run.entry_share[e]
    for i in range(count):
        run.levels[i] = -1.0
    for e in range(entries):
        link, i = run.entry_link[e], run.entry_flow[e]
        if run.slope[link] > 0.0:
            run.reach[link] = max((run.capacity[link] - run.used[link]) / run.slope[link], run.reach[link])
        if run.levels[i] < 0.0:
            run.levels[i] = run.caps[i]
        run.levels[i] = min(run.levels[i], run.reach[link])
    for e in range(entries):
        link, i = run.entry_link[e], run.entry_flow[e]
        if run.reach[link] > run.levels[i] * (1.0 + LEVEL_TOLERANCE):
            run.held[link] = 1
    for i in range(count):
        run.active[i] = 1 if run.caps[i] <= run.levels[i] else 0
    for e in range(entries):
        if run.held[run.entry_link[e]] == 0:
            run.active[run.entry_flow[e]] = 1
    for i in range(count):
        if run.levels[i] >= 0.0 and run.active[i] == 1 and run.levels[i] < run.caps[i]:
            run.rates[i] = run.levels[i] / run.largest[i]
    for e in range(entries):
        run.slope[run.entry_link[e]] = 0.0
    left = 0
    for e in range(entries):
        link, i = run.entry_link[e], run.entry_flow[e]
        if run.active[i] == 1:
            run.slope[link] += run.entry_share[e] * run.levels[i]
    for e in range(entries):
        link, i = run.entry_link[e], run.entry_flow[e]
        if run.slope[link] > 0.0:
            run.used[link] += run.slope[link]
            run.slope[link] = 0.0
        if run.active[i] == 0:
            run.entry_link[left], run.entry_flow[left], run.entry_share[left] = link, i, run.entry_share[e]
            left += 1
    return left


# -- links and pools of links ----------------------------------------------------------------------


@compiled
def exchange(run: Run, slot: int, task_row: int, microbatch: int) -> tuple[int, int]:
    """Write the links and bytes of an exchange of routed rows into a slot; return (first, number of links).

    The arithmetic of `ExchangePattern.demand` (docs/model.md, eq. G1); links without bytes are dropped.
    """
    pattern = run.task_pattern[task_row]
    at = microbatch % run.task_load_rows[task_row]
    load = row_of(floats_at(run.task_load[task_row]), at, run.members)
    node_load = row_of(floats_at(run.task_node_load[task_row]), at, run.members)
    nic, scale_up = run.task_nic_bytes[task_row], run.task_scale_up_bytes[task_row]
    received, inner = run.received, row_of(run.received, 1, run.members)
    for m in range(run.members):
        received[m] = nic * node_load[m]
        inner[m] = scale_up * load[m]
    first, width = run.constant_entries + slot * run.widest, 0
    links, amounts = row_of(run.pool_links, first, 1), row_of(run.pool_bytes, first, 1)
    row, link = run.pattern_row[pattern], run.pattern_first_link[pattern]
    named, shares, sources, bounds = (
        run.pattern_links,
        run.pattern_share,
        run.pattern_source,
        run.pattern_link_first,
    )
    end = bounds[row]
    for n in range(run.pattern_first_link[pattern + 1] - link):
        amount, begin, end = 0.0, end, bounds[row + n + 1]
        for e in range(begin, end):
            amount += shares[e] * received[sources[e]]
        links[width], amounts[width] = named[link + n], amount
        width += 1 if amount > 0.0 else 0  # the next link takes the place of one without bytes
    return first, width


NOBODY_WAITS, SOMEBODY_WAITS = 0, 1
"""Whether the end of a flow is an event of its own (`RunState.flow_waits`)."""


@compiled
def begin_flow(run: Run, owner: int, alone: float, first: int, width: int, slot: int) -> int:
    """Put a flow on its links now; return its place. Its end is an event if a tight link slows it."""
    if run.counters[FLOWS] == run.most_flows:
        run.counters[ERROR] = FLOWS_FULL
        return 0
    flow = run.flow_places[run.counters[FLOWS]]
    run.counters[FLOWS] += 1
    run.flow_serial[flow] = run.counters[SERIAL]
    run.counters[SERIAL] += 1
    run.flow_first[flow], run.flow_waits[flow] = -1, NOBODY_WAITS
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
        run.flow_first[flow] = run.flow_version[flow]
    return flow


@compiled
def forget_flow(run: Run, flow: int) -> None:
    """Give the place of a flow whose end is processed to another one, which goes on with its versions."""
    run.counters[FLOWS] -= 1
    run.flow_places[run.counters[FLOWS]] = flow


@compiled
def _offered(amount: float, unit: float, alone: float) -> int:
    """Load that bytes in so many ns offer to a link, in units of capacity / CAPACITY_UNITS."""
    return int(np.ceil(min(amount * unit / alone, TIGHT_LOAD + 1.0)))


@compiled
def _join(run: Run, flow: int) -> bool:
    """Put a flow on its links; return whether one of them is tight."""
    links, amounts, carried = run.pool_links, run.pool_bytes, run.link_bytes
    loads, counts, users, most = run.link_load, run.link_count, run.link_users, run.most_users
    count = run.links
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
        users[at * count + link] = flow
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
    counts = run.link_count
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
            _take_off(run, link, last, flow)
    slot = run.flow_slot[flow]
    if slot >= 0:
        run.slots[run.counters[FREE_SLOTS]] = slot
        run.counters[FREE_SLOTS] += 1
    if freed > 0:
        _solve_freed(run, freed)
    if run.flow_waits[flow] == SOMEBODY_WAITS:
        after(run, 0, ARRIVED, flow, 0)


@compiled
def _take_off(run: Run, link: int, last: int, flow: int) -> None:
    """Remove a flow from the users of a link, which keep their order; `last`: the last taken place."""
    users, step = run.link_users, run.links
    at, end = link, link + last * step
    while users[at] != flow:
        at += step
    while at < end:
        users[at] = users[at + step]
        at += step


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
            user = run.link_users[at * run.links + link]
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
        user = run.link_users[at * run.links + link]
        if run.flow_stamp[user] != stamp:
            run.flow_stamp[user] = stamp
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
        at, serial = n, run.flow_serial[flow]
        while at > 0 and run.flow_serial[run.group[at - 1]] > serial:
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
        if rate == run.flow_rate[flow] and rate > 0.0:
            continue
        if not rate > 0.0:
            run.counters[ERROR] = DEAD_LINK
            return
        moved = run.flow_rate[flow] * (now - run.flow_updated[flow])
        run.flow_remaining[flow] = max(0.0, run.flow_remaining[flow] - moved)
        run.flow_updated[flow], run.flow_rate[flow] = now, rate
        _set_deadline(run, flow)
