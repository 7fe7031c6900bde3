"""Balances layers over the pools of a fleet, and joins the programs of the pools into one (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.program import Program
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.pools import PoolSlice, pool_of_ranks
from moesim.simulator.layout.stages import StageAssignment, blocks_of
from moesim.simulator.predict.fleet_balance import FleetMemory, balanced_over_pools
from moesim.simulator.predict.placement import block_seconds
from moesim.simulator.schedules import Schedule

POOL_KEY_HINTS = {
    "communication.sms": " (communication_sms of the pool)",
    "profile": " (profile of the pool)",
}
"""Hints for keys of a scenario that have another name in a pool."""


@contextmanager
def naming_pool(part: PoolSlice) -> Iterator[None]:
    """Put the name of a pool before the message of an InputError raised inside."""
    try:
        yield
    except InputError as error:
        text = f"{part.label}: {error}{POOL_KEY_HINTS.get(error.key or '', '')}"
        raise InputError(text, key=error.key, nearest=error.nearest) from None


def balanced(parts: Sequence[PoolSlice], jobs: Sequence[ResolvedJob], schedule: Schedule) -> StageAssignment:
    """Layers of each stage that make the slowest stage as fast as possible, each on its own pool."""
    seconds, owners, shape = [], pool_of_ranks(parts), jobs[0].shape
    for part, job in zip(parts, jobs, strict=True):
        with naming_pool(part):
            pricer = Pricer.shared(job)
            seconds.append({b: block_seconds(pricer, b) for b in {block.kind for block in blocks_of(shape)}})
    memory = FleetMemory(shape, parts, rank_stages(schedule), schedule.microbatches)
    return balanced_over_pools(seconds, [owners[rank] for rank in schedule.routes[0]], memory)[0]


def joined_program(pools: Sequence[tuple[PoolSlice, Program]]) -> Program:
    """One program in which every rank's steps, links and end of the step come from its pool's program."""
    programs = [program for _, program in pools]
    owners = [programs[number] for number in pool_of_ranks([part for part, _ in pools])]
    across = any(program.costs.send_across_nodes for program in programs)
    return replace(
        programs[0],
        ranks=tuple(program.ranks[rank] for rank, program in enumerate(owners)),
        link_map=FoldedLinkMap.joined([program.link_map for program in owners], across),
        costs=replace(
            programs[0].costs,
            sync=tuple(program.costs.sync[rank] for rank, program in enumerate(owners)),
            send_s=max(program.costs.send_s for program in programs),
            send_across_nodes=across,
        ),
    )
