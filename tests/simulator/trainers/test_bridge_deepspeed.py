"""Plans as settings of Megatron-Bridge and DeepSpeed, and what these cannot run."""

from __future__ import annotations

import ast
import json

import pytest

from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.bridge.overrides import bridge_overrides
from moesim.simulator.trainers.bridge.overrides import problems as bridge_problems
from moesim.simulator.trainers.deepspeed.configuration import deepspeed_plan
from moesim.simulator.trainers.deepspeed.configuration import problems as deepspeed_problems
from moesim.simulator.trainers.facts import facts_of

LLAMA = "llama-3-70b-64xh100"
DEEPSEEK = "deepseek-v3-256xgb200"


def test_bridge_settings_are_assignments_of_the_plan() -> None:
    text = bridge_overrides(load_scenario(DEEPSEEK, ["precision=bf16", "recompute=selective"])).text()
    values = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
    }
    scenario = load_scenario(DEEPSEEK)
    assert values["config.model.expert_model_parallel_size"] == scenario.parallel.ep
    assert values["config.train.global_batch_size"] == scenario.batch.sequences
    assert values["config.model.mtp_num_layers"] == 1
    assert values["config.model.recompute_modules"] == ["layernorm", "mla_up_proj", "moe_act"]


def test_a_model_without_mla_recomputes_no_up_projection() -> None:
    values = bridge_overrides(load_scenario(LLAMA, ["recompute=selective"])).values
    assert values["model.recompute_modules"] == ("layernorm",)


def test_bridge_shards_parameters_with_megatron_fsdp() -> None:
    overrides = ["parallel.pp=1", "schedule=1f1b", "parallel.vpp=1", "parallel.zero_stage=3"]
    values = bridge_overrides(load_scenario(LLAMA, overrides)).values
    assert values["ddp.data_parallel_sharding_strategy"] == "optim_grads_params"
    assert values["checkpoint.ckpt_format"] == "fsdp_dtensor"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["schedule=dualpipev", "parallel.vpp=1"], "schedule dualpipev"),
        (["recompute=op"], "recompute=op"),
        (["recompute=deepseek-v3"], "E5M6"),
        (["precision=fp8"], "precision.dispatch=fp8"),
    ],
)
def test_limits_of_bridge_are_named(overrides: list[str], expected: str) -> None:
    scenario = load_scenario(LLAMA, overrides)
    assert any(expected in sentence for sentence in bridge_problems(facts_of(scenario)))
    assert f"# not spelled: {bridge_problems(facts_of(scenario))[0]}" in bridge_overrides(scenario).text()


def test_deepspeed_batches_multiply() -> None:
    overrides = ["parallel.pp=1", "schedule=1f1b", "parallel.vpp=1", "parallel.cp=1", "parallel.zero_stage=2"]
    plan = deepspeed_plan(load_scenario(LLAMA, [*overrides, "recompute=full"]))
    data = json.loads(plan.text())
    replicas = 64 // 4
    product = data["train_micro_batch_size_per_gpu"] * data["gradient_accumulation_steps"] * replicas
    assert product == data["train_batch_size"] == 128
    assert data["zero_optimization"]["stage"] == 2 and data["bf16"] == {"enabled": True}
    assert plan.unspelled == ()
    assert "--no-pipeline-parallel" in plan.arguments
    assert "--deepspeed-activation-checkpointing" in plan.arguments


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        (LLAMA, [], "DeepSpeed's pipeline engine runs 1F1B only"),
        (LLAMA, [], "Ulysses"),
        (LLAMA, ["parallel.zero_stage=2"], "DeepSpeed's pipeline allows up to 1"),
        (DEEPSEEK, [], "Megatron-DeepSpeed has multi-head and grouped-query attention only"),
        (DEEPSEEK, [], "MTP modules"),
        (
            DEEPSEEK,
            ["parallel.pp=1", "schedule=1f1b", "parallel.vpp=1", "parallel.zero_stage=3"],
            "allows up to 2",
        ),
        (LLAMA, ["recompute=selective"], "recompute=selective"),
        (LLAMA, ["precision=fp8"], "FP8"),
    ],
)
def test_limits_of_deepspeed_are_named(preset: str, overrides: list[str], expected: str) -> None:
    assert any(expected in s for s in deepspeed_problems(facts_of(load_scenario(preset, overrides))))
