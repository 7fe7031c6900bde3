"""Prices, memory, bounds and step times over arrays of plans, against the same of single plans."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from planner_jobs import candidates_of, small_job

from moesim.simulator.cost.cost_table import cost_table
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.layout.stages import StageAssignment, blocks_of
from moesim.simulator.memory.gpu import rank_stages
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.planner.candidate_search import CandidateSearch
from moesim.simulator.planner.plan_arrays import Candidates
from moesim.simulator.planner.replay import key_of, pattern
from moesim.simulator.planner.result import scenario_of, simulate_plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.placement import memory_of
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import SCHEDULES, build

HOME = "deepseek-v3-2048xh800"
SCENARIO_SMALL = str(Path(__file__).parents[2] / "golden" / "scenario-small.yaml")
EVEN = ["routing.expert_load_cv=0", "variation.clock_cv=0", "variation.jitter_cv=0"]
SMALL = [
    "cluster={node: hgx-h800, nodes: 8, network: mpft-ib-400g}",
    "batch.sequences=256",
    "profile=h800-trace",
]


Searched = tuple[Candidates, CandidateSearch]


@pytest.fixture(scope="module")
def home() -> Searched:
    wanted = PlanSpace(
        tp=(1, 2), pp=(4, 8, 16), ep=(1, 32, 64), cp=(1, 2), vpp=(2,), microbatch=(1, 2), sms=(8, 20)
    )
    return candidates_of(load_scenario(HOME), wanted)


def test_prices_are_those_of_the_pricer() -> None:
    prepared = prepare(load_scenario(HOME))
    scenario = prepared.scenario
    whole = tuple(blocks_of(prepared.shape))
    schedule = build("dualpipe", 2, 4)
    theirs = cost_table(prepared.pricer, schedule, StageAssignment((whole, whole)))
    book = PlanCosts(prepared.pricer.job.with_scenario(scenario))
    # Another expert-parallel degree first: what does not depend on it is shared.
    other = scenario.parallel.model_copy(update={"ep": 8})
    book.table(other, scenario.recipe, scenario.recompute, 20, schedule)
    ours = book.table(scenario.parallel, scenario.recipe, scenario.recompute, 20, schedule)
    assert dict(ours.compute) == dict(theirs.compute)
    assert dict(ours.transfer) == dict(theirs.transfer)


@pytest.mark.long
def test_memory_is_that_of_every_single_plan(home: Searched) -> None:
    found, study = home
    draw = random.Random(0)
    for number in draw.sample(range(len(found.bound)), 40):
        scenario = scenario_of(study.scenario, found, number)
        frame = found.axes(number)[0]
        schedule = build(frame.schedule, frame.plan.pp, frame.microbatches, frame.plan.vpp)
        stages = found.assignment(number)
        ranks = rank_stages(schedule)
        report = memory_of(scenario, study.shape, scenario.machine, stages, ranks, frame.microbatches)
        assert found.memory[number] == pytest.approx(report.total_bytes, rel=1e-9), frame.label


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_patterns_count_the_steps_of_long_schedules(name: str) -> None:
    pp, vpp = 4, 2 if SCHEDULES[name].free_vpp else 1
    for count in (8, 12, 40, 44):
        SCHEDULES[name].check(pp, count, vpp)
        long, short = build(name, pp, count, vpp), pattern(name, pp, count, vpp)
        many = np.array([float(count)])
        for rank in range(pp):
            keys = [key_of(step) for step in long.ranks[rank]]
            for key in set(keys):
                first, last = short.counts[0][rank].get(key, 0), short.counts[-1][rank].get(key, 0)
                assert short.along(first, last, many)[0] == keys.count(key), (count, rank, key)


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_without_skew_the_closed_form_is_the_engine_up_to_shared_links(name: str, zero: int) -> None:
    if zero == 3 and SCHEDULES[name].overlapped_pairs:
        return  # refused: no slot for parameter gathers in a pair
    scenario = load_scenario(HOME, [*SMALL, *EVEN])
    vpp = (2,) if SCHEDULES[name].free_vpp else (1,)
    recompute: tuple[Recompute, ...] = ("selective",) if SCHEDULES[name].hides_expert_transfers else ("full",)
    wanted = PlanSpace(
        tp=(1,), pp=(4,), ep=(16,), cp=(1,), vpp=vpp, microbatch=(1,), schedule=(name,), zero_stage=(zero,),
        recompute=recompute, precision=("fp8",), sms=(20,),
    )  # fmt: skip
    roomy = scenario.model_copy(update={"model": "qwen3-30b-a3b"})
    found, study = candidates_of(roomy, wanted)
    assert len(found.bound) == 1
    study.estimate([0])
    simulated = simulate_plan(scenario_of(roomy, found, 0)).time_s
    assert simulated is not None
    assert found.bound[0] <= simulated
    assert found.time_s[0] == pytest.approx(simulated, rel=0.01)


def test_scatters_beside_expert_parallel_transfers_share_ports_as_in_the_engine() -> None:
    """Rates are max-min fair in bytes/s of the fuller port (eq. E3), from the scatter's start on.

    A block's scatter fills 73 % of a NIC for 37 ms. Transfers of the experts carry more bytes over NVLink
    than over the NIC, so on the NIC they yield to the scatter.
    """
    wanted = PlanSpace(
        tp=(1,), pp=(8,), ep=(32,), cp=(1,), vpp=(2,), microbatch=(1,), schedule=("dualpipev",),
        zero_stage=(2,), recompute=("selective",), precision=("fp8",), sms=(8,), headroom=0.0,
    )  # fmt: skip
    scenario = load_scenario(HOME, EVEN)
    found, study = candidates_of(scenario, wanted)
    study.estimate([0])
    simulated = simulate_plan(scenario_of(scenario, found, 0)).time_s
    assert found.time_s[0] == pytest.approx(simulated, rel=0.015)


def test_the_closed_form_is_near_the_engine_and_above_the_bound(
    home: Searched,
) -> None:
    found, study = home
    draw = random.Random(1)
    short = [n for n in range(len(found.bound)) if found.axes(n)[0].microbatches <= 120]
    for number in draw.sample(short, 5):
        study.estimate([number])
        simulated = simulate_plan(scenario_of(study.scenario, found, number)).time_s
        assert simulated is not None
        label = found.axes(number)[0].label
        assert found.bound[number] <= simulated, label
        assert found.time_s[number] == pytest.approx(simulated, rel=0.05), label


@pytest.mark.parametrize("framework", ["megatron-core-0.17", "deepspeed-0.19", "torchtitan-0.2"])
def test_no_closed_form_is_below_its_own_bound_which_counts_calls_of_the_host(framework: str) -> None:
    wanted = PlanSpace(
        tp=(1, 2), pp=(4,), ep=(8,), cp=(1,), vpp=(2,), microbatch=(1,), zero_stage=(1, 3),
        schedule=("1f1b", "interleaved-1f1b", "dualpipev"), recompute=("full",), precision=("bf16",),
        sms=(20,),
    )  # fmt: skip
    found, study = candidates_of(small_job(f"software.framework={framework}"), wanted)
    study.estimate(range(len(found.bound)))
    assert (found.bound <= found.least_s).all()
    assert (found.least_s <= found.time_s).all()
    assert (found.least_s > found.bound).any()


def test_a_bound_is_not_above_the_plans_of_any_zero_stage() -> None:
    """Under torchtitan a stage without sharding writes weight gradients that others do not."""
    wanted = PlanSpace(
        tp=(1,), pp=(4,), ep=(1,), cp=(1,), vpp=(2,), microbatch=(1,), zero_stage=(0, 1), schedule=("1f1b",),
        recompute=("none",), precision=("bf16",), sms=(20,),
    )  # fmt: skip
    found, study = candidates_of(small_job("software.framework=torchtitan-0.2"), wanted)
    bound, found.bound[:] = found.bound.copy(), 0.0  # a time is given as at least its bound
    study.estimate(range(len(bound)))
    assert len(bound) and (bound <= found.time_s).all()


@pytest.mark.parametrize(
    "routing",
    [
        "load: {kind: zipf, exponent: 0.5, shuffle_per_layer: false}",
        "load: {kind: zipf, exponent: 1.0}",
        "capacity: {factor: 0.5, per: rank}",
        "capacity: {factor: 0.1}",
        "load: {kind: zipf, exponent: 0.5, shuffle_per_layer: false}, capacity: {factor: 1.0}",
    ],
)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_with_lasting_load_and_drops_too(routing: str, name: str) -> None:
    """Rows that capacity drops are neither computed nor sent; a member that is always hot is always late."""
    scenario = load_scenario(SCENARIO_SMALL, [f"routing={{expert_load_cv: 0.1, {routing}}}"])
    wanted = PlanSpace(
        tp=(1,), pp=(4,), ep=(8,), cp=(1,), vpp=(1,), microbatch=(1,), schedule=(name,), zero_stage=(1,),
        recompute=("full",), precision=("bf16",), sms=(20,), placement=("in order",), headroom=0.0,
    )  # fmt: skip
    found, study = candidates_of(scenario, wanted)
    study.estimate([0])
    simulated = simulate_plan(scenario_of(scenario, found, 0)).time_s
    assert simulated is not None
    assert found.bound[0] <= simulated
    assert found.time_s[0] == pytest.approx(simulated, rel=0.03)


@pytest.mark.long
def test_the_closed_form_itself_hardly_falls_below_a_bound(home: Searched) -> None:
    """`time_s` is never below the bound, because the search takes the larger; the formula is asked here."""
    found, study = home
    numbers = list(range(0, len(found.bound), max(1, len(found.bound) // 100)))
    study.estimate(numbers)
    for number in numbers:
        layers = found.assignment(number).layers_per_stage
        microbatches = found.axes(number)[0].microbatches
        formula_s = study.seconds_of(scenario_of(study.scenario, found, number), layers, microbatches)
        assert formula_s >= found.bound[number] * (1.0 - 0.005), found.axes(number)[0].label
        assert found.time_s[number] == max(formula_s, found.bound[number])


def test_plans_estimated_together_or_alone_get_the_same_time(
    home: Searched,
) -> None:
    found, study = home
    numbers = list(range(5, len(found.bound), max(1, len(found.bound) // 50)))
    study.estimate(numbers)
    again = replace(study, candidates=replace(found, time_s=np.full(len(found.bound), np.nan)), estimated=0)
    for number in numbers[::7]:
        again.estimate([number])
    known = ~np.isnan(again.candidates.time_s)
    assert (again.candidates.time_s[known] == found.time_s[known]).all()
