"""The planner's closed forms beside the engine's path, for plans drawn at random (defect P2)."""

from __future__ import annotations

import random
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
from planner_jobs import candidates_of

from moesim.simulator.planner.candidate_search import CandidateSearch
from moesim.simulator.planner.closed_form import CLOSED_FORM_ERROR
from moesim.simulator.planner.plan_arrays import Candidates
from moesim.simulator.planner.result import scenario_of, simulate_plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules import SCHEDULES

SMALL = str(Path(__file__).parents[2] / "golden" / "scenario-small.yaml")
EVEN = ("routing.expert_load_cv=0", "variation.clock_cv=0", "variation.jitter_cv=0")
HOPPER = "cluster={node: hgx-h800, nodes: 16, network: mpft-ib-400g}"

JOBS: dict[str, tuple[str, ...]] = {
    "mixtral-8x22b": (SMALL,),
    "qwen3-30b-a3b": (
        SMALL, "model=qwen3-30b-a3b", HOPPER, "profile=h800-published", "precision=fp8",
        "communication.sms=20", "batch.sequences=256",
    ),
    "deepseek-v3": (
        "deepseek-v3-2048xh800", "cluster={node: hgx-h800, nodes: 64, network: mpft-ib-400g}",
        "batch.sequences=1024",
    ),
    "llama-3-8b": (
        SMALL, "model=llama-3-8b", "parallel={pp: 4, zero_stage: 1}", "batch.sequences=128",
        "software.overlap_data_parallel=true",
    ),
    "llama-3-8b-eager": (
        SMALL, "model=llama-3-8b", "parallel={pp: 4, zero_stage: 1}", "batch.sequences=128",
        "software={framework: none, kernels: eager, attention: unfused}",
    ),
}  # fmt: skip
SPACE = PlanSpace(
    tp=(1, 2), pp=(1, 2, 4, 8), ep=(1, 4, 8, 16), cp=(1, 2), vpp=(1, 2), microbatch=(1, 2), sms=(8, 20)
)
PLANS = 13
"""Drawn for each job: 65 in all."""

MOST_CHUNKS = 96
"""Micro-batches times stages of a drawn plan."""

ROUNDING_S = 1e-6
"""The engine rounds every phase to whole nanoseconds."""


@cache
def searched(job: str) -> tuple[Scenario, Candidates]:
    scenario = load_scenario(JOBS[job][0], [*JOBS[job][1:], *EVEN])
    return scenario, candidates_of(scenario, SPACE)[0]


def drawn(found: Candidates) -> list[int]:
    """Random plans of every schedule in turn, with few micro-batches: the engine runs them soon."""
    draw = random.Random(20261122)
    by_schedule: dict[str, list[int]] = {name: [] for name in SCHEDULES}
    for number in range(len(found.bound)):
        frame = found.axes(number)[0]
        if frame.microbatches * frame.pattern.n_stages <= MOST_CHUNKS:
            by_schedule[frame.schedule].append(number)
    own = [draw.sample(numbers, min(PLANS, len(numbers))) for numbers in by_schedule.values()]
    turns = [number for turn in zip_longest(*own) for number in turn if number is not None]
    return turns[:PLANS]


@pytest.mark.parametrize("job", JOBS)
def test_memory_and_step_of_random_plans_are_those_of_the_engines_path(job: str) -> None:
    scenario, found = searched(job)
    study, numbers = CandidateSearch(scenario, scenario.shape, found), drawn(found)
    assert len(numbers) == PLANS
    study.estimate(numbers)
    errors = []
    for number in numbers:
        plan = scenario_of(scenario, found, number)
        simulated = simulate_plan(plan)
        label = f"{found.axes(number)[0].label} {plan.precision} {plan.recompute} {plan.parallel.zero_stage}"
        assert found.memory[number] == pytest.approx(simulated.memory.total_bytes, rel=1e-9), label
        assert simulated.time_s is not None
        assert found.bound[number] <= simulated.time_s + ROUNDING_S, label
        errors.append((abs(found.time_s[number] / simulated.time_s - 1.0), label))
    # The stated error is that which 95 of 100 closed forms keep; of 300 plans drawn likewise, 299 did.
    outside = [error for error in errors if error[0] > CLOSED_FORM_ERROR]
    assert len(outside) <= 1 and max(errors)[0] < 3.0 * CLOSED_FORM_ERROR, outside


def test_the_draws_cover_what_a_plan_is_made_of() -> None:
    plans = [
        scenario_of(scenario, found, number)
        for scenario, found in map(searched, JOBS)
        for number in drawn(found)
    ]
    assert len(plans) >= 60
    assert {plan.schedule for plan in plans} == set(SCHEDULES)
    assert {plan.parallel.zero_stage for plan in plans} == {0, 1, 2, 3}
    assert {plan.recompute for plan in plans} >= {"none", "selective", "deepseek-v3", "full", "op"}
    assert {plan.recipe.linear for plan in plans} == {"bf16", "fp8"}
    for degree, values in (("tp", {1, 2}), ("cp", {1, 2}), ("microbatch", {1, 2}), ("ep", {1, 4, 8, 16})):
        assert {getattr(plan.parallel, degree) for plan in plans} == values, degree
