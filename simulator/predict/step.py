"""Prepares and executes one step: resolved, priced, drawn, compiled, and run by an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import fsum

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import ENTRY_BYTES, BoundedCache, Same
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.cost.cost_table import cost_table
from moesim.simulator.cost.load_clock import cap_of
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import CostTable, SlowSends
from moesim.simulator.cost.transfers import sends_over_tiers
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.full_resolution.groups import ClusterPrograms, compile_groups
from moesim.simulator.engine.link_map import FoldedLinkMap, LinkMap
from moesim.simulator.engine.program import NS, MemberVariation, PricedSchedule, Program
from moesim.simulator.engine.records import Engine, Execution, step_time_s
from moesim.simulator.engine.registry import engine_of, repeated_step
from moesim.simulator.layout.dispatch_limits import check_dispatcher
from moesim.simulator.layout.expert_load import RankLoads, load_spec
from moesim.simulator.layout.job import (
    OfJob,
    PoolSlice,
    ResolvedJob,
    check_schedule,
    pool_of_ranks,
    resolve,
    split_over_pools,
)
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.memory.gpu import MemoryReport, rank_stages
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.repeated import check_recompute
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.draws import Draws, routed_layers
from moesim.simulator.predict.fleet import balanced, joined_program, naming_pool
from moesim.simulator.predict.placement import assign_stages, fullest_of, memory_of
from moesim.simulator.predict.plan_checks import (
    check_combination,
    check_hardware,
    check_ranges,
    load_schedule,
)
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.predict.work_size import check_size, own_machine
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.machine import check_sms
from moesim.simulator.schedules import Schedule

# -- prepared ----------------------------------------------------------------------------------------
# A prediction that is resolved, priced, drawn and compiled, but not yet simulated.


class PreparedPool(OfJob, Struct, frozen=True):
    """A pool of accelerators of one kind, prepared as if the whole pipeline ran on it. A cluster is one pool.

    `part`: the pool's own GPUs and pipeline ranks. `job`: the whole job, as if all GPUs were of its kind.
    """

    part: PoolSlice
    job: ResolvedJob
    schedule: Schedule
    stages: StageAssignment
    pricer: Pricer
    draws: Draws
    programs: tuple[Program, ...]
    """One program, or in full resolution one for every group of GPUs."""
    memory_by_rank: MemoryReport
    whole: ClusterPrograms | None = None
    """Programs and GPUs of all groups in full resolution; None in folded resolution."""

    @property
    def memory(self) -> MemoryResult:
        """Bytes of the fullest GPU that the pool has."""
        return fullest_of(self.memory_by_rank, self.part.ranks)


class Prepared(Struct, frozen=True):
    """A prepared scenario: its pool, or the pools of its fleet, and the programs that the engine runs.

    The properties from `pool` on belong to a single cluster; for a fleet they raise InputError.
    """

    scenario: Scenario
    pools: tuple[PreparedPool, ...]
    programs: tuple[Program, ...]
    """One program, or in full resolution one for every group of GPUs. In the program of a fleet every rank
    comes from its own pool."""
    engine: Engine
    """Runs the programs, and all additional steps that the prediction needs."""

    @property
    def program(self) -> Program:
        """The program of the first group; in folded resolution the only one."""
        return self.programs[0]

    @property
    def of_fleet(self) -> bool:
        """Whether several pools share the pipeline."""
        return len(self.pools) > 1

    @property
    def n_gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.part.cluster.n_gpus for pool in self.pools)

    @property
    def owners(self) -> tuple[PreparedPool, ...]:
        """The pool that holds each pipeline rank."""
        return tuple(pool for pool in self.pools for _ in pool.part.ranks)

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.pools[0].job.shape

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule."""
        return self.pools[0].schedule

    @property
    def stages(self) -> StageAssignment:
        """Blocks of every stage."""
        return self.pools[0].stages

    @property
    def layout(self) -> Layout:
        """Placement of the ranks on GPUs; for a fleet as if all GPUs were of its first pool's kind."""
        return self.pools[0].job.layout

    @property
    def memory(self) -> MemoryResult:
        """Memory of the fullest GPU; for a fleet, in the pool with the smallest reserve."""
        return max((pool.memory for pool in self.pools), key=lambda m: m.total_bytes / m.capacity_bytes)

    @property
    def pool(self) -> PreparedPool:
        """The cluster as a pool; raises InputError for a fleet, which is not one cluster."""
        if self.of_fleet:
            raise self.scenario.needs_one_cluster()
        return self.pools[0]

    @property
    def job(self) -> ResolvedJob:
        """Scenario, model, cluster and profile, loaded once."""
        return self.pool.job

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self.pool.job.cluster

    @property
    def profile(self) -> CalibrationProfile:
        """The calibration profile."""
        return self.pool.job.profile

    @property
    def pricer(self) -> Pricer:
        """The pricer of the programs."""
        return self.pool.pricer

    @property
    def draws(self) -> Draws:
        """The draws of the differences between the members of each group."""
        return self.pool.draws

    @property
    def loads(self) -> RankLoads | None:
        """Expert load of the first group; None where all ranks always receive equal rows."""
        return self.pool.draws.first_loads

    @property
    def memory_by_rank(self) -> MemoryReport:
        """Bytes per GPU of every pipeline rank."""
        return self.pool.memory_by_rank

    @property
    def whole(self) -> ClusterPrograms | None:
        """Programs and GPUs of all groups in full resolution; None in folded resolution and for a fleet."""
        return self.pools[0].whole

    def under(self, scenario: Scenario) -> Prepared:
        """The same programs with a scenario that differs only in keys on which a step does not depend."""
        pools = tuple(replace(pool, job=pool.job.with_scenario(scenario)) for pool in self.pools)
        return replace(self, scenario=scenario, pools=pools)


# -- compile -----------------------------------------------------------------------------------------
# Compiles a scenario to programs: resolves names, checks the plan, assigns stages and prices everything.


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
    several = [part.label for part in parts if part.cluster.network.buildings is not None]
    if several:
        raise InputError(
            f"{', '.join(several)}: network.buildings splits one cluster, and no key says which "
            "GPUs of a fleet are in which building; leave buildings out of a fleet's networks"
        )
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
    pricer = Pricer.shared(job)
    priced, stages, draws = _priced(pricer, schedule, stages)
    programs, whole = _programs(priced, pricer, draws)
    schedule, count = priced.schedule, priced.schedule.microbatches
    memory = memory_of(job.scenario, job.shape, job.cluster, stages, rank_stages(schedule), count, schedule)
    return PreparedPool(part, job, schedule, stages, pricer, draws, programs, memory, whole)


def _priced(
    pricer: Pricer, schedule: Schedule | None, stages: StageAssignment | None
) -> tuple[PricedSchedule, StageAssignment, Draws]:
    """Check the plan of a job, choose what of it is not given, price it and seed its draws."""
    job = pricer.job
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
    cap_of(pricer)  # raises for a cap on the power that nothing prices
    if stages is None:
        stages = assign_stages(scenario, pricer, schedule)
    costs = cost_table(pricer, schedule, stages)
    kinds = tuple(tuple(block.kind for block in stage) for stage in stages.stages)
    layers = routed_layers(kinds)
    draws = Draws(
        job, load_spec(scenario, shape, layout, layers), layers, schedule.microbatches, pricer.received_rows
    )
    order = scenario.communication.order_of(scenario.schedule)
    return PricedSchedule(schedule, kinds, costs, order), stages, draws


def _programs(
    priced: PricedSchedule, pricer: Pricer, draws: Draws
) -> tuple[tuple[Program, ...], ClusterPrograms | None]:
    """One program for all GPUs in folded resolution, one a group of GPUs in full resolution."""
    job = pricer.job
    if job.scenario.resolution == "full":
        sends = sends_over_tiers(pricer, priced.costs.send_s, priced.costs.send_bytes)
        whole = compile_groups(job, priced, draws.variation, sends)
        return whole.programs, whole
    if job.scenario.faults:
        raise InputError(
            "faults need full resolution, which simulates every GPU; add resolution: full (--resolution full)"
        )
    group, links = _slowest(priced, draws), _links(priced, pricer)
    variation, order = draws.variation(group), priced.order
    key = (
        Same(priced.schedule),
        Same(priced.costs),
        priced.blocks,
        order,
        Same(variation),
        links[1:4],
        group,
    )
    program = _PROGRAMS.get(key, lambda: compile_program(priced, variation, FoldedLinkMap(*links), group))
    return (program,), None


def _links(priced: PricedSchedule, pricer: Pricer) -> tuple[int, float, float, bool, SlowSends]:
    """What the link map of folded resolution is made of."""
    return (
        priced.schedule.pp,
        pricer.links.nic_bytes_per_s or 1.0,  # a single node has no NIC traffic; its links need a rate
        pricer.links.scale_up_bytes_per_s,
        priced.costs.send_across_nodes,
        sends_over_tiers(pricer, priced.costs.send_s, priced.costs.send_bytes),
    )


def _slowest(priced: PricedSchedule, draws: Draws) -> int:
    """The group that folded resolution simulates."""
    # Compute of one micro-batch on every pipeline rank, alone on all SMs, forward and backward.
    of_kind: dict[BlockKind, float] = defaultdict(float)
    for (kind, _, mode), price in priced.costs.compute.items():
        if mode == "alone":
            of_kind[kind] += price.fixed_s + price.row_s
    schedule, blocks = priced.schedule, priced.blocks
    return draws.slowest_group(
        [
            fsum(of_kind[kind] for stage in schedule.stages_on_rank(rank) for kind in blocks[stage])
            for rank in range(schedule.pp)
        ]
    )


def _bytes_of(program: Program) -> int:
    """Bytes of the durations of a program and, as measured roughly, of its steps and tasks themselves."""
    steps = [step for rank in program.ranks for step in rank]
    codes = {id(step.code): step.code for step in steps}.values()
    parts = {id(code.part): code.part for code in codes}.values()
    compute = {id(task.compute): task.compute.nbytes for part in parts for task in part.tasks}
    tasks = sum(len(code.tasks) for code in codes)
    return sum(compute.values()) + ENTRY_BYTES * (len(steps) + tasks)


_PROGRAMS: BoundedCache[Program] = BoundedCache(160_000_000, _bytes_of)
"""Programs of the scenarios before, of at most 160 MB."""


# -- step --------------------------------------------------------------------------------------------
# Prepares and executes one step.


class ExecutedStep(Struct, frozen=True):
    """A prepared step with the executions, one a program, that the engine returned."""

    prepared: Prepared
    executions: Sequence[Execution]

    @property
    def time_s(self) -> float:
        """Seconds of the step."""
        return step_time_s(self.executions)


def execute(prepared: Prepared) -> ExecutedStep:
    """Run a prepared step on its engine."""
    return ExecutedStep(prepared, prepared.engine.execute(prepared.programs))


def run_step(
    what: Scenario | ResolvedJob,
    *,
    profile: CalibrationProfile | None = None,
    stages: StageAssignment | None = None,
    engine: str | None = None,
) -> ExecutedStep:
    """Prepare and run a step, for callers that need its seconds and memory but no result.

    Takes the arguments and raises the errors of `prepare`; raises InfeasibleError where faults leave no way
    to end a step.
    """
    with without_cyclic_collection():
        return execute(prepare(what, profile=profile, stages=stages, engine=engine))


MOST_REPEATED = 4
"""Groups whose tables a `MovedStep` keeps, each of some tens of megabytes with its draws of noise."""


class MovedStep:
    """A prepared step that is run again at other rates and spreads, as intervals do.

    Plan, schedule, templates and tables are made once, where folded resolution and the compiled engine allow.
    """

    def __init__(self, prepared: Prepared) -> None:
        """`prepared`: a step of one cluster at the rates of its scenario."""
        self.prepared = prepared
        self._end_of: dict[int, Callable[[CostTable, MemberVariation, LinkMap], int | None]] = {}
        """By the group that folded resolution simulates, which clocks and prices may change."""
        self._keep(prepared)

    def time_s(self, job: ResolvedJob) -> float:
        """Seconds of the step of a job that differs in rates and spreads alone; raises as `run_step`."""
        pool = self.prepared.pool
        if self._end_of:
            pricer = pool.pricer.of(job)
            priced, _, draws = _priced(pricer, pool.schedule, pool.stages)
            end = self._end_of.get(group := _slowest(priced, draws))
            if end is not None:
                links = FoldedLinkMap(*_links(priced, pricer))
                end_ns = end(priced.costs, draws.variation(group), links)
                if end_ns is not None:
                    return end_ns / NS
        made = prepare(job, stages=pool.stages, engine=self.prepared.engine.name)
        if made.program.group not in self._end_of:
            self._keep(made)
        return execute(made).time_s

    def _keep(self, prepared: Prepared) -> None:
        """Keep the tables of a program, if its engine and resolution allow."""
        program = prepared.program
        if len(self._end_of) < MOST_REPEATED and isinstance(program.link_map, FoldedLinkMap):
            end = repeated_step(prepared.engine, program)
            if end is not None:
                self._end_of[program.group] = end
