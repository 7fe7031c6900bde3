"""Max-min fair rates of coupled flows, as `engine/maxmin.py` computes them (docs/model.md, eq. E3).

The group is `RunState.group[:count]`, in order of serial numbers; the rates go to `RunState.rates`, in whole
transfers per nanosecond.
"""

from __future__ import annotations

from moesim.simulator.engine.compiled.jit import compiled
from moesim.simulator.engine.compiled.memory import Run
from moesim.simulator.engine.fair_share import TIGHT_LOAD
from moesim.simulator.engine.maxmin import LEVEL_TOLERANCE


@compiled
def rates_of_few(run: Run, count: int) -> None:
    """As `FewLinks.rates`: a flow that no tight link slows runs as alone, others rise step by step."""
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
    """As `ManyLinks.rates`: only tight links hold flows, and links settle by rounds (`fair_bandwidths`)."""
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
