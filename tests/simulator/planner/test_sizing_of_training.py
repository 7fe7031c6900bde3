"""Sizing: sizes within limits, the sides of a deadline, scaling curves and bad input."""

from __future__ import annotations

from itertools import pairwise
from math import fsum

import pytest

import moesim
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.planner.sized import Sizing, at_size, listed_sizes, sizes_by_rule
from moesim.simulator.planner.sizing import size

JOB = (
    "model=olmoe-1b-7b",
    "cluster=h100-1024",
    "cluster.nodes=2",
    "profile=null",
    "parallel={tp: 1, pp: 1, ep: 8, cp: 1, microbatch: 1, zero_stage: 1}",
    "schedule=1f1b",
    "batch={sequences: 96, sequence_length: 4096}",
    "precision=bf16",
    "recompute=none",
    "communication={sms: 20}",
    "run={tokens: 1e12}",
    "routing=null",
    "variation=null",
)
"""OLMoE on H100; 96 sequences split over 8, 16, 24, 32, 48 and 96 GPUs, but not over 40, 56, 64 and 72."""
HOME = "deepseek-v3-2048xh800"
OWN = {"search": "own", "headroom": 0.0}


@pytest.fixture(scope="module")
def job() -> moesim.Scenario:
    return moesim.load(HOME, *JOB)


@pytest.fixture(scope="module")
def sizing(job: moesim.Scenario) -> Sizing:
    return size(job, nodes="1..6", deadline_days=16.0, search="own", curve="strong")


def test_illegal_sizes_are_named_with_their_reason(sizing: Sizing) -> None:
    assert [point.n_gpus for point in sizing.points] == [8, 16, 24, 32, 48]
    assert [row.size for row in sizing.illegal] == ["40"]
    assert "96" in sizing.illegal[0].reason


def test_the_smallest_size_within_the_deadline_wins_and_stands_beside_the_largest_that_misses_it(
    sizing: Sizing,
) -> None:
    within = [point for point in sizing.points if point.days <= 16.0]
    missed = [point for point in sizing.points if point.days > 16.0]
    assert within and missed, [point.days for point in sizing.points]
    assert sizing.winners["gpus"] == within[0] == sizing.sides[0].keeps
    assert sizing.sides[0].misses == missed[-1]
    assert sizing.winners["time"] == min(within, key=lambda point: point.days)
    assert sizing.winners["cost"] == min(within, key=lambda point: point.cost_usd or 0.0)
    assert {point.source for point in (*sizing.winners.values(), missed[-1])} == {"simulated"}


def test_figures_of_a_size_are_those_of_simulate_and_run(sizing: Sizing) -> None:
    row = sizing.best
    step = moesim.simulate(row).step
    assert row.step_time_s == step.time_s
    assert row.mfu_causal == step.mfu_causal
    report = moesim.run(row, step_time_s=step.time_s)
    assert row.training_days * 86400.0 == pytest.approx(fsum(p.steps * step.time_s for p in report.phases))
    assert row.gpu_hours == pytest.approx(row.days * 24.0 * row.n_gpus)
    assert row.days > row.training_days, "stops by rule take time"
    assert row.cost_usd is not None and row.price is not None
    assert row.cost_usd == pytest.approx(row.gpu_hours * row.price.value)


def test_a_frontier_holds_what_no_size_beats_in_cost_and_days(sizing: Sizing) -> None:
    for point in sizing.points:
        beaten = any(
            other.days <= point.days and (other.cost_usd or 0.0) <= (point.cost_usd or 0.0)
            for other in sizing.points
            if other is not point
        )
        assert beaten != (point in sizing.frontier)


def test_the_causes_of_a_bend_add_up_to_what_it_loses(sizing: Sizing) -> None:
    (curve,) = sizing.curves
    assert [point.n_gpus for point in curve.points] == [8, 16, 24, 32, 48]
    for (before, after), bend in zip(pairwise(curve.points), curve.bends, strict=True):
        ideal = before.step_time_s * before.n_gpus / after.n_gpus
        assert bend.lost_s == pytest.approx(after.step_time_s - ideal)
        assert fsum(bend.by_cause_s.values()) == pytest.approx(bend.lost_s, abs=1e-6)
        assert bend.by_cause_s[bend.cause] == max(bend.by_cause_s.values())
        assert bend.lost.predicted == pytest.approx(bend.lost_s / ideal)


def test_a_weak_curve_keeps_the_batch_of_a_gpu(job: moesim.Scenario) -> None:
    (curve,) = size(job, nodes=[1, 2, 3], search="own", curve="weak", objective="time").curves
    sequences = [point.inputs.scenario["batch"]["sequences"] for point in curve.points]
    assert sequences == [48, 96, 144]
    steps = [point.step_time_s for point in curve.points]
    assert curve.bends[0].lost_s == pytest.approx(steps[1] - steps[0])


def test_sizes_by_rule_close_in_on_the_deadline(job: moesim.Scenario) -> None:
    asked = size(job, deadline_days=16.0, search="own", objective="gpus")
    (side,) = asked.sides
    assert side.misses is not None and side.keeps is not None
    assert side.misses.days > 16.0 >= side.keeps.days
    legal = [8, 16, 24, 32, 48, 96]
    assert legal.index(side.keeps.n_gpus) == legal.index(side.misses.n_gpus) + 1
    assert side.between.endswith("0 not tried") or not side.between


def test_a_deadline_that_no_listed_size_keeps_has_the_nearest_size_that_does(job: moesim.Scenario) -> None:
    asked = size(job, nodes=[1], deadline_days=16.0, search="own")
    assert asked.winners and asked.best.n_gpus > 8
    never = size(job, nodes=[1, 2], deadline_days=1e-3, search="own")
    assert not never.winners and never.nearest
    with pytest.raises(InfeasibleError, match=r"no size keeps 0\.001 days; nearest: .* GPU|nearest: \d"):
        _ = never.best


def test_a_budget_below_the_cheapest_names_the_cheapest(job: moesim.Scenario) -> None:
    asked = size(job, nodes=[1, 2], budget_usd=1.0, search="own")
    assert not asked.winners
    assert asked.nearest == (min(asked.points, key=lambda point: point.cost_usd or 0.0),)
    assert "no size keeps $1" in asked.reason()


def test_a_budget_has_the_dearest_size_within_it_and_the_next_above(job: moesim.Scenario) -> None:
    free = size(job, nodes="1..6", search="own")
    costs = {point.n_gpus: point.cost_usd or 0.0 for point in free.points}
    assert list(costs.values()) == sorted(costs.values()), costs
    (side,) = size(job, nodes="1..6", budget_usd=1.01 * costs[24], search="own").sides
    assert side.limit == "budget" and side.keeps is not None and side.misses is not None
    assert (side.keeps.n_gpus, side.misses.n_gpus) == (24, 32)
    assert {side.keeps.source, side.misses.source} == {"simulated"}


def test_spare_nodes_are_paid(job: moesim.Scenario) -> None:
    (alone,) = size(job, nodes=2, search="own").points
    spared = size(job, "run.spares={count: 1, repair: 1 h}", nodes=2, search="own")
    (point,) = spared.points
    assert alone.price is not None
    assert alone.cost_usd == pytest.approx(alone.gpu_hours * alone.price.value)
    assert point.cost_usd == pytest.approx(point.gpu_hours * 1.5 * alone.price.value)
    assert any("spare nodes too (run.spares: 1)" in note for note in spared.notes)


def test_the_energy_of_a_simulated_size_is_that_of_its_step(job: moesim.Scenario) -> None:
    (point,) = size(job, nodes=2, search="own").points
    energy = moesim.simulate(point).energy
    assert energy is not None and point.mean_board_w == energy.board_w < (point.board_w or 0.0)


def test_accelerators_come_with_their_own_node_network_profile_and_price(job: moesim.Scenario) -> None:
    asked = size(job, nodes=[1], accelerators=("h100", "mi300x"), objective="gpus")
    assert [(p.accelerator, p.node, p.n_gpus) for p in asked.points] == [
        ("h100-sxm", "hgx-h100", 8),
        ("mi300x", "mi300x-8", 8),
    ]
    assert {point.profile for point in asked.points} == {"h100-layers", "generic-roofline"}
    assert all(point.price is not None for point in asked.points)
    assert [row.accelerator for row in asked.by_accelerator] == ["h100-sxm", "mi300x"]


def test_gpus_are_whole_nodes_or_a_part_of_one(job: moesim.Scenario) -> None:
    assert at_size(job, "gb200", "cluster.gpus", 32).machine.node.n_gpus == 32
    assert at_size(job, "gb200", "cluster.gpus", 128).machine.nodes == 2
    assert at_size(job, None, "cluster.gpus", 4).machine.n_gpus == 4
    with pytest.raises(InputError, match="64 and 128"):
        at_size(job, "gb200", "cluster.gpus", 72)


def test_sizes_by_rule_begin_where_weights_and_optimizer_fit() -> None:
    home = moesim.load(HOME)
    first, second, *_ = sizes_by_rule(home)
    assert second == 2 * first
    assert first * home.machine.accelerator.hbm_bytes >= 12.0 * 671e9 > first / 2 * 80e9


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"nodes": [0]}, "0 is no size"),
        ({"nodes": "0..8"}, "0 is no size"),
        ({"nodes": []}, "empty list"),
        ({"nodes": [1], "gpus": [8]}, "not both"),
        ({"deadline_days": 0.0}, "above 0"),
        ({"deadline_days": -3.0}, "above 0"),
        ({"budget_usd": float("nan")}, "above 0"),
        ({"accelerators": ["h10"]}, "h10.*known"),
        ({"objective": "energy"}, "objective='energy' is not one of gpus, cost, time"),
        ({"curve": "stong"}, "strong"),
        ({"space": moesim.PlanSpace(variants={"seed": (1, 2)})}, "seed"),
    ],
)
def test_bad_input_is_refused_with_what_would_do(
    job: moesim.Scenario, chosen: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        size(job, **chosen)  # type: ignore[arg-type]


def test_sizes_beyond_the_networks_are_named(job: moesim.Scenario) -> None:
    asked = size(job, nodes=[1, 1_000_000], accelerators=("mi300x",), search="own", objective="gpus")
    assert [row.size for row in asked.illegal] == ["1,000,000 nodes of"]


def test_a_size_is_a_list_or_an_expression() -> None:
    assert listed_sizes("64..512:x2", "cluster.nodes") == (64, 128, 256, 512)
    assert listed_sizes([3, 1, 3], "cluster.nodes") == (1, 3)


@pytest.mark.long
def test_the_result_does_not_depend_on_the_processes(job: moesim.Scenario) -> None:
    alone, shared = (size(job, nodes=[1, 2], search="own", workers=n).to_dict() for n in (1, 2))
    assert alone == shared


@pytest.mark.long
def test_the_published_plan_of_deepseek_v3_takes_its_gpu_hours() -> None:
    asked = size(HOME, "run.failures=none", gpus=[1024, 2048], deadline_days=60.0, search="own")
    (side,) = asked.sides
    assert side.keeps is not None and side.misses is not None
    assert (side.misses.n_gpus, side.keeps.n_gpus) == (1024, 2048)
    assert side.keeps.gpu_hours == pytest.approx(2664e3, rel=0.06)
