"""From a scenario to a program: names resolved, plan checked, stages assigned, everything priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.provenance import sourced_numbers
from moesim.simulator.cost.price_table import cost_table
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.full_resolution.groups import ClusterPrograms, Draw, compile_groups
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.program import Program, MemberVariation, compile_program
from moesim.simulator.layout.expert_load import RankLoads
from moesim.simulator.layout.expert_load_spec import load_spec
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.job import ResolvedJob, resolve
from moesim.simulator.layout.memory import MemoryReport, RankStages, memory_by_kind
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.draws import draw_loads, draw_variation, routed_layers
from moesim.simulator.predict.placement import assign_stages
from moesim.simulator.predict.work_size import check_size, own_machine
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Overlap, Schedule, build, from_csv, validate

MAX_SCHEDULE_BYTES = 2_000_000
RANGED = ("routing.expert_load_cv", "variation.clock_cv", "variation.jitter_cv")
"""Scenario keys whose range an interval uses."""
SHIPPED = ("cluster.", "run.price.buy.", "run.failures.", "run.restart.", "run.checkpoint.storage.")
"""Sections that are mostly taken from shipped data, whose numbers have ranges."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario with everything resolved, before any time is simulated."""

    job: ResolvedJob
    schedule: Schedule
    stages: StageAssignment
    pricer: Pricer
    programs: tuple[Program, ...]
    """One, or one for every group of GPUs in full resolution."""
    memory: MemoryReport
    loads: RankLoads | None
    """Expert load of the carried group; None where every rank always receives the same."""
    load_notes: tuple[str, ...]
    """What the expert load assumes."""
    whole: ClusterPrograms | None = None
    """Where the members sit (full resolution)."""

    @property
    def scenario(self) -> Scenario:
        """The scenario of the job."""
        return self.job.scenario

    @property
    def shape(self) -> ModelShape:
        """The model of the job."""
        return self.job.shape

    @property
    def cluster(self) -> Cluster:
        """The cluster of the job."""
        return self.job.cluster

    @property
    def profile(self) -> CalibrationProfile:
        """The calibration profile of the job."""
        return self.job.profile

    @property
    def layout(self) -> Layout:
        """Where the ranks of the job stand."""
        return self.job.layout

    @property
    def program(self) -> Program:
        """The program that stands for all."""
        return self.programs[0]


def prepare(
    scenario: Scenario, profile: CalibrationProfile | None = None, stages: StageAssignment | None = None
) -> Prepared:
    """Resolve names, check the plan, assign stages, price and compile.

    `profile` and `stages`, where given, take the place of the scenario's: the same plan at other rates.
    Raises InputError for anything that does not fit together, naming key, value and nearest legal values.
    """
    job = resolve(scenario, profile)
    shape, cluster, plan = job.shape, job.cluster, scenario.parallel
    _check_sms(scenario, cluster)
    _check_ranges(scenario)
    layout = job.layout
    count = microbatches(layout, scenario.batch.sequences)
    check_size(scenario, own_machine())
    schedule = load_schedule(scenario, count)
    partial = scenario.stages.blocks is not None
    check_against_model(plan, shape, scenario.batch.sequence_length, 1 if partial else schedule.n_stages)
    _check_combination(scenario, schedule)
    pricer = Pricer(job)
    if stages is None:
        stages = assign_stages(scenario, pricer, schedule)
    costs = cost_table(pricer, schedule, stages)
    kinds = [[block.kind for block in stage] for stage in stages.stages]
    spec = load_spec(scenario, shape, layout, routed_layers(kinds))

    def loads_of(group: int = 0) -> RankLoads | None:
        return draw_loads(spec, scenario, shape, layout, schedule, kinds, pricer.received_rows, group)

    loads = loads_of()

    def draw(group: int, members: int | None) -> MemberVariation:
        own = loads if group == 0 else loads_of(group)
        return draw_variation(scenario, layout, schedule, routed_layers(kinds), own, group, members)

    programs, whole = _programs(scenario, layout, schedule, kinds, costs, pricer, draw)
    report = memory_of(scenario, shape, stages, rank_stages(schedule), count)
    return Prepared(
        job,
        schedule,
        stages,
        pricer,
        programs,
        report,
        loads,
        spec.notes,
        whole,
    )


def _programs(
    scenario: Scenario,
    layout: Layout,
    schedule: Schedule,
    kinds: Sequence[Sequence[BlockKind]],
    costs: CostTable,
    pricer: Pricer,
    draw: Draw,
) -> tuple[tuple[Program, ...], ClusterPrograms | None]:
    """One program for all GPUs, or one a group, by the scenario's resolution."""
    if scenario.resolution == "full":
        whole = compile_groups(scenario, layout, schedule, kinds, costs, draw)
        return whole.programs, whole
    if scenario.faults:
        raise InputError(
            "faults need every GPU simulated for itself; add resolution: full (--resolution full)"
        )
    link_map = FoldedLinkMap(
        schedule.pp,
        pricer.links.nic_bytes_per_s or 1.0,  # a single node has no NIC traffic; its links need a rate
        pricer.links.scale_up_bytes_per_s,
        costs.send_across_nodes,
    )
    order = scenario.communication.order
    return (compile_program(schedule, kinds, costs, order, draw(0, None), link_map),), None


def memory_of(
    scenario: Scenario,
    shape: ModelShape,
    stages: StageAssignment,
    ranks: Sequence[RankStages],
    microbatches: int,
) -> MemoryReport:
    """Memory of a scenario's plan with any stages, by kind and pipeline rank (eq. M1 to M5)."""
    cluster = scenario.machine
    return memory_by_kind(
        shape,
        Layout(scenario.parallel, cluster.n_gpus, cluster.node.n_gpus),
        scenario.recipe,
        stages,
        ranks,
        sequence=scenario.batch.sequence_length,
        recompute=scenario.recompute,
        communication_sms=scenario.communication.sms,
        kernels=scenario.communication.kernels,
        capacity_bytes=cluster.accelerator.hbm_bytes,
        redundant_experts=scenario.routing.redundant_experts,
        software=scenario.software,
        single_pass=len(ranks) == 1 and microbatches == 1,
    )


def load_schedule(scenario: Scenario, count: int) -> Schedule:
    """The named schedule, or the CSV file that the scenario names, for `count` micro-batches."""
    plan = scenario.parallel
    if not scenario.schedule.lower().endswith(".csv"):
        try:
            return build(scenario.schedule, plan.pp, count, plan.vpp)
        except InputError as error:
            if error.key != "microbatches":
                raise
            unit = scenario.batch.sequences // count  # the scenario has sequences, not micro-batches
            near = [unit * value for value in error.nearest if isinstance(value, int)]
            raise InputError(str(error), key="batch.sequences", nearest=near) from None
    path = Path(scenario.path(scenario.schedule))
    schedule = from_csv(read_text(path, MAX_SCHEDULE_BYTES, "schedule"), name=path.stem, source=str(path))
    for key, have, want in (
        ("parallel.pp", schedule.pp, plan.pp),
        ("micro-batches", schedule.microbatches, count),
    ):
        if have != want:
            raise InputError(f"schedule: {path} is for {key}={have}, but the scenario has {want}")
    validate(schedule)
    return schedule


def _check_sms(scenario: Scenario, cluster: Cluster) -> None:
    sms, engine = scenario.communication.sms, cluster.accelerator.communication_engine
    if engine is not None and sms:
        raise InputError(
            f"communication.sms={sms}: on {cluster.accelerator.name} a dedicated engine ({engine.name}) "
            f"moves collectives, no {cluster.accelerator.unit_name} does; set communication.sms=0",
            key="communication.sms",
            nearest=(0,),
        )
    if sms == 0:
        return
    total = cluster.accelerator.n_sms
    if sms >= total:
        raise InputError(
            f"communication.sms={sms} leaves no SM for compute: {cluster.accelerator.name} has {total}; "
            f"use at most {total - 1} (DeepEP uses 20 to 24)",
            key="communication.sms",
            nearest=(total - 1,),
        )


def _check_ranges(scenario: Scenario) -> None:
    """A range that no interval would use is refused, not dropped."""
    own = scenario.model_copy(update={"profile": ""})  # a profile's ranges are used, wherever it stands
    for path, number in sourced_numbers(own):
        if number.between is not None and path not in RANGED and not path.startswith(SHIPPED):
            raise InputError(
                f"{path}: between={list(number.between)} is not used by intervals; of a scenario only "
                f"{', '.join(RANGED)} and numbers of its cluster may state a range. Use moesim sensitivity "
                f"--range {path}=LOW,HIGH",
                key=path,
            )


def _check_combination(scenario: Scenario, schedule: Schedule) -> None:
    overlapped = any(isinstance(step, Overlap) for rank in schedule.ranks for step in rank)
    if scenario.parallel.zero_stage == 3 and overlapped:
        raise InputError(
            f"parallel.zero_stage=3 with schedule={schedule.name}: parameter gathers have no slot in an "
            "overlapped pair; use zero_stage 0 to 2, or a schedule without pairs such as 1f1b",
            key="parallel.zero_stage",
            nearest=(2,),
        )
