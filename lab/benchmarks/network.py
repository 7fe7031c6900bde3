"""Speed of the flow network: one max-min solve, whole simulations of flows, and the engine's link pool.

    python -m lab.benchmarks.network [--profile] [--seed 1]

Flows cross a two-layer fat-tree with 32 endpoints and 32 uplinks a leaf; a flow takes the spine that its hash
names. Single runs on one core. CPU seconds are what the work takes; wall seconds grow with what else the
machine does. Machines differ, so compare runs of one session only.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import simpy

from moesim.hwmodels.arrays import FloatArray, IntArray
from lab.benchmarks.fluid import FluidReport, max_min_rates, simulate_flows
from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.simpy.links import LinkPool

Result = TypeVar("Result")

KINDS = ("permutation", "incast", "all-to-all", "mixed")
PER_LEAF = 32
NIC = 50e9
"""Bytes/s of every link and direction: 400 Gb/s."""


@dataclass(frozen=True)
class Flows:
    """Paths of some flows over a fat-tree, and the bandwidth of its links."""

    indptr: IntArray
    links: IntArray
    capacity: FloatArray

    @property
    def n(self) -> int:
        """How many flows."""
        return len(self.indptr) - 1


def fat_tree(endpoints: int, source: IntArray, target: IntArray, spines: int, seed: int) -> Flows:
    """Routes over a two-layer fat-tree: out of the source, up, down, into the target."""
    leaves = endpoints // PER_LEAF
    hashed = np.random.default_rng(seed).integers(0, spines, len(source))
    up = 2 * endpoints + (source // PER_LEAF) * spines + hashed
    down = 2 * endpoints + leaves * spines + (target // PER_LEAF) * spines + hashed
    path = np.stack([source, up, down, endpoints + target], axis=1)
    crossed = np.ones(path.shape, dtype=bool)
    crossed[source // PER_LEAF == target // PER_LEAF, 1:3] = False
    indptr = np.append(0, np.cumsum(crossed.sum(axis=1)))
    return Flows(indptr, path[crossed], np.full(2 * endpoints + 2 * leaves * spines, NIC))


def pairs(kind: str, flows: int, endpoints: int, seed: int) -> tuple[IntArray, IntArray]:
    """Sources and targets of a traffic pattern."""
    draw = np.random.default_rng(seed)
    if kind == "mixed":
        share = [flows // 3, flows // 3, flows - 2 * (flows // 3)]
        parts = [
            pairs(k, n, endpoints, seed + i) for i, (k, n) in enumerate(zip(KINDS[:3], share, strict=True))
        ]
        return np.concatenate([s for s, _ in parts]), np.concatenate([t for _, t in parts])
    if kind == "permutation":
        rounds = -(-flows // endpoints)
        source = np.tile(np.arange(endpoints), rounds)
        target = np.concatenate([draw.permutation(endpoints) for _ in range(rounds)])
    elif kind == "incast":  # 64 senders anywhere into one port
        source = draw.integers(0, endpoints, flows)
        target = np.repeat(draw.integers(0, endpoints, -(-flows // 64)), 64)[:flows]
    else:  # groups of 64 endpoints, one on each of 64 leaves in a row, everybody to everybody
        group, member = np.divmod(np.arange(flows), 64 * 63)
        sender, other = np.divmod(member, 63)
        receiver = (sender + 1 + other) % 64
        per_block = 64 * PER_LEAF
        block, lane = np.divmod(group % endpoints, PER_LEAF)
        base = (block * per_block) % endpoints + lane
        source, target = (base + sender * PER_LEAF) % endpoints, (base + receiver * PER_LEAF) % endpoints
    source, target = source[:flows], target[:flows]
    same = source == target
    return source, np.where(same, (target + PER_LEAF) % endpoints, target)


def timed(call: Callable[[], Result]) -> tuple[float, float, Result]:
    """CPU seconds, wall seconds and result of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return time.process_time() - cpu, time.perf_counter() - wall, result


def solves(seed: int) -> None:
    """One max-min solve of all flows at once."""
    print("One solve                       flows  endpoints    links    CPU s   wall s")
    for kind in KINDS:
        for flows, endpoints, spines in ((10_000, 2_048, 32), (100_000, 16_384, 32), (100_000, 16_384, 8)):
            net = fat_tree(endpoints, *pairs(kind, flows, endpoints, seed), spines=spines, seed=seed)
            cpu, wall, rates = timed(lambda n=net: solve(n))  # type: ignore[misc]
            assert unsettled(net, rates) == 0
            name = f"{kind}, {PER_LEAF // spines}:1"
            print(f"  {name:26s} {flows:8d} {endpoints:10d} {len(net.capacity):8d} {cpu:8.3f} {wall:8.3f}")


CAP = 0.8 * NIC / 1e6
"""Transfers of 1 MB a second that a flow makes at most."""


def unsettled(net: Flows, rates: FloatArray) -> int:
    """Flows below their cap without a full link on which nobody is faster: none, if the rates are right."""
    flow = np.repeat(np.arange(net.n), np.diff(net.indptr))
    full = np.bincount(net.links, rates[flow] * 1e6, len(net.capacity)) >= net.capacity * (1 - 1e-11)
    highest = np.zeros(len(net.capacity))
    np.maximum.at(highest, net.links, rates[flow])
    held = full[net.links] & (rates[flow] >= highest[net.links] * (1 - 1e-11))
    return int(((np.bincount(flow, held, net.n) == 0) & (rates < CAP)).sum())


def solve(net: Flows) -> FloatArray:
    """Rates of flows of 1 MB, each no faster than 0.8 of its port alone."""
    caps = np.full(net.n, CAP)
    return max_min_rates(net.indptr, net.links, np.full(len(net.links), 1e6), caps, net.capacity)


def simulations(flows: int, seed: int) -> None:
    """Complete simulations: every flow starts within 1 ms and has its own size."""
    print("Whole simulation           flows   events    CPU s   wall s  events/CPU s  flows solved an event")
    for kind in KINDS:
        report = FluidReport()
        net = fat_tree(2_048, *pairs(kind, flows, 2_048, seed), spines=PER_LEAF, seed=seed)
        cpu, wall, _ = timed(lambda n=net, r=report: simulate(n, seed, r))  # type: ignore[misc]
        print(
            f"  {kind:21s} {flows:8d} {report.events:8d} {cpu:8.2f} {wall:8.2f} "
            f"{report.events / cpu:13.0f} {report.solved / report.events:10.1f}"
        )


def simulate(net: Flows, seed: int, report: FluidReport) -> FloatArray:
    """Flows of 0.1 to 2 MB that start at random within 1 ms."""
    draw = np.random.default_rng(seed)
    start, size = draw.uniform(0, 1e-3, net.n), draw.uniform(1e5, 2e6, net.n)
    caps = np.full(net.n, 0.8 * NIC)
    return simulate_flows(start, net.indptr, net.links, size, caps, net.capacity, 5e-6, report)


def pool(groups: int, members: int, transfers: int, seed: int) -> LinkPool:
    """Groups that dispatch as one fluid over all their ports, and sends between groups that meet them."""
    draw = np.random.default_rng(seed)
    env = simpy.Environment()
    n = groups * members
    links = LinkPool(env, np.full(3 * n, NIC / 1e9))
    ports = [3 * np.arange(g * members, (g + 1) * members) for g in range(groups)]

    def dispatch(group: int) -> simpy.events.ProcessGenerator:
        own = ports[group]
        for gap in draw.uniform(0, 2e5, transfers).tolist():
            loads = draw.uniform(2e6, 3e6, 3 * members)
            yield env.timeout(round(gap))
            yield from links.transfer(Demand(np.concatenate([own, own + 1, own + 2]), loads), 3e6 / 40)

    def send(group: int) -> simpy.events.ProcessGenerator:
        demand = Demand(
            np.concatenate([ports[group], ports[(group + 1) % groups] + 1]), np.full(2 * members, 1e6)
        )
        for gap in draw.uniform(0, 1e6, transfers // 4).tolist():
            yield env.timeout(round(gap))
            yield from links.transfer(demand, 1e6 / 40)

    for group in range(groups):
        env.process(dispatch(group))
        env.process(send(group))
    env.run()
    return links


def pools(seed: int) -> None:
    """The pool of the engine at full resolution, demands of 192 links."""
    print("Link pool        groups of 64  endpoints  transfers   solves    CPU s   wall s  transfers/CPU s")
    for groups in (4, 32, 256):
        transfers = 20_000 // groups
        cpu, wall, links = timed(lambda g=groups, t=transfers: pool(g, 64, t, seed))  # type: ignore[misc]
        print(
            f"  {'dispatch and send':20s} {groups:6d} {groups * 64:10d} {links.started:10d} "
            f"{links.solved:8d} {cpu:8.2f} {wall:8.2f} {links.started / cpu:12.0f}"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the largest solve spends its time"
    )
    parser.add_argument("--flows", type=int, default=10_000, help="flows of a whole simulation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    solves(options.seed)
    pools(options.seed)
    simulations(options.flows, options.seed)
    if options.profile:
        net = fat_tree(16_384, *pairs("mixed", 100_000, 16_384, options.seed), PER_LEAF, options.seed)
        profiler = cProfile.Profile()
        profiler.runcall(solve, net)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(10)


if __name__ == "__main__":
    main()
