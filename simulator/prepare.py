"""From a scenario to a program: names resolved, plan checked, stages assigned, everything priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.program import Program, Variation, compile_program
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.loads import sampled_loads
from moesim.simulator.layout.memory import MemoryReport, memory_by_kind
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape, load_model
from moesim.simulator.placement import assign_stages
from moesim.simulator.pricing import Pricer, check_profile
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Overlap, Schedule, build, from_csv, validate

MOST_MEMBERS = 256
"""Data-parallel ranks that the folded engine carries for a model without expert parallelism."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario with everything resolved, before any time is simulated."""

    scenario: Scenario
    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile
    layout: Layout
    schedule: Schedule
    stages: StageAssignment
    pricer: Pricer
    program: Program
    memory: MemoryReport


def prepare(scenario: Scenario) -> Prepared:
    """Resolve names, check the plan, assign stages, price and compile.

    Raises InputError for anything that does not fit together, naming key, value and nearest legal values.
    """
    shape = load_model(scenario.path(scenario.model))
    cluster, plan = scenario.machine, scenario.parallel
    profile = load_profile(scenario.path(scenario.profile))
    check_profile(profile, cluster)
    _check_sms(scenario, cluster)
    layout = Layout(plan, cluster.n_gpus, cluster.node.n_gpus)
    count = microbatches(layout, scenario.batch.sequences)
    schedule = load_schedule(scenario, count)
    partial = scenario.stages.blocks is not None
    check_against_model(plan, shape, scenario.batch.sequence_length, 1 if partial else schedule.n_stages)
    _check_combination(scenario, schedule)
    pricer = Pricer(scenario, shape, cluster, profile, layout)
    stages = assign_stages(scenario, pricer, schedule)
    costs = pricer.table(schedule, stages)
    kinds = [[block.kind for block in stage] for stage in stages.stages]
    variation = draw_variation(scenario, shape, layout, schedule, kinds, pricer.received_rows)
    links = pricer.links
    program = compile_program(
        schedule,
        kinds,
        costs,
        scenario.communication.order,
        variation,
        links.nic_bytes_per_s or 1.0,  # a single node has no NIC traffic; its links still need a rate
        links.scale_up_bytes_per_s,
    )
    report = memory_by_kind(
        shape,
        layout,
        scenario.recipe,
        stages,
        rank_stages(schedule),
        sequence=scenario.batch.sequence_length,
        recompute=scenario.recompute,
        communication_sms=scenario.communication.sms,
        capacity_bytes=cluster.accelerator.hbm_bytes,
    )
    return Prepared(scenario, shape, cluster, profile, layout, schedule, stages, pricer, program, report)


def load_schedule(scenario: Scenario, count: int) -> Schedule:
    """The named schedule, or the CSV file that the scenario names, for `count` micro-batches."""
    plan = scenario.parallel
    if not scenario.schedule.lower().endswith(".csv"):
        return build(scenario.schedule, plan.pp, count, plan.vpp)
    path = Path(scenario.path(scenario.schedule))
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"schedule: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"schedule: {path} is not a text file") from None
    schedule = from_csv(text, name=path.stem, source=str(path))
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
            f"moves collectives, no {cluster.accelerator.unit_name} does; set communication.sms=0"
        )
    if sms == 0:
        return
    total = cluster.accelerator.n_sms
    if sms >= total:
        raise InputError(
            f"communication.sms={sms} leaves no SM for compute: {cluster.accelerator.name} has {total}; "
            f"use at most {total - 1} (DeepEP uses 20 to 24)"
        )


def _check_combination(scenario: Scenario, schedule: Schedule) -> None:
    overlapped = any(isinstance(step, Overlap) for rank in schedule.ranks for step in rank)
    if scenario.parallel.zero_stage == 3 and overlapped:
        raise InputError(
            f"parallel.zero_stage=3 with schedule={schedule.name}: parameter gathers have no slot in an "
            "overlapped pair; use zero_stage 0 to 2, or a schedule without pairs such as 1f1b"
        )


def draw_variation(
    scenario: Scenario,
    shape: ModelShape,
    layout: Layout,
    schedule: Schedule,
    kinds: Sequence[Sequence[BlockKind]],
    received_rows: float,
) -> Variation:
    """Seeded vectors of one value a member: GPU speed, expert load, and the node average of the load."""
    plan = scenario.parallel
    members = plan.ep if plan.ep > 1 else min(layout.dp, MOST_MEMBERS)
    clock_cv = scenario.variation.clock_cv.value
    rng = np.random.default_rng([scenario.seed, 1])
    clock = 1.0 / np.maximum(1.0 + clock_cv * rng.standard_normal((schedule.pp, members)), 0.1)
    routed = sum(kind in ("moe", "mtp") for stage in kinds for kind in stage)
    cv = scenario.routing.expert_load_cv.value
    if shape.moe is None or not routed or plan.ep == 1 or cv == 0.0:
        flat = np.ones((routed, schedule.microbatches, members))
        if clock_cv == 0.0 and scenario.variation.jitter_cv.value == 0.0:
            clock, flat = clock[:, :1], flat[:, :, :1]  # every member is the same: one stands for all
        return Variation(clock, flat, flat, scenario.variation.jitter_cv.value, scenario.seed)
    samples = routed * schedule.microbatches
    loads = sampled_loads(scenario.seed, samples, plan.ep, shape.moe.experts, cv, received_rows)
    per_node = min(plan.ep, layout.gpus_per_node)
    nodes = loads.reshape(samples, plan.ep // per_node, per_node).mean(axis=2).repeat(per_node, axis=1)
    full = (routed, schedule.microbatches, members)
    return Variation(
        clock, loads.reshape(full), nodes.reshape(full), scenario.variation.jitter_cv.value, scenario.seed
    )
