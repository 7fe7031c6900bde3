"""A pool of links in time: what arrives when, and when it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import simpy

from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.simpy.links import LinkPool

Arrival = tuple[int, Mapping[int, float] | Iterable[tuple[int, float]], float]
"""Start (ns), bytes on each link, duration where nothing else moves (ns)."""


def run_pool(
    arrivals: Sequence[Arrival], capacity: Sequence[float], few: bool = True
) -> tuple[list[int], LinkPool]:
    """End (ns) of every arrival, in their order, and the pool."""
    env = simpy.Environment()
    pool = LinkPool(env, capacity, few)
    ends = [-1] * len(arrivals)

    def sender(number: int) -> simpy.events.ProcessGenerator:
        start, demand, alone = arrivals[number]
        yield env.timeout(start)
        yield pool.start(Demand.of(demand.items() if isinstance(demand, Mapping) else demand), alone)
        ends[number] = int(env.now)

    for number in range(len(arrivals)):
        env.process(sender(number))
    env.run()
    return ends, pool
