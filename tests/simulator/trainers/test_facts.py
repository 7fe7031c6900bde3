"""The facts of a plan agree with the scenario that they were taken from."""

from __future__ import annotations

import pytest

from moesim.simulator.layout.parallel import Layout, microbatches
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.rules import facts_of


@pytest.mark.parametrize("preset", ["deepseek-v3-2048xh800", "deepseek-v3-256xgb200", "llama-3-70b-64xh100"])
def test_replicas_and_microbatches_agree_with_the_layout(preset: str) -> None:
    scenario = load_scenario(preset)
    plan = facts_of(scenario)
    layout = Layout(scenario.parallel, scenario.machine.n_gpus, scenario.machine.node.n_gpus)
    assert plan.replicas == layout.dp
    assert plan.microbatches == microbatches(layout, scenario.batch.sequences)


def test_a_placement_of_experts_is_no_placement_in_order() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800")
    assert facts_of(scenario).placement_in_order
    placed = scenario.overridden("routing.eplb={redundant_experts: 32}")
    assert not facts_of(placed).placement_in_order
