"""Clusters side by side for one job: the keys that change with the hardware, the prices, the reasons."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.planner.hardware import (
    KWH,
    PAYMENTS,
    ClusterPlan,
    even_nodes,
    gpus_for,
    hardware_comparison,
    narrow_space,
    on_cluster,
    paid,
    plan_on,
    price_under,
    priced_scenario,
    whole_nodes,
)
from moesim.simulator.scenario import Scenario

HOME = "deepseek-v3-2048xh800"
CLUSTERS = ("h100-1024", "b200-1024", "tpu-v5p-2048-slice")


@pytest.fixture(scope="module")
def job() -> Scenario:
    """OLMoE on 16 H100: a search of it takes a second."""
    return Scenario.model_validate(
        {
            "model": "olmoe-1b-7b",
            "cluster": "h100-1024",
            "parallel": {"tp": 1, "pp": 1, "ep": 8, "cp": 1, "microbatch": 1, "zero_stage": 1},
            "batch": {"sequences": 64, "sequence_length": 4096},
            "run": {"tokens": 1e12},
        }
    ).replace(**{"cluster.nodes": 2})


@pytest.fixture(scope="module")
def plans(job: Scenario) -> list[ClusterPlan]:
    return [plan_on(job, name, 16, search="narrow") for name in CLUSTERS]


def test_another_cluster_brings_profile_kernels_and_recipe_that_fit_it() -> None:
    home = moesim.load(HOME)
    there = on_cluster(home, "mi300x-2048", 1024)
    assert there.machine.n_gpus == 1024
    assert there.profile != home.profile and there.communication.kernels == "nccl"
    assert there.model == home.model and there.batch == home.batch and there.run == home.run
    assert on_cluster(home, "a100-512").recipe.linear == "bf16"
    assert on_cluster(home, home.machine.name) == home, "the scenario's own cluster keeps what it states"


def test_a_network_that_is_too_small_gives_way_to_one_that_joins_the_nodes() -> None:
    there = on_cluster(moesim.load(HOME), "h100-1024", 16384)
    assert load_cluster("h100-1024").network.name != there.machine.network.name
    assert there.machine.n_gpus == 16384
    with pytest.raises(InputError, match="cannot be joined"):
        on_cluster(moesim.load(HOME), "m4-max-single", 16)


def test_gpus_are_whole_nodes() -> None:
    hgx = load_cluster("h100-1024")
    assert whole_nodes(hgx.node, 64) == 8
    with pytest.raises(InputError, match="56 and 64") as caught:
        whole_nodes(hgx.node, 60)
    assert list(caught.value.nearest) == [56, 64]
    assert [even_nodes(n) for n in (1, 2, 9, 11, 15, 100, 255, 256)] == [1, 2, 8, 10, 14, 96, 224, 256]


def test_an_unknown_cluster_is_named() -> None:
    with pytest.raises(InputError, match=r"not shipped.*h100-1024"):
        on_cluster(moesim.load(HOME), "h100-1023")


def test_every_payment_has_a_source_or_says_what_is_missing() -> None:
    h100 = load_cluster("h100-1024")
    found = {}
    for payment in PAYMENTS:
        price = price_under(h100, payment)
        assert price is not None and price.source and price.date
        found[payment] = price.value
    assert found["as stated"] == 2.5
    assert found["reserved"] == 2.35, "the latest offer of the term"
    with pytest.raises(InputError, match="no spot price of h800-sxm is known; offers: assumed, reserved"):
        price_under(load_cluster("deepseek-h800-2048"), "spot")
    with pytest.raises(InputError, match="no purchase of b200-sxm"):
        price_under(load_cluster("b200-1024"), "purchase")


def test_a_rented_rack_pays_its_spare_gpus() -> None:
    rack = load_cluster("gb200-nvl72-2048")
    price = price_under(rack, "reserved")
    assert price is not None
    assert price.value == pytest.approx(6.0 * 72 / 64)


def test_the_price_of_a_payment_is_what_an_hour_of_a_purchase_costs() -> None:
    home = moesim.load(HOME)
    bought = home.replace(**{"run.price": {"buy": "h800-bought"}})
    report = moesim.run(bought, step_time_s=20.0, uncertainty=False)
    assert report.cost_usd is not None
    hours = report.days.predicted * 24 * home.machine.n_gpus
    expected = report.cost_usd.predicted / hours
    assert paid(home, "purchase").machine.usd_per_gpu_hour == pytest.approx(expected)


def test_the_narrow_space_holds_the_scenarios_own_values(job: Scenario) -> None:
    space = narrow_space(job)
    assert space.sms == (job.communication.sms,)
    assert space.zero_stage == (1,)
    assert space.schedule is not None and "interleaved-1f1b" not in space.schedule


def test_a_budget_buys_fewer_of_the_dearer_gpus(job: Scenario) -> None:
    assert gpus_for(job, "h100-1024", 16 * 2.5, "as stated") == 16
    assert gpus_for(job, "b200-1024", 16 * 2.5, "as stated") == 8
    with pytest.raises(InputError, match="one node costs"):
        gpus_for(job, "b200-1024", 39.0, "as stated")
    with pytest.raises(InputError, match="no price of tpu-v5p"):
        gpus_for(job, "tpu-v5p-2048-slice", 1e6, "as stated")


@pytest.mark.long
def test_each_row_is_the_prediction_of_its_best_plan(job: Scenario, plans: list[ClusterPlan]) -> None:
    table = hardware_comparison(job, plans)
    for row, found in zip(table.clusters[:2], plans, strict=False):
        assert found.scenario is not None
        expected = moesim.simulate(found.scenario, uncertainty=True)
        assert expected.uncertainty is not None
        assert row.figures["step_time_s"] == expected.uncertainty.bands["step_time_s"]
        cost = row.figures["cost_usd"]
        assert cost.predicted == expected.run.cost_usd
        assert row.figures["usd_per_billion_tokens"].predicted == pytest.approx(cost.predicted / 1e3)
        assert row.figures["tokens_per_usd"].predicted * cost.predicted == pytest.approx(1e12)
        kwh = expected.run.gpu_hours * found.scenario.machine.accelerator.tdp_w / 1e3 / 1e3
        site = found.scenario.machine.energy
        assert row.figures[KWH].predicted == pytest.approx(kwh * (site.pue.value if site else 1.0))
        assert row.confidence == expected.confidence and row.profile == expected.profile


def test_the_best_plan_is_no_worse_than_the_scenarios_own(job: Scenario, plans: list[ClusterPlan]) -> None:
    assert plans[0].result is not None
    assert plans[0].result.step.time_s <= moesim.simulate(job).step.time_s


def test_a_difference_has_the_interval_of_shared_draws(job: Scenario, plans: list[ClusterPlan]) -> None:
    first, second, _ = hardware_comparison(job, plans).clusters
    assert first.differences == {}
    difference = second.differences["usd_per_billion_tokens"]
    ends = [row.figures["usd_per_billion_tokens"] for row in (first, second)]
    assert difference.predicted == pytest.approx(ends[1].predicted - ends[0].predicted)
    apart = (ends[1].p90 - ends[1].p10) + (ends[0].p90 - ends[0].p10)
    assert 0.0 < difference.p90 - difference.p10 < apart


def test_a_cluster_that_cannot_run_it_has_a_reason_and_no_numbers(
    job: Scenario, plans: list[ClusterPlan]
) -> None:
    row = hardware_comparison(job, plans).clusters[2]
    assert "a node has 2,048" in row.problem and row.plan is None and row.figures == {}
    assert priced_scenario(plans[2], "as stated") is None


def test_other_terms_change_costs_and_nothing_else(job: Scenario, plans: list[ClusterPlan]) -> None:
    now, then = (hardware_comparison(job, plans, way) for way in ("as stated", "purchase"))
    assert then.clusters[0].figures["step_time_s"] == now.clusters[0].figures["step_time_s"]
    assert then.clusters[0].figures["cost_usd"] != now.clusters[0].figures["cost_usd"]
    assert "cost_usd" not in then.clusters[1].figures
    assert "no purchase of b200-sxm" in then.clusters[1].price_problem
    priced = priced_scenario(plans[0], "purchase")
    assert priced is not None
    assert priced.machine.usd_per_gpu_hour == then.clusters[0].usd_per_gpu_hour


def test_a_model_too_large_for_a_cluster_is_a_row_with_the_counts(job: Scenario) -> None:
    large = job.replace(model="deepseek-v3", **{"parallel.ep": 8})
    found = plan_on(large, "h100-1024", 8, search="narrow")
    assert found.result is None
    assert "no plan of the space is legal and fits" in found.problem


def test_the_public_function_reports_its_progress_and_refuses_what_is_no_comparison(job: Scenario) -> None:
    heard: list[float] = []
    table = moesim.compare_hardware(
        job, ["h100-1024", "h200-1024"], gpus={"h200-1024": 8}, search="narrow",
        progress=lambda share, text: heard.append(share),
    )  # fmt: skip
    assert [row.n_gpus for row in table.clusters] == [16, 8]
    assert heard == sorted(heard) and heard[-1] == 1.0
    assert table.rows()[1]["step_time_s"] == table.clusters[1].figures["step_time_s"].predicted
    for names in (["h100-1024"], ["h100-1024"] * 2):
        with pytest.raises(InputError, match="2 to 6 different clusters"):
            moesim.compare_hardware(job, names)
    with pytest.raises(InputError, match="not both"):
        moesim.compare_hardware(job, ["h100-1024", "h200-1024"], gpus=8, usd_per_hour=9.0)
