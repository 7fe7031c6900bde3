"""The closed form of a scenario's own plan: near the engine, marked as an estimate, refused where it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.candidate_search import CandidateSearch
from moesim.simulator.planner.candidates import find_candidates
from moesim.simulator.planner.closed_form import CLOSED_FORM_ERROR
from moesim.simulator.planner.result import simulate_plan
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.predict.step import prepare

Run = Callable[..., Any]
EXAMPLES = Path(__file__).parents[3] / "examples"
FIVE, MIXTRAL, FLEET = (str(EXAMPLES / f"{n}.yaml") for n in ("five-lines", "mixtral-on-h200", "mixed"))
HOME = "deepseek-v3-2048xh800"

CASES = [
    (HOME,),
    (HOME, "communication.sms=8"),
    (FIVE,),
    (FIVE, "parallel.zero_stage=3"),
    (MIXTRAL,),
    (MIXTRAL, "schedule=zb-h1"),
    (MIXTRAL, "communication.kernels=nccl"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: Path(" ".join(case)).name)
def test_the_estimate_is_near_the_simulated_step(case: tuple[str, ...]) -> None:
    result, estimated = moesim.simulate(*case), moesim.estimate(*case)
    assert estimated.step_time_s == pytest.approx(result.step.time_s, rel=CLOSED_FORM_ERROR)
    assert estimated.step_time_s != result.step.time_s, "the engine must not have run"
    assert estimated.lower_bound_s <= estimated.step_time_s
    assert estimated.memory == result.memory
    assert estimated.stages == result.stages
    assert estimated.profile_hash == result.profile_hash
    longer = estimated.step_time_s / result.step.time_s
    assert estimated.days == pytest.approx(result.run.days * longer)
    assert estimated.cost_usd == pytest.approx((result.run.cost_usd or 0.0) * longer)
    assert estimated.tokens_per_s == pytest.approx(result.step.tokens_per_s / longer)


def test_stated_layers_are_kept() -> None:
    own = prepare(moesim.load(HOME)).stages.layers_per_stage
    uneven = [own[0] - 1, own[1] + 1, *own[2:]]
    stated = moesim.load(HOME).replace(stages={"layers": uneven})
    assert moesim.estimate(stated).stages == moesim.check(stated).stages
    assert moesim.estimate(stated).step_time_s > moesim.estimate(HOME).step_time_s


def test_an_estimate_says_that_it_is_one() -> None:
    found = moesim.estimate(FIVE)
    assert "ESTIMATE in closed form, not simulated" in repr(found).splitlines()[0]
    assert f"within {100 * CLOSED_FORM_ERROR:.1f} %" in repr(found)
    assert (found.to_dict()["method"], found.to_dict()["error"]) == ("closed form", CLOSED_FORM_ERROR)
    assert found.rows()[0]["method"] == "closed form" and "closed form" in found._repr_html_()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ((FLEET,), "a fleet of several clusters"),
        ((FIVE, "resolution=full"), "resolution full"),
        ((FIVE, "resolution=full", "faults=[{kind: slow-gpu, gpu: 3, speed: 0.5}]"), "full and faults"),
        ((FIVE, "schedule=mine.csv"), "a schedule from a file"),
        (("deepseek-v3-trace-pair",), "a part of the model"),
        ((FIVE, "parallel.ep=7"), "parallel.ep=7"),
        ((FIVE, "communication.sms=500"), "communication.sms=500 leaves no SM"),
    ],
)
def test_what_the_closed_form_cannot_do_is_refused(case: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        moesim.estimate(*case)


def test_the_command_prints_the_estimate(run: Run) -> None:
    shown = run("simulate", FIVE, "--fast")
    assert shown.code == 0 and str(moesim.estimate(FIVE)) in shown.out
    assert "defaults, stated by nobody" in shown.out
    data = json.loads(run("simulate", FIVE, "--fast", "--json").out)
    assert data["method"] == "closed form" and data["step_time_s"] == moesim.estimate(FIVE).step_time_s
    full = run("simulate", FIVE, "--fast", "--set", "parallel.microbatch=4")
    assert full.code == 3 and "does not fit" in full.out and "does not fit" in full.err


@pytest.mark.parametrize(
    "options",
    [
        ("--trace", "x.json"),
        ("--uncertainty",),
        ("--picture", "x.svg"),
        ("--resolution", "full"),
        ("--ranks", "0"),
    ],
)
def test_options_that_need_the_engine_are_refused(run: Run, options: tuple[str, ...]) -> None:
    refused = run("simulate", FIVE, "--fast", *options)
    assert refused.code == 2 and refused.out == ""
    assert options[0] in refused.err or "resolution full" in refused.err


def test_sharded_parameters_share_the_ports_with_the_experts_as_in_a_search() -> None:
    """The estimate is the closed form that a search gives the same plan, concurrent transfers included."""
    plan = "parallel={tp: 1, pp: 1, ep: 8, zero_stage: 3}"
    scenario = moesim.load(MIXTRAL, plan, "schedule=1f1b", "recompute=none")
    step, job = simulate_plan(scenario), resolve(scenario)
    space = with_defaults(PlanSpace(pp=(1,), tp=(1,), ep=(8,)), scenario, job.shape, job.cluster)
    study = CandidateSearch(scenario, job.shape, find_candidates(job, space))
    searched_s = study.seconds_of(scenario, step.layers, step.microbatches)
    assert moesim.estimate(scenario).step_time_s == searched_s
    assert searched_s == pytest.approx(step.time_s, rel=CLOSED_FORM_ERROR)
