"""Turns a candidate into a scenario, simulates its step and makes the row of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.memory import is_admitted
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.placements import placement_name, with_placement
from moesim.simulator.planner.plan_arrays import Candidates
from moesim.simulator.planner.result import PlanRow
from moesim.simulator.planner.step_mechanisms import step_causes
from moesim.simulator.predict.plan_memory import fullest_of, memory_of
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.scenario import Stages
from moesim.simulator.schedules import build


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Time, memory and layout of a plan's step; `time_s` is None if the plan was not simulated."""

    time_s: float | None
    memory: MemoryResult
    causes: dict[str, float]
    layers: tuple[int, ...]
    microbatches: int

    def keeps(self, headroom: float | None) -> bool:
        """Whether the plan leaves the head-room of a search (see `is_admitted`)."""
        memory = self.memory
        return bool(is_admitted(memory.total_bytes, memory.range_bytes[1], memory.capacity_bytes, headroom))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Results of the search for a plan, apart from its simulation.

    `stages` is None if the simulated step states them. `variants`: number of plans that differ only in
    precision, recompute, SMs or ZeRO stage. `changed`: scenario keys and values of the space's variant.
    """

    closed_form_s: float | None = None
    lower_bound_s: float | None = None
    stages: StageAssignment | None = None
    variants: int = 1
    changed: Mapping[str, Any] = field(default_factory=dict)


def simulate_plan(scenario: Scenario) -> PlanStep:
    """Simulate a plan (in a worker process). Raises InputError for an illegal scenario."""
    step = run_step(scenario)
    prepared = step.prepared
    return PlanStep(
        step.time_s,
        prepared.memory,
        step_causes(prepared, step.executions[0]),
        prepared.stages.layers_per_stage,
        prepared.schedule.microbatches,
    )


def scenario_of(
    base: Scenario, candidates: Candidates, number: int, placement: int | None = None
) -> Scenario:
    """The scenario of a candidate, ready for `simulate`, with its own placement or another one."""
    frame, p, r, s, z = candidates.axes(number)
    space = candidates.space
    which = int(candidates.placement[number]) if placement is None else placement
    return with_placement(base, space.placement[which]).model_copy(
        update={
            "parallel": frame.plan.model_copy(update={"zero_stage": space.zero_stage[z]}),
            "schedule": frame.schedule,
            "precision": space.precision[p],
            "recompute": space.recompute[r],
            "communication": base.communication.model_copy(update={"sms": space.sms[s]}),
            "stages": Stages(layers=candidates.assignment(number, which).layers_per_stage),
        }
    )


def closed_form_memory(
    scenario: Scenario,
    shape: ModelShape,
    cluster: Cluster,
    candidates: Candidates,
    number: int,
    placement: int | None = None,
) -> PlanStep:
    """Memory by kind of a plan that was not simulated, with its own placement or another one.

    `shape` and `cluster` are what the scenario names, loaded once for all plans.
    """
    frame = candidates.axes(number)[0]
    assignment = candidates.assignment(number, placement)
    ranks = frame.pattern.in_flight[-1]
    if ranks != frame.pattern.in_flight[0]:  # memory grows with the micro-batches, so count all of them
        schedule = build(frame.schedule, frame.plan.pp, frame.microbatches, frame.plan.vpp)
        ranks = tuple(rank_stages(schedule))
    report = memory_of(scenario, shape, cluster, assignment, ranks, frame.microbatches)
    return PlanStep(
        None,
        fullest_of(report, range(len(report.by_rank))),
        {},
        assignment.layers_per_stage,
        frame.microbatches,
    )


def make_row(
    scenario: Scenario,
    cluster: Cluster,
    found: PlanStep,
    known: Estimates,
) -> PlanRow:
    """A row of the result; `margin` stays 0 until the best plan is known."""
    plan = scenario.parallel
    seconds = known.closed_form_s if found.time_s is None else found.time_s
    assert seconds is not None, "a plan has a simulated or an estimated time"
    tokens = scenario.batch.sequences * scenario.batch.sequence_length
    run_s = -(-scenario.run.tokens // tokens) * seconds
    gpu_hours = run_s / SECONDS_PER_HOUR * cluster.n_gpus
    price = cluster.price_per_gpu_hour
    limit = cluster.accelerator.tdp
    pue = cluster.energy.pue.value if cluster.energy else 1.0
    return PlanRow(
        tp=plan.tp,
        pp=plan.pp,
        ep=plan.ep,
        cp=plan.cp,
        vpp=plan.vpp,
        dp=cluster.n_gpus // (plan.tp * plan.cp * plan.pp),
        expert_tp=plan.expert_tp,
        microbatch=plan.microbatch,
        microbatches=found.microbatches,
        schedule=scenario.schedule,
        zero_stage=plan.zero_stage,
        recompute=recompute_label(scenario.recompute),
        precision=precision_name(scenario),
        sms=scenario.communication.sms,
        placement=placement_name(scenario.routing.eplb),
        layers=found.layers if known.stages is None else known.stages.layers_per_stage,
        changed=dict(known.changed),
        time_s=seconds,
        source="closed form" if found.time_s is None else "simulated",
        closed_form_s=known.closed_form_s,
        lower_bound_s=known.lower_bound_s,
        memory_bytes=found.memory.total_bytes,
        reserved_bytes=found.memory.range_bytes[1],
        capacity_bytes=found.memory.capacity_bytes,
        memory_by_kind_bytes=found.memory.by_kind_bytes,
        days=run_s / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost_usd=gpu_hours * price.value if price else None,
        energy_j=run_s * cluster.n_gpus * cluster.accelerator.tdp_w * pue if limit else None,
        margin=0.0,
        variants=known.variants,
        causes_s=found.causes,
        scenario=scenario,
    )


def precision_name(scenario: Scenario) -> str:
    """Name of the recipe; one without a name is described by the nearest that has one."""
    if isinstance(scenario.precision, str):
        return scenario.precision
    return nearest_recipe(scenario.precision)


def nearest_recipe(recipe: Precision) -> str:
    """Name of the nearest recipe, with the fields that differ, such as "fp8 dispatch=bf16"."""
    fields = dict(recipe)
    differing = {
        name: [f"{key}={fields[key]}" for key, value in known if fields[key] != value]
        for name, known in PRECISIONS.items()
    }
    name = min(differing, key=lambda known: len(differing[known]))
    return " ".join([name, *differing[name]])
