"""A scenario on another accelerator: what only the old one has is left to the rules, in one step."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesim
from moesim.hwmodels.cluster import list_clusters, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.failure import load_storage
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.hardware import on_cluster
from moesim.simulator.run.bill import rates
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.inputs import inputs_of

HOME = "deepseek-v3-2048xh800"


@pytest.mark.parametrize("name", ["h200-1024", "gb200-nvl72-2048", "mi300x-2048"])
def test_the_home_case_is_simulated_on_another_cluster_in_one_step(name: str) -> None:
    there = moesim.load(HOME, f"cluster={name}")
    assert moesim.check(there).accelerator == load_cluster(name).accelerator.title
    assert "profile" in inputs_of(there).left_to_rules
    assert there == moesim.load(HOME).replace(cluster=name) == on_cluster(moesim.load(HOME), name)


@pytest.mark.parametrize("preset", [HOME, "mixtral-8x7b-64xh100", "llama-3-70b-64xh100"])
def test_presets_of_every_kind_of_model_fit_every_shipped_cluster(preset: str) -> None:
    scenario = moesim.load(preset)
    for name in list_clusters():
        if "bf16" in load_cluster(name).accelerator.peak:
            resolve(scenario.overridden(f"cluster={name}"))


def test_what_was_more_than_the_choice_of_a_rule_stays_where_it_is_possible() -> None:
    own = moesim.load(HOME, "communication.sms=8", "variation.clock_cv=0", "precision=bf16")
    there = own.overridden("cluster=gb200-nvl72-2048")
    assert (there.communication.sms, there.variation.clock_cv.value, there.precision) == (8, 0.0, "bf16")
    assert there.communication.kernels == "hybridep", "DeepEP does not serve 72 GPUs"
    assert own.overridden("cluster=tpu-v5p-2048-slice").communication.sms == 0
    assert moesim.load(HOME, "cluster=a100-512").precision == "bf16", "A100 has no FP8"
    assert moesim.load(HOME, "cluster=deepseek-h800-2048-mrft").profile == "h800-trace", (
        "the same accelerator"
    )


def test_what_is_stated_with_the_move_stays_and_is_refused_all_at_once() -> None:
    texts = ("cluster=mi300x-2048", "profile=h800-trace", "communication.kernels=deepep-2025-02")
    with pytest.raises(InputError) as caught:
        resolve(moesim.load(HOME, *texts, "communication.sms=400"))
    message = str(caught.value)
    assert message.startswith("3 keys do not fit mi300x: (1) profile=h800-trace was taken on h800-sxm")
    assert (
        "(2) communication.sms=400 leaves no SM" in message and "(3) communication.kernels=deepep" in message
    )
    remedy = "--set profile=null --set communication.sms=null --set communication.kernels=null"
    assert message.endswith(remedy)
    mended = moesim.load(HOME, *texts, *(text for text in remedy.split() if text != "--set"))
    assert resolve(mended).profile.name in message


def test_a_single_illegal_key_keeps_its_own_error() -> None:
    with pytest.raises(InputError, match=r"^profile=h200-measured was taken on h200-sxm") as caught:
        resolve(moesim.load(HOME, "profile=h200-measured"))
    assert caught.value.key == "profile"


def test_a_fleet_of_other_accelerators_leaves_the_profile_to_each_pool() -> None:
    pools = "fleet={pools: [{cluster: h100-1024}, {cluster: h200-1024}]}"
    there = moesim.load(HOME, pools)
    assert {profile.name for profile in there.calibrations}.isdisjoint({"h800-trace"})


OWN_PRICE = "cluster.price_per_gpu_hour=$3/h"


def price_source(scenario: Scenario) -> str:
    price = scenario.machine.price_per_gpu_hour
    assert price is not None
    return price.source


@pytest.mark.parametrize(
    "scenario",
    [
        lambda: moesim.load(HOME, OWN_PRICE),
        lambda: moesim.load(HOME).overridden(OWN_PRICE),
        lambda: moesim.load(HOME).replace(cluster={"price_per_gpu_hour": "$3/h"}),
    ],
)
def test_a_price_of_ones_own_is_not_credited_to_the_preset(scenario: object) -> None:
    found = scenario()  # type: ignore[operator]
    assert price_source(found) == "stated by you"
    assert (
        rates(found.machine, None, 0).described == "terms not stated: rented at $3/h (undated, stated by you)"
    )
    assert "arXiv" in price_source(moesim.load(HOME))


def test_an_override_leaves_the_sources_of_everything_else() -> None:
    plain, changed = moesim.load(HOME), moesim.load(HOME, OWN_PRICE, "routing.expert_load_cv=0.1")
    assert changed.routing.expert_load_cv.source == "stated by you"
    assert changed.machine.accelerator == plain.machine.accelerator
    assert changed.variation == plain.variation
    sourced = "{value: $3/h, kind: published, source: a quote, date: 2026-05}"
    assert price_source(moesim.load(HOME, f"cluster.price_per_gpu_hour={sourced}")) == "a quote"


def test_a_figure_below_an_overridden_section_is_the_users_too() -> None:
    found = moesim.load(
        HOME,
        "run.checkpoint={interval: 1 h, storage: llama3-tectonic}",
        "run.spares={count: 2, repair: 3 days}",
    )
    assert found.run.spares is not None and found.run.spares.repair.source == "stated by you"
    assert found.run.checkpoint is not None
    assert found.run.checkpoint.storage == load_storage("llama3-tectonic")


def test_what_stands_in_a_file_stays_stated_in_the_file(tmp_path: Path) -> None:
    text = moesim.load(HOME).model_dump_json(exclude_none=True)
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert price_source(load_scenario(str(path), ["parallel.ep=32"])) == price_source(moesim.load(HOME))


def test_a_part_of_a_section_that_is_stated_with_the_move_is_refused_and_not_dropped() -> None:
    moved = moesim.load("mixtral-8x7b-64xh100", "cluster=h200-8", "precision.linear=fp4")
    with pytest.raises(InputError, match=r"precision.linear=fp4: the tensor cores of h200-sxm do not"):
        resolve(moved)
