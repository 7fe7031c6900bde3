"""Compiles a scenario to programs: resolves names, checks the plan, assigns stages and prices everything."""

from __future__ import annotations

from collections import defaultdict
from math import fsum

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.price_table import cost_table
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.full_resolution.groups import ClusterPrograms, compile_groups
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.program import PricedSchedule, Program
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.layout.dispatch_limits import check_dispatcher
from moesim.simulator.layout.expert_load_spec import load_spec
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.job import ResolvedJob, resolve
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches
from moesim.simulator.layout.pools import PoolSlice, check_schedule, pool_of_ranks, split_over_pools
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.repeated import check_recompute
from moesim.simulator.predict.draws import Draws, routed_layers
from moesim.simulator.predict.fleet_compile import balanced, joined_program, naming_pool
from moesim.simulator.predict.placement import assign_stages
from moesim.simulator.predict.plan_checks import (
    check_combination,
    check_hardware,
    check_ranges,
    load_schedule,
)
from moesim.simulator.predict.plan_memory import memory_of
from moesim.simulator.predict.prepared import Prepared, PreparedPool
from moesim.simulator.predict.work_size import check_size, own_machine
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.machine import check_sms
from moesim.simulator.schedules import Schedule


def prepare(
    what: Scenario | ResolvedJob,
    *,
    profile: CalibrationProfile | None = None,
    stages: StageAssignment | None = None,
    engine: str | None = None,
) -> Prepared:
    """Resolve names, check the plan, assign stages, price and compile, pool by pool.

    `what`: a scenario or a resolved job. `profile` and `stages` replace those of the scenario, for the same
    plan at other rates. `engine`: a name in `engine.registry.ENGINES`. Raises InputError with key, value and
    nearest legal values for an illegal scenario; for a fleet the error also names the pool.
    """
    chosen = engine_of(engine)
    scenario = what if isinstance(what, Scenario) else what.scenario
    if scenario.fleet is not None:
        if profile is not None or stages is not None:
            raise scenario.needs_one_cluster()
        pools = _fleet(scenario)
        return Prepared(scenario, pools, (joined_program([(p.part, p.programs[0]) for p in pools]),), chosen)
    job = resolve(what, profile) if isinstance(what, Scenario) else what.with_rates(profile=profile)
    part = PoolSlice("cluster", job.cluster, scenario, range(scenario.parallel.pp))
    pool = _pool(part, job, stages=stages)
    return Prepared(scenario, (pool,), pool.programs, chosen)


def _fleet(scenario: Scenario) -> tuple[PreparedPool, ...]:
    """Spread the pipeline over the pools, balance layers unless they are stated, and prepare every pool."""
    parts = split_over_pools(scenario)
    first = parts[0].scenario
    layout = Layout(first.parallel, first.machine.n_gpus, first.machine.node.n_gpus)
    schedule = load_schedule(first, microbatches(layout, first.batch.sequences))
    check_schedule(schedule, pool_of_ranks(parts), [part.label for part in parts])
    shape = first.shape
    jobs: list[ResolvedJob] = []
    for part in parts:
        with naming_pool(part):
            own = jobs[0].changed_to(part.scenario) if jobs else resolve(part.scenario, shape=shape)
            jobs.append(own)
    stages = None if scenario.stages.layers is not None else balanced(parts, jobs, schedule)
    pools = []
    for part, job in zip(parts, jobs, strict=True):
        with naming_pool(part):
            pools.append(_pool(part, job, schedule=schedule, stages=stages))
    return tuple(pools)


def _pool(
    part: PoolSlice,
    job: ResolvedJob,
    *,
    schedule: Schedule | None = None,
    stages: StageAssignment | None = None,
) -> PreparedPool:
    """Prepare a pool as if the whole pipeline ran on it; `schedule` and `stages` come from the fleet."""
    scenario, shape = job.scenario, job.shape
    check_sms(scenario.communication.sms, job.cluster)
    check_hardware(scenario, job.cluster)
    check_ranges(scenario)
    layout = job.layout
    check_dispatcher(scenario, job.cluster, layout)
    count = microbatches(layout, scenario.batch.sequences)
    check_size(scenario, shape, [job.cluster], own_machine())
    schedule = schedule or load_schedule(scenario, count)
    stated = scenario.stages.blocks is not None or scenario.stages.layers is not None
    check_against_model(
        scenario.parallel, shape, scenario.batch.sequence_length, 1 if stated else schedule.n_stages
    )
    check_recompute(shape, scenario.recompute)
    check_combination(scenario, schedule, shape, job.cluster.node.n_gpus)
    pricer = Pricer.shared(job)
    if stages is None:
        stages = assign_stages(scenario, pricer, schedule)
    costs = cost_table(pricer, schedule, stages)
    kinds = tuple(tuple(block.kind for block in stage) for stage in stages.stages)
    layers = routed_layers(kinds)
    draws = Draws(
        job, load_spec(scenario, shape, layout, layers), layers, schedule.microbatches, pricer.received_rows
    )
    order = scenario.communication.order_of(scenario.schedule)
    priced = PricedSchedule(schedule, kinds, costs, order)
    programs, whole = _programs(job, priced, pricer, draws)
    memory = memory_of(scenario, shape, job.cluster, stages, rank_stages(schedule), count, schedule)
    return PreparedPool(part, job, schedule, stages, pricer, draws, programs, memory, whole)


def _programs(
    job: ResolvedJob, priced: PricedSchedule, pricer: Pricer, draws: Draws
) -> tuple[tuple[Program, ...], ClusterPrograms | None]:
    """One program for all GPUs in folded resolution, one a group of GPUs in full resolution."""
    if job.scenario.resolution == "full":
        whole = compile_groups(job, priced, draws.variation)
        return whole.programs, whole
    if job.scenario.faults:
        raise InputError(
            "faults need full resolution, which simulates every GPU; add resolution: full (--resolution full)"
        )
    links = (
        pricer.links.nic_bytes_per_s or 1.0,  # a single node has no NIC traffic; its links need a rate
        pricer.links.scale_up_bytes_per_s,
        priced.costs.send_across_nodes,
    )
    group = draws.slowest_group(_rank_seconds(priced))
    variation, order = draws.variation(group), priced.order
    key = (Same(priced.schedule), Same(priced.costs), priced.blocks, order, Same(variation), links, group)
    program = _PROGRAMS.get(
        key,
        lambda: compile_program(priced, variation, FoldedLinkMap(priced.schedule.pp, *links), group),
    )
    return (program,), None


def _bytes_of(program: Program) -> int:
    """Bytes of the durations of a program."""
    rows = {
        id(task.rows_ns): task.rows_ns.nbytes
        for code in {id(step.code): step.code for rank in program.ranks for step in rank}.values()
        for task in code.tasks
    }
    return sum(rows.values())


_PROGRAMS: BoundedCache[Program] = BoundedCache(160_000_000, _bytes_of)
"""Programs of the scenarios before, of at most 160 MB."""


def _rank_seconds(priced: PricedSchedule) -> list[float]:
    """Compute of one micro-batch on every pipeline rank, alone on all SMs, forward and backward."""
    of_kind: dict[BlockKind, float] = defaultdict(float)
    for (kind, _, mode), price in priced.costs.compute.items():
        if mode == "alone":
            of_kind[kind] += price.fixed_s + price.row_s
    return [
        fsum(of_kind[kind] for stage in priced.schedule.stages_on_rank(rank) for kind in priced.blocks[stage])
        for rank in range(priced.schedule.pp)
    ]
