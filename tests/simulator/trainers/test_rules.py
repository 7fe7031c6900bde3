"""Conditions on plans, and the trainers that are made of them."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.parallel import Layout, microbatches
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.registry import TRAINERS, trainer_of
from moesim.simulator.trainers.rules import Exclusion, check_words, facts_of, holds
from moesim.simulator.trainers.trainer import description

HOME = "deepseek-v3-2048xh800"


def plan(*overrides: str) -> Scenario:
    return load_scenario(HOME, ["schedule=1f1b", "recompute=full", "precision=bf16", *overrides])


@pytest.mark.parametrize(
    ("condition", "value", "met"),
    [
        (8, 8, True),
        (1, True, False),
        (None, None, True),
        ([2, 3], 3, True),
        ([2, 3], 1, False),
        ({"not": "fp32"}, "bf16", True),
        ({"not": [1, 2]}, 2, False),
        ({"above": 1}, 2, True),
        ({"above": 1}, 1, False),
        ({"below": 3}, None, False),
        (["moe", "mlp"], ("layernorm", "mlp"), True),
        ("moe", (), False),
    ],
)
def test_conditions(condition: object, value: object, met: bool) -> None:
    assert holds(condition, value) is met  # type: ignore[arg-type]


def test_all_conditions_of_an_entry_must_hold() -> None:
    entry = Exclusion({"tp": {"above": 1}, "moe": True}, "because")
    assert entry.applies({"tp": 2, "moe": True})
    assert not entry.applies({"tp": 1, "moe": True})
    with pytest.raises(ValueError, match="beyond"):
        check_words({"beyond": 1}, "tp")


def test_every_condition_of_every_trainer_reads_a_fact_that_exists() -> None:
    known = facts_of(load_scenario(HOME)).values("megatron-lm")
    for name in TRAINERS:
        data = description(name)
        for entry in data.exclusions:
            assert set(entry.when) <= known.keys(), entry.because
            assert set(entry.versions) <= set(data.versions), entry.because
        for replacement in data.replacements:
            assert set(replacement.where) <= known.keys()


def test_versions_and_names() -> None:
    assert trainer_of("megatron").version == "0.20"
    assert trainer_of("megatron@0.14").label == "Megatron-LM 0.14"
    with pytest.raises(InputError, match=r"version '0\.7' is not known.*0\.20, 0\.14"):
        trainer_of("megatron@0.7")
    with pytest.raises(InputError, match=r"'megatorn' is not known.*megatron"):
        trainer_of("megatorn")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["schedule=dualpipe"], "1F1B and interleaved 1F1B only"),
        (["recompute=deepseek-v3"], "no such recompute policy"),
        (["recompute=op"], "no such recompute policy"),
        (["recompute=selective"], "name modules"),
        (["recompute=attention"], "core_attn"),
        (["precision=fp8", "parallel.zero_stage=0"], "distributed optimizer"),
        (["precision=fp8"], "sends tokens in BF16"),
        (["communication.sms=19"], "even number of SMs"),
        (["recompute=full", "software.cuda_graphs=[router]"], "one graph holds the whole step"),
        (["routing.eplb={redundant_experts: 64}"], "experts in order"),
        (
            ["schedule=interleaved-1f1b", "parallel.vpp=2", "batch.sequences=1024"],
            "as many micro-batches as pipeline ranks",
        ),
    ],
)
def test_what_megatron_cannot_run(overrides: list[str], reason: str) -> None:
    trainer = trainer_of("megatron")
    assert not trainer.problems_of(plan())
    assert any(reason in problem for problem in trainer.problems_of(plan(*overrides)))


def test_a_version_has_its_own_rules() -> None:
    model = ["model=qwen3-235b-a22b", "parallel={tp: 8, sequence_parallel: true, ep: 8}"]
    assert not trainer_of("megatron").problems_of(plan(*model))
    assert "key and value heads" in trainer_of("megatron@0.14").problems_of(plan(*model))[0]


def test_tensor_parallelism_is_dtensors_in_torchtitan_alone() -> None:
    split, whole = (plan(f"parallel.tp={tp}") for tp in (2, 1))
    titan, megatron = trainer_of("torchtitan"), trainer_of("megatron")
    adapted, _ = titan.adapted(split)
    assert adapted.software.dtensor and not titan.adapted(whole)[0].software.dtensor
    assert not megatron.adapted(adapted)[0].software.dtensor


def test_a_scenario_is_priced_as_the_trainer_runs_it() -> None:
    scenario = plan("precision=fp8", "parallel.tp=2", "parallel.sequence_parallel=true")
    adapted, changes = trainer_of("megatron").adapted(scenario)
    assert adapted.recipe.dispatch == "bf16" and adapted.recipe.linear == "fp8"
    assert adapted.software.loss == "compiled"
    assert adapted.software.overlap_tensor_parallel == "weight-gradient"
    assert not adapted.software.overlap_context_parallel  # cp=1: the key does not matter
    assert adapted.recipe.loss == "fp32"
    assert len(changes) == 4 and all(": " in change for change in changes)
    again, none = trainer_of("megatron").adapted(adapted)
    assert again is adapted and none == ()
    old = trainer_of("megatron@0.14").adapted(plan())[0]
    assert (old.software.loss, old.recipe.loss) == ("fused", "bf16")


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
