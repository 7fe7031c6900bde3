"""A fleet's step: layers over the pools, their programs joined, and each pool's figures (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.program import Program
from moesim.simulator.layout.job import PoolSlice, ResolvedJob, pool_of_ranks
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block, StageAssignment, balanced_by_stage, blocks_of
from moesim.simulator.memory.gpu import RankStages, expert_group, rank_stages
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.placement import kind_weights, memory_of
from moesim.simulator.schedules import Schedule

# -- fleet balance -----------------------------------------------------------------------------------
# Distributes layers over the stages of a fleet by the speed and within the memory of each pool (pure).


class FleetMemory(Struct, frozen=True):
    """Bytes per GPU of the pipeline ranks of a fleet, each with the settings of its own pool."""

    shape: ModelShape
    parts: Sequence[PoolSlice]
    ranks: Sequence[RankStages]
    microbatches: int
    headroom: float | None = 0.0
    """Share of the memory that the bytes in use leave free; None: no rank at risk (eq. M10)."""

    def by_rank(self, stages: StageAssignment) -> list[tuple[float, float]]:
        """(bytes, capacity) of every pipeline rank (docs/model.md, eq. M5).

        The bytes are those reserved at most if no rank may be at risk, else those in use.
        """
        own = self.parts[0].scenario
        report = memory_of(own, self.shape, own.machine, stages, self.ranks, self.microbatches)
        first = self._buffers(self.parts[0])
        rows = []
        for part in self.parts:  # pools differ only in the buffers of their communication kernels
            more = self._buffers(part) - first
            capacity = part.cluster.accelerator.hbm_bytes * (1.0 - (self.headroom or 0.0))
            for rank in part.ranks:
                kinds = {b.kind for stage in self.ranks[rank].stages for b in stages.stages[stage]}
                experts = any(self.shape.block(kind).routed for kind in kinds)
                memory = report.by_rank[rank]
                used = memory.range(report.slack)[1] if self.headroom is None else memory.total
                rows.append((used + more * experts, capacity))
        return rows

    def _buffers(self, part: PoolSlice) -> int:
        scenario = part.scenario
        chosen, machine = scenario.communication, scenario.machine
        layout = Layout(scenario.parallel, machine.n_gpus, machine.node.n_gpus)
        group = expert_group(layout, self.shape, scenario.batch.sequence_length, chosen.sms)
        return dispatcher(chosen.kernels).buffers(group).total_bytes

    def fits(self, stages: StageAssignment) -> bool:
        """Whether every rank fits into the memory of its pool."""
        return all(used <= capacity for used, capacity in self.by_rank(stages))

    def room(self, n_stages: int) -> list[list[int]]:
        """Number of layers that fit on each stage, by the layer at which it begins.

        Memory grows linearly with the layers of a rank; several stages on one rank are assumed to be equal.
        """
        blocks = blocks_of(self.shape)
        body = [block.kind for block in blocks if block.is_layer]
        kinds: list[BlockKind] = sorted(set(body))
        base = self._trial(n_stages, dict.fromkeys(kinds, 1))
        grown = {kind: self._trial(n_stages, dict.fromkeys(kinds, 1) | {kind: 2}) for kind in kinds}
        rank_of = {stage: r for r, rank in enumerate(self.ranks) for stage in rank.stages}
        most = []
        for stage in range(n_stages):
            rank = rank_of[stage]
            used, capacity = base[rank]
            each = {kind: grown[kind][rank][0] - used for kind in kinds}
            free = capacity - used + sum(each.values())
            sums = [0.0, *accumulate(each[kind] for kind in body)]
            most.append([_last(sums, start, free) - start for start in range(len(sums))])
        return most

    def _trial(self, n_stages: int, counts: dict[BlockKind, int]) -> list[tuple[float, float]]:
        """(bytes, capacity) of every rank if every stage has `counts` layers of each kind."""
        layers = tuple(Block(kind) for kind, count in counts.items() for _ in range(count))
        blocks = blocks_of(self.shape)
        stages = [layers] * n_stages
        stages[0] = (*(b for b in blocks if b.is_embedding), *stages[0])
        stages[-1] = (*stages[-1], *(b for b in blocks if not (b.is_embedding or b.is_layer)))
        return self.by_rank(StageAssignment(tuple(stages)))


def _last(sums: Sequence[float], start: int, free: float) -> int:
    """The last index up to which the layers from `start` on fit into `free` bytes."""
    end = start
    while end + 1 < len(sums) and sums[end + 1] - sums[start] <= free:
        end += 1
    return end


def balanced_over_pools(
    seconds: Sequence[dict[BlockKind, float]], owners: Sequence[int], memory: FleetMemory
) -> tuple[StageAssignment, bool]:
    """The layout with the shortest slowest stage (docs/model.md, eq. S3), if possible among those that fit.

    `seconds[p]`: compute in s of a block of each kind on pool p. `owners[stage]`: the pool of a stage.
    Returns the layout and whether it fits. Raises InputError for too many stages.
    """
    weights = tuple(tuple(sorted(own.items())) for own in seconds)
    fastest = _fastest(blocks_of(memory.shape), weights, tuple(owners))
    if memory.fits(fastest):
        return fastest, True
    most = memory.room(len(owners))
    if not _places_all(most):
        return fastest, False
    blocks = blocks_of(memory.shape)
    roomy = balanced_by_stage(blocks, [[seconds[o][b.kind] for b in blocks] for o in owners], most)
    return (roomy, True) if memory.fits(roomy) else (fastest, False)


def _places_all(most: Sequence[Sequence[int]]) -> bool:
    """Whether contiguous stages can respect `most`; every stage takes all it can.

    Inner stages need a layer at least.
    """
    start, n = 0, len(most[0]) - 1
    for stage, room in enumerate(most):
        inner_after = max(0, len(most) - 2 - stage)
        take = min(room[start], n - start - inner_after)
        if take < int(0 < stage < len(most) - 1):
            return False
        start += take
    return start == n


Weights = tuple[tuple[tuple[BlockKind, float], ...], ...]


@lru_cache(maxsize=1024)
def _fastest(blocks: tuple[Block, ...], weights: Weights, owners: tuple[int, ...]) -> StageAssignment:
    by_kind = [dict(own) for own in weights]
    return balanced_by_stage(blocks, [[by_kind[o][b.kind] for b in blocks] for o in owners])


# -- fleet compile -----------------------------------------------------------------------------------
# Balances layers over the pools of a fleet, and joins the programs of the pools into one (pure).

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
            seconds.append(kind_weights(Pricer.shared(job), schedule))
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
        costs=dataclasses.replace(
            programs[0].costs,
            sync=tuple(program.costs.sync[rank] for rank, program in enumerate(owners)),
            send_s=max(program.costs.send_s for program in programs),
            send_across_nodes=across,
        ),
    )
