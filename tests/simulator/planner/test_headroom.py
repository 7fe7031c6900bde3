"""The head-room of a search: one rule for its arrays, its rows, repairs and fleets."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.candidates import find_candidates
from moesim.simulator.planner.refusals import AT_RISK, FULL
from moesim.simulator.planner.result import scenario_of
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace, with_defaults, with_headroom
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

SPACE = PlanSpace(
    tp=(1,), pp=(1, 4), ep=(8,), cp=(1,), vpp=(2,), microbatch=(1, 2), schedule=("1f1b", "zbv"),
    zero_stage=(1, 2, 3), recompute=("none", "selective", "full"), sms=(20,),
)  # fmt: skip


@pytest.fixture(scope="module")
def job() -> Scenario:
    """Qwen3-30B-A3B on 32 H100: of its plans some fit, some are at risk and some do not fit."""
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            "model=qwen3-30b-a3b",
            "cluster={node: hgx-h100, nodes: 4, network: mrft-ib-400g, price_per_gpu_hour: $2/h}",
            "profile=h100-from-h200",
            "precision=bf16",
            "parallel={pp: 4, ep: 8, zero_stage: 1}",
            "schedule=1f1b",
            "batch.sequences=128",
            "recompute=selective",
        ],
    )


def candidates(job: Scenario, headroom: float | None = None, space: PlanSpace = SPACE) -> list[Scenario]:
    """The plans that a search with this head-room may rank."""
    resolved = resolve(job)
    wanted = with_defaults(with_headroom(space, headroom), job, resolved.shape, resolved.cluster)
    found = find_candidates(resolved, wanted)
    assert found.fitting + found.refused.total == wanted.size
    return [scenario_of(job, found, n) for n in range(len(found.bound))]


def plan_of(scenario: Scenario) -> str:
    """What tells a plan from the others, whatever its stages are."""
    return f"{scenario.parallel} {scenario.schedule} {scenario.recompute}"


def test_a_search_admits_the_plans_that_a_prediction_says_fit(job: Scenario) -> None:
    """Every plan is laid out on its own; its verdict is what the arrays of the search decide by."""
    space = SPACE.model_copy(update={"zero_stage": (1, 3), "recompute": ("none", "full")})
    verdicts = {plan_of(one): prepare(one).memory.verdict for one in candidates(job, 0.0, space)}
    assert set(verdicts.values()) == {"fits", "at risk"}
    kept = candidates(job, None, space)
    assert {prepare(one).memory.verdict for one in kept} == {"fits"}
    # Other stages may take the risk from a plan, never bring it.
    assert {key for key, verdict in verdicts.items() if verdict == "fits"} <= {plan_of(one) for one in kept}
    assert len(kept) < len(verdicts)


def test_plans_at_risk_are_counted_apart(job: Scenario) -> None:
    resolved = resolve(job)
    kept = find_candidates(resolved, with_defaults(SPACE, job, resolved.shape, resolved.cluster))
    assert kept.refused.counts[AT_RISK] == len(candidates(job, 0.0)) - len(candidates(job))
    assert "may reserve" in kept.refused.examples[AT_RISK]
    assert "needs" in kept.refused.examples[FULL]


def test_more_head_room_admits_fewer_plans(job: Scenario) -> None:
    none, some, much = ({plan_of(one) for one in candidates(job, share)} for share in (0.0, 0.1, 0.4))
    assert much < some < none


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_ranked_plans_front_and_own_plan_say_their_risk(job: Scenario, objective: str) -> None:
    careful = plan(job, SPACE, objective=objective, top=3)
    assert {row.verdict for row in (*careful.ranked, *careful.pareto)} == {"fits"}
    assert careful.headroom is None and "no plan is at risk" in careful.kept[0]
    bold = plan(job, SPACE, objective=objective, top=3, headroom=0.0)
    assert bold.fitting > careful.fitting and "plans at risk are admitted" in bold.kept[0]
    if objective == "time":
        assert bold.best.verdict == "at risk" and bold.best.time_s < careful.best.time_s
        assert bold.to_dict()["ranked"][0]["verdict"] == "at risk"
        assert "at risk" in repr(bold.best) and "at risk" not in repr(careful.best)


def test_a_search_with_nothing_but_risk_says_how_to_admit_it(job: Scenario) -> None:
    risky = next(one for one in candidates(job, 0.0) if prepare(one).memory.verdict == "at risk")
    own = risky.parallel
    only = PlanSpace(
        tp=(own.tp,), pp=(own.pp,), ep=(own.ep,), cp=(1,), vpp=(2,), microbatch=(own.microbatch,),
        schedule=(risky.schedule,), zero_stage=(own.zero_stage,), recompute=(risky.recompute,), sms=(20,),
        layout="scenario",
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match=r"at risk.*a head-room of 0 admits plans at risk"):
        plan(risky, only, top=1)
    assert plan(risky, only, top=1, headroom=0.0).best.verdict == "at risk"


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), True])
def test_a_head_room_is_a_share(job: Scenario, share: float) -> None:
    with pytest.raises(InputError, match="at least 0 and below 1"):
        plan(job, SPACE, headroom=share)


def test_two_head_rooms_are_refused(job: Scenario) -> None:
    with pytest.raises(InputError, match="give one of them"):
        plan(job, SPACE.model_copy(update={"headroom": 0.2}), headroom=0.1)
