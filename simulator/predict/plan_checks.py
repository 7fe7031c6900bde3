"""Checks a plan beyond the sizes of its layout; each error names key, value and remedy."""

from __future__ import annotations

from pathlib import Path

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.provenance import sourced_numbers
from moesim.simulator.model.recompute import Recompute, recompute_label
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import SCHEDULES, Schedule, build, from_csv, validate

MAX_SCHEDULE_BYTES = 2_000_000
RANGED_KEYS = ("routing.expert_load_cv", "variation.clock_cv", "variation.jitter_cv")
"""Keys of a scenario whose range intervals use."""
SHIPPED_SECTIONS = ("cluster.", "run.price.buy.", "run.failures.", "run.restart.", "run.checkpoint.storage.")
"""Sections that mostly come from shipped data, whose numbers have ranges."""


def load_schedule(scenario: Scenario, count: int) -> Schedule:
    """The named schedule, or the CSV file that the scenario names, for `count` micro-batches."""
    plan = scenario.parallel
    if not scenario.schedule.lower().endswith(".csv"):
        try:
            return build(scenario.schedule, plan.pp, count, plan.vpp)
        except InputError as error:
            if error.key != "microbatches":
                raise
            unit = scenario.batch.sequences // count  # the scenario states sequences, not micro-batches
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


def check_sms(scenario: Scenario, cluster: Cluster) -> None:
    """Raise InputError where communication reserves more SMs than the accelerator can spare."""
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


def check_ranges(scenario: Scenario) -> None:
    """Raise InputError for a range that no interval uses, instead of ignoring it."""
    own = scenario.model_copy(update={"profile": ""})  # profiles may state ranges
    for path, number in sourced_numbers(own):
        if number.between is not None and path not in RANGED_KEYS and not path.startswith(SHIPPED_SECTIONS):
            raise InputError(
                f"{path}: between={list(number.between)} is not used by intervals; of a scenario only "
                f"{', '.join(RANGED_KEYS)} and numbers of its cluster may state a range. Use moesim "
                f"sensitivity --range {path}=LOW,HIGH",
                key=path,
            )


def check_combination(scenario: Scenario, schedule: Schedule) -> None:
    """Raise InputError for choices that are legal on their own but not modelled together."""
    if scenario.parallel.zero_stage == 3 and schedule.paired:
        raise InputError(
            f"parallel.zero_stage=3 with schedule={schedule.name}: parameter gathers have no slot in an "
            "overlapped pair; use zero_stage 0 to 2, or a schedule without pairs such as 1f1b",
            key="parallel.zero_stage",
            nearest=(2,),
        )
    problem = expert_overlap_problem(scenario.schedule, scenario.parallel, scenario.recompute)
    if problem:
        raise InputError(problem)


def expert_overlap_problem(schedule: str, plan: ParallelPlan, recompute: Recompute) -> str:
    """Why a schedule that overlaps expert-parallel transfers cannot run this plan; empty if it can.

    Source: NVIDIA/Megatron-LM@d98e8a64 megatron/core/transformer/transformer_config.py, the assertions on
    `overlap_moe_expert_parallel_comm`.
    """
    spec = SCHEDULES.get(schedule)
    if spec is None or not spec.overlaps_experts:
        return ""
    if plan.pp > 1 and plan.vpp == 1:
        return (
            f"schedule={schedule} with parallel.pp={plan.pp} needs several stages on a rank, got "
            "parallel.vpp=1; nearest: vpp=2, or pp=1"
        )
    if plan.ep == 1:
        return (
            f"schedule={schedule} overlaps expert-parallel transfers, and parallel.ep=1 has none; use "
            "interleaved-1f1b or 1f1b, or raise parallel.ep"
        )
    if recompute == "full" or (not isinstance(recompute, str) and "moe" in recompute):
        return (
            f"recompute={recompute_label(recompute)} with schedule={schedule}: layers would be repeated "
            "with the transfers that its pairs hide; use none, selective or modules without moe"
        )
    return ""
