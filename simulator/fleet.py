"""Mixed fleets: one job whose pipeline ranks sit on two or more kinds of accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import fsum

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

import moesim
from moesim.hwmodels.cluster import Cluster, ClusterRef
from moesim.hwmodels.confidence import Confidence, confidence, statement
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.hwmodels.validation import validate_model
from moesim.simulator.engine.execute import execute
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.wires import FoldedWires
from moesim.simulator.layout.stages import describe
from moesim.simulator.placement import block_seconds
from moesim.simulator.prepare import Prepared, prepare
from moesim.simulator.report import breakdowns
from moesim.simulator.result import MemoryResult, StepResult
from moesim.simulator.scenario import Scenario, Stages
from moesim.simulator.schedules import Schedule
from moesim.simulator.simulate import step_result


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pool(_Part):
    """One kind of accelerator in a fleet, and how many pipeline ranks it holds (in order, from rank 0)."""

    cluster: ClusterRef
    pipeline_ranks: PositiveInt
    profile: str = "generic-roofline"
    communication_sms: int = Field(20, ge=0)


class PoolResult(_Part):
    """A pool's part of a prediction; `bubble_s` and `memory` are the mean and the fullest of its ranks."""

    accelerator: str
    n_gpus: int
    first_rank: int
    last_rank: int
    layers: int
    bubble_s: float
    memory: MemoryResult
    profile: str
    confidence: Confidence
    confidence_reason: str


class FleetResult(_Part):
    """One step of a job on a mixed fleet, and the run made of it; MFU against the pools' peaks together."""

    scenario: str
    step: StepResult
    pools: tuple[PoolResult, ...]
    layers: tuple[int, ...]
    stages: tuple[str, ...]
    days: float
    gpu_hours: float
    cost_usd: float | None
    extrapolated: tuple[str, ...]
    seed: int
    version: str


@dataclass(frozen=True, slots=True)
class _Held:
    """A pool as if the whole pipeline ran on it, and the ranks that really do."""

    pool: Pool
    cluster: Cluster
    scenario: Scenario
    ranks: range


def simulate_fleet(scenario: Scenario, pools: Sequence[Pool | dict[str, object]]) -> FleetResult:
    """Predict a scenario whose pipeline ranks are spread over `pools`, the first ranks on the first pool.

    The scenario's cluster, profile and communication.sms are replaced by the pools'. Every pipeline rank
    has the same number of GPUs. Without `stages.layers` the layers are balanced by the speed of the pool
    that runs them (docs/model.md, eq. S3). Every hop between pipeline neighbours takes as long as on the
    slowest pool. Raises InputError where pools, ranks and GPUs do not fit together.
    """
    parsed = [p if isinstance(p, Pool) else validate_model(Pool, p, "pool") for p in pools]
    held = _spread(scenario, parsed)
    layers = scenario.stages.layers
    if layers is None:
        layers = _balanced(scenario, held)
        held = [
            replace(h, scenario=h.scenario.model_copy(update={"stages": Stages(layers=layers)})) for h in held
        ]
    prepared = [prepare(h.scenario) for h in held]
    program = _joined(held, [p.program for p in prepared])
    execution = execute(program)
    time_s = execution.end_ns / 1e9
    bubbles = [rank.bubble for rank in breakdowns(execution)]
    n_gpus = sum(h.pool.cluster.n_gpus for h in held)
    tokens = scenario.batch.sequences * scenario.batch.sequence_length
    run_s = -(-scenario.run.tokens // tokens) * time_s
    hours = run_s / SECONDS_PER_HOUR
    prices = [h.pool.cluster.price_per_gpu_hour for h in held]
    notes = {note for p in prepared for note in (*p.pricer.evidence.extrapolated, *p.memory.notes)}
    return FleetResult(
        scenario=scenario.name,
        step=_step(held, prepared[0], program, time_s),
        pools=tuple(_pool(h, p, layers, bubbles) for h, p in zip(held, prepared, strict=True)),
        layers=layers,
        stages=tuple(describe(prepared[0].stages).splitlines()),
        days=run_s / SECONDS_PER_DAY,
        gpu_hours=hours * n_gpus,
        cost_usd=fsum(
            hours * h.pool.cluster.n_gpus * price.value
            for h, price in zip(held, prices, strict=True)
            if price is not None
        )
        if all(price is not None for price in prices)
        else None,
        extrapolated=tuple(sorted({*notes, *prepared[0].shape.not_modelled})),
        seed=scenario.seed,
        version=moesim.__version__,
    )


def _spread(scenario: Scenario, pools: Sequence[Pool]) -> list[_Held]:
    pp, total = scenario.parallel.pp, sum(pool.cluster.n_gpus for pool in pools)
    if not pools or sum(pool.pipeline_ranks for pool in pools) != pp:
        have = " + ".join(str(pool.pipeline_ranks) for pool in pools) or "none"
        raise InputError(f"pools hold {have} pipeline ranks, but parallel.pp={pp}")
    held, first = [], 0
    for pool in pools:
        cluster = pool.cluster
        if cluster.n_gpus * pp != total * pool.pipeline_ranks:
            raise InputError(
                f"pool {cluster.name!r} has {cluster.n_gpus} GPUs for {pool.pipeline_ranks} of {pp} pipeline "
                f"ranks of a fleet of {total}: all need the same number; change nodes or pipeline_ranks"
            )
        if total % cluster.node.n_gpus:
            raise InputError(
                f"the fleet's {total} GPUs do not fill nodes of {cluster.node.n_gpus} as in {cluster.name!r}"
            )
        # Not validated again: this size is a device for pricing, its network is never built.
        whole = cluster.model_copy(update={"nodes": total // cluster.node.n_gpus})
        communication = scenario.communication.model_copy(update={"sms": pool.communication_sms})
        update = {"cluster": whole, "profile": pool.profile, "communication": communication}
        part = scenario.model_copy(update=update)
        held.append(_Held(pool, whole, part, range(first, first + pool.pipeline_ranks)))
        first += pool.pipeline_ranks
    return held


def _balanced(scenario: Scenario, held: Sequence[_Held]) -> tuple[int, ...]:
    """Layers of each stage so that the slowest stage is as fast as it can be, each on its own pool."""
    prepared = [prepare(h.scenario) for h in held]
    schedule = prepared[0].schedule
    if len(schedule.routes) > 1 or schedule.n_stages != schedule.pp:
        raise InputError(
            f"schedule={schedule.name} runs several stages on a pipeline rank: give stages.layers, layers "
            "are balanced over pools only for schedules with one stage a rank such as 1f1b"
        )
    pool_of = {rank: number for number, h in enumerate(held) for rank in h.ranks}
    blocks = [block for stage in prepared[0].stages.stages for block in stage]
    costs = [[round(1e12 * block_seconds(p.pricer, b.kind)) for b in blocks] for p in prepared]
    body = [i for i, b in enumerate(blocks) if b.kind in ("dense", "moe")]
    owner = [pool_of[schedule.routes[0][stage]] for stage in range(schedule.n_stages)]
    extra = [0] * schedule.n_stages
    extra[0] = sum(costs[owner[0]][: body[0]])
    extra[-1] += sum(costs[owner[-1]][body[-1] + 1 :])
    sums = [[0, *accumulate(cost[i] for i in body)] for cost in costs]
    return balanced_by_stage([sums[number] for number in owner], extra)


def balanced_by_stage(sums: Sequence[Sequence[int]], extra: Sequence[int]) -> tuple[int, ...]:
    """Sizes of contiguous runs with the least maximum, where every stage has its own costs (eq. S3).

    `sums[stage][i]`: cost of the first i layers on that stage; `extra[stage]`: what it runs besides. Of
    equals the smallest sizes from the first stage on. Raises InputError for more stages than layers.
    """
    k, n = len(sums), len(sums[0]) - 1
    if k > n:
        raise InputError(f"{k} pipeline stages: the {n} layers can fill from 1 to {n}")
    best: dict[tuple[int, int], tuple[int, int]] = {(k, n): (0, 0)}
    for stage in range(k - 1, -1, -1):
        for start in range(n - (k - stage) + 1):
            found = [
                (max(sums[stage][end] - sums[stage][start] + extra[stage], best[stage + 1, end][0]), end)
                for end in range(start + 1, n + 1)
                if (stage + 1, end) in best
            ]
            if found:
                best[stage, start] = min(found)
    sizes, start = [], 0
    for stage in range(k):
        end = best[stage, start][1]
        sizes.append(end - start)
        start = end
    return tuple(sizes)


def _joined(held: Sequence[_Held], programs: Sequence[Program]) -> Program:
    """Every rank's steps, links and end of the step from the program of its pool."""
    pool_of = {rank: number for number, h in enumerate(held) for rank in h.ranks}
    owners = [programs[pool_of[rank]] for rank in range(len(programs[0].ranks))]
    across = any(program.costs.send_across_nodes for program in programs)
    return replace(
        programs[0],
        ranks=tuple(program.ranks[rank] for rank, program in enumerate(owners)),
        wires=FoldedWires.joined([program.wires for program in owners], across),
        costs=replace(
            programs[0].costs,
            sync=tuple(program.costs.sync[rank] for rank, program in enumerate(owners)),
            send_s=max(program.costs.send_s for program in programs),
            send_across_nodes=across,
        ),
    )


def _step(held: Sequence[_Held], prepared: Prepared, program: Program, time_s: float) -> StepResult:
    batch, clusters = prepared.scenario.batch, [h.pool.cluster for h in held]
    n_gpus = sum(cluster.n_gpus for cluster in clusters)
    peak = fsum(c.n_gpus * c.accelerator.peak_flop_per_s("bf16") for c in clusters) / n_gpus
    return step_result(
        prepared.shape,
        batch.sequences * batch.sequence_length,
        batch.sequence_length,
        time_s,
        n_gpus=n_gpus,
        peak_flop_per_s=peak,
        programs=[program],
    )


def _pool(held: _Held, prepared: Prepared, layers: Sequence[int], bubbles: Sequence[float]) -> PoolResult:
    ranks, by_rank = held.ranks, prepared.memory.by_rank
    fullest = max(ranks, key=lambda rank: (by_rank[rank].total, -rank))
    capacity, linear = held.cluster.accelerator.hbm_bytes, prepared.scenario.recipe.linear
    return PoolResult(
        accelerator=held.cluster.accelerator.name,
        n_gpus=held.pool.cluster.n_gpus,
        first_rank=ranks[0],
        last_rank=ranks[-1],
        layers=sum(layers[s] for s in _stages_of(prepared.schedule, ranks)),
        bubble_s=fsum(bubbles[rank] for rank in ranks) / len(ranks),
        memory=MemoryResult(
            total_bytes=by_rank[fullest].total,
            capacity_bytes=capacity,
            fits=by_rank[fullest].total <= capacity,
            by_kind_bytes=by_rank[fullest].by_kind(),
        ),
        profile=prepared.profile.name,
        confidence=confidence(held.cluster, prepared.profile, linear),
        confidence_reason=statement(held.cluster, prepared.profile, linear),
    )


def _stages_of(schedule: Schedule, ranks: range) -> set[int]:
    """Stages that a pool holds, also where another pool holds a copy."""
    return {stage for rank in ranks for stage in schedule.stages_on_rank(rank)}
