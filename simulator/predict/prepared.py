"""A prediction that is resolved, priced, drawn and compiled, but not yet simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.engine.full_resolution.groups import ClusterPrograms
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.records import Engine
from moesim.simulator.layout.expert_load import RankLoads
from moesim.simulator.layout.job import OfJob, ResolvedJob
from moesim.simulator.layout.memory import MemoryReport
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.pools import PoolSlice
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.draws import Draws
from moesim.simulator.predict.plan_memory import fullest_of
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Schedule


@dataclass(frozen=True, slots=True)
class PreparedPool(OfJob):
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


@dataclass(frozen=True, slots=True)
class Prepared:
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
