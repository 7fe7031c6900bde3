"""What a fleet needs beside its pools: layers balanced over them, and one program out of theirs (pure)."""

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

OF_THE_POOL = {
    "communication.sms": " (communication_sms of the pool)",
    "profile": " (profile of the pool)",
}
"""Keys of a scenario that a pool calls otherwise."""


@contextmanager
def named(part: PoolSlice) -> Iterator[None]:
    """Put the name of a pool before whatever InputError is raised inside."""
    try:
        yield
    except InputError as error:
        text = f"{part.label}: {error}{OF_THE_POOL.get(error.key or '', '')}"
        raise InputError(text, key=error.key, nearest=error.nearest) from None


def balanced(parts: Sequence[PoolSlice], jobs: Sequence[ResolvedJob], schedule: Schedule) -> StageAssignment:
    """Layers of each stage so that the slowest is as fast as it can be, each on its own pool."""
    seconds, owners, shape = [], pool_of_ranks(parts), jobs[0].shape
    for part, job in zip(parts, jobs, strict=True):
        with named(part):
            pricer = Pricer(job)
            seconds.append({b: block_seconds(pricer, b) for b in {block.kind for block in blocks_of(shape)}})
    memory = FleetMemory(shape, parts, rank_stages(schedule), schedule.microbatches)
    return balanced_over_pools(seconds, [owners[rank] for rank in schedule.routes[0]], memory)[0]


def joined(pools: Sequence[tuple[PoolSlice, Program]]) -> Program:
    """Every rank's steps, links and end of the step from the program of its pool."""
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
