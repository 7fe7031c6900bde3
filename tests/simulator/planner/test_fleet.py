"""The search over a fleet: against every plan of a small space, and beside each pool alone."""

from __future__ import annotations

import json
from itertools import product
from math import inf
from typing import Any

import pytest

import moesim
from moesim.hwmodels import InfeasibleError, InputError
from moesim.simulator.planner.fleet.best_first import (
    FleetSearch,
    fleet_pools,
    fleet_space,
    legal_fleet_frames,
)
from moesim.simulator.planner.fleet.simulate import ideal_s
from moesim.simulator.planner.result import PlanResult
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.scenario import Scenario

SPACE: dict[str, Any] = {
    "tp": (1,), "pp": (2, 4), "ep": (8,), "cp": (1,), "vpp": (2,), "microbatch": (1,),
    "schedule": ("1f1b", "zbv", "dualpipev"), "recompute": ("selective", "full"), "precision": ("bf16",),
    "zero_stage": (1,),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(mixed: Scenario) -> PlanResult:
    return moesim.plan(mixed, PlanSpace(**SPACE), top=3)


def every(mixed: Scenario) -> list[tuple[float, Scenario]]:
    """Every plan of the space simulated with the layers that `simulate` gives it, those that fit."""
    times = []
    keys = ("pp", "ep", "schedule", "recompute")
    for pp, ep, schedule, recompute in product(*(SPACE[key] for key in keys)):
        plan = {"parallel.pp": pp, "parallel.ep": ep, "schedule": schedule, "recompute": recompute}
        try:
            scenario = mixed.replace(**plan)
            result = moesim.simulate(scenario)
        except InputError:
            continue
        if result.memory.fits:
            times.append((result.step.time_s, scenario))
    return sorted(times, key=lambda row: row[0])


def test_the_best_is_the_best_of_all_plans(mixed: Scenario, found: PlanResult) -> None:
    brute = every(mixed)
    assert len(brute) >= 8
    assert found.best.time_s <= brute[0][0] * 1.005  # layouts are chosen from rounded weights
    best = brute[0][1]
    assert (found.best.schedule, found.best.pp, found.best.ep) == (
        best.schedule, best.parallel.pp, best.parallel.ep,
    )  # fmt: skip


def test_bounds_lie_below_closed_forms_below_which_nothing_is_missed(mixed: Scenario) -> None:
    pools = fleet_pools(mixed)
    wanted = fleet_space(PlanSpace(**SPACE), mixed, pools, mixed.shape)
    space, frames, refused = legal_fleet_frames(wanted, mixed, pools, mixed.shape)
    study = FleetSearch(mixed, mixed.shape, pools, space, frames, None, inf, refused)
    assert study.fastest(10_000) == inf  # everything is estimated
    plans = [plan for family in study.estimates.values() for plan in family]
    assert len(plans) == study.fitting == study.estimated >= 8
    assert all(plan.bound_s <= plan.time_s for plan in plans)
    few = FleetSearch(mixed, mixed.shape, pools, space, frames, None, inf, refused)
    proven = few.fastest(2)
    assert few.estimated < study.estimated
    assert [p.time_s for p in few.best()[:2]] == [p.time_s for p in study.best()[:2]]
    assert proven >= study.best()[1].time_s


def test_rows_are_scenarios_that_simulate_repeats(found: PlanResult) -> None:
    best = found.best
    result = moesim.simulate(best.scenario)
    assert result.step.time_s == best.time_s
    assert best.time_s == pytest.approx(best.closed_form_s, rel=0.03)
    assert result.pools == best.pools
    assert best.cost_usd == pytest.approx(result.run.cost_usd)
    assert (best.gpu_hours, best.days) == pytest.approx((result.run.gpu_hours, result.run.days))
    assert best.memory_bytes == result.memory.total_bytes <= best.capacity_bytes
    assert sum(best.causes_s.values()) == pytest.approx(best.time_s, rel=1e-6)
    assert [row.margin for row in found.ranked] == sorted(row.margin for row in found.ranked)


def test_the_verdict_compares_with_each_pool_alone(mixed: Scenario, found: PlanResult) -> None:
    assert found.fleet is not None
    times = [row.plan.time_s for row in found.fleet.alone if row.plan is not None]
    assert len(times) == 2
    assert found.fleet.wins is (found.best.time_s < min(times))
    assert found.fleet.ideal_s == pytest.approx(1 / (1 / times[0] + 1 / times[1])) == ideal_s(times)
    reached = found.fleet.reached
    assert reached == pytest.approx(ideal_s(times) / found.best.time_s)
    assert reached is not None and 0.5 < reached < 1.05
    first = found.fleet.alone[0].plan
    assert first is not None and moesim.simulate(first.scenario).step.time_s == first.time_s
    assert first.scenario.machine.n_gpus == 16
    for words in ("16 x h100-sxm alone takes", "as fast", "shared the work without loss", "The run costs $"):
        assert any(words in sentence for sentence in found.fleet.sentences), words
    assert found.own is not None and found.own.pools


def test_the_same_bytes_twice_and_as_json(mixed: Scenario, found: PlanResult) -> None:
    again = moesim.plan(mixed, PlanSpace(**SPACE), top=3)
    texts = [json.dumps(r.to_dict(), allow_nan=False, sort_keys=True) for r in (found, again)]
    assert texts[0] == texts[1]
    data = json.loads(texts[0])
    assert len(data["ranked"][0]["pools"]) == 2 and data["fleet"]["alone"][0]["n_gpus"] == 16


def test_refusals_say_why(mixed: Scenario) -> None:
    wanted = PlanSpace(**(SPACE | {"pp": (2, 3), "schedule": ("1f1b", "dualpipe"), "recompute": ("full",)}))
    result = moesim.plan(mixed, wanted, top=1)
    reasons = {row.reason: row.count for row in result.refused}
    assert any("parallel.pp does not spread over the fleet" in reason for reason in reasons)
    assert any("dualpipe keeps every stage in two pools" in reason for reason in reasons)
    assert result.considered == 4 == sum(reasons.values()) + result.fitting


def test_the_scenarios_layers_can_be_kept(mixed: Scenario) -> None:
    job = mixed.replace(**{"stages.layers": [14, 14, 10, 10]})
    wanted = PlanSpace(
        **(SPACE | {"layout": "scenario", "recompute": ("full",), "schedule": ("1f1b", "zbv")})
    )
    result = moesim.plan(job, wanted, top=1)
    assert result.best.layers == (14, 14, 10, 10)
    assert "another number of stages than stages.layers" in {row.reason for row in result.refused}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"objective": "memory"}, "objective=memory is not searched for a fleet"),
        ({"space": PlanSpace(sms=(8, 20))}, "sms is not searched for a fleet"),
        ({"space": PlanSpace(variants={"seed": (1, 2)})}, "variants are not crossed with a fleet"),
        ({"space": PlanSpace(layout="scenario")}, "has no stages.layers"),
        ({"objective": "speed"}, "objective='speed'"),
        ({"objective": "deadline"}, "needs deadline_days"),
    ],
)
def test_what_a_fleet_search_does_not_have(mixed: Scenario, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        moesim.plan(mixed, **arguments)


def test_limits_that_nothing_keeps(mixed: Scenario) -> None:
    with pytest.raises(InfeasibleError, match="too slow for the deadline or budget"):
        moesim.plan(mixed, PlanSpace(**SPACE), deadline_days=0.01)
    with pytest.raises(InfeasibleError, match="out of memory"):
        moesim.plan(mixed, PlanSpace(**(SPACE | {"headroom": 0.9})))
