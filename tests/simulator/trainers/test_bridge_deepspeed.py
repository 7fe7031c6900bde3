"""Plans as settings of Megatron-Bridge and DeepSpeed, and what these cannot run."""

from __future__ import annotations

import json

import pytest

from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.bridge import bridge_overrides
from moesim.simulator.trainers.deepspeed import deepspeed_plan
from moesim.simulator.trainers.registry import TRAINERS, trainer_of

LLAMA = "llama-3-70b-64xh100"
DEEPSEEK = "deepseek-v3-256xgb200"


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
    problems = trainer_of("bridge").problems_of(scenario)
    assert any(expected in sentence for sentence in problems)
    assert f"# not spelled: {problems[0]}" in bridge_overrides(scenario).text()


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
    problems = trainer_of("deepspeed").problems_of(load_scenario(preset, overrides))
    assert any(expected in sentence for sentence in problems)


def test_deepspeed_says_experts_and_recomputation_in_arguments() -> None:
    # EP16 with full recomputation once became a JSON without either, and nothing was unspelled.
    overrides = ["parallel.pp=1", "schedule=1f1b", "parallel.vpp=1", "parallel.ep=16", "recompute=full"]
    overrides += ["communication.kernels=nccl", "parallel.tp=1", "software.overlap_tensor_parallel=none"]
    scenario = load_scenario("qwen3-235b-a22b-256xh100", overrides)
    export = trainer_of("deepspeed").arguments(scenario)
    words = " ".join(export.to_dict()["arguments"])
    assert "--moe-expert-parallel-size 16" in words and "--checkpoint-activations" in words
    assert "--moe-expert-parallel-size 16\n" in export.text()
    assert json.loads(export.text().split("<<'JSON'\n")[1].split("\nJSON")[0])["activation_checkpointing"]
    assert export.unspelled == ()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["communication.kernels=deepep-2025-04"], "all-to-all; use communication.kernels=nccl"),
        (["parallel.pp=2", "parallel.vpp=1", "schedule=1f1b"], "stages have equal layers"),
        (["stages.layers=[15, 17]"], "stages.layers=[15, 17]"),
        (["model=llama-4-scout"], "routed experts only"),
    ],
)
def test_what_deepspeed_does_otherwise_is_unspelled(overrides: list[str], expected: str) -> None:
    base = ["parallel.pp=2", "parallel.vpp=1", "schedule=1f1b"]
    scenario = load_scenario("mixtral-8x7b-64xh100", [*base, *overrides])
    assert any(expected in sentence for sentence in deepspeed_plan(scenario).unspelled)


CHANGES = {
    "parallel.ep": "4",
    "parallel.expert_tp": "2",
    "parallel.microbatch": "2",
    "parallel.zero_stage": "2",
    "parallel.sequence_parallel": "false",
    "schedule": "gpipe",
    "stages.layers": "[15, 17]",
    "recompute": "full",
    "communication.kernels": "nccl-allgather",
    "routing.capacity": "{factor: 1.2}",
    "precision": "fp8",
    "precision.moments": "bf16",
    "precision.master_weights": "bf16",
    "batch.sequence_length": "8192",
    "software.attention": "unfused",
    "software.bucket_parameters": "50000000",
    "software.cuda_graphs": "[attention]",
    "software.dropout": "true",
    "software.kernels": "eager",
    "software.loss": "chain",
    "software.overlap_tensor_parallel": "userbuffers",
    "software.router": "fused",
    "software.static_experts": "{capacity: 1.5}",
}


@pytest.mark.parametrize("trainer", ["megatron", "bridge", "torchtitan", "torchtitan@0.2.2", "deepspeed"])
def test_no_change_of_a_plan_is_lost_in_an_export(trainer: str) -> None:
    plain = ["parallel.pp=2", "parallel.vpp=1", "schedule=1f1b", "parallel.tp=2", "recompute=none"]
    plain.append("software.framework=none")
    scenario = load_scenario("mixtral-8x7b-64xh100", [*plain, "parallel.sequence_parallel=true"])

    def told(changed: Scenario) -> tuple[str, tuple[str, ...]]:
        export = trainer_of(trainer).arguments(changed)
        return export.text(), export.unspelled

    lost = []
    for key, value in CHANGES.items():
        if (trainer, key) == ("megatron", "parallel.sequence_parallel"):
            continue  # it cuts its own stages, so it prices the plan, which is not legal
        if told(scenario.overridden(f"{key}={value}")) == told(scenario):
            lost.append(key)
    assert lost == []


def test_a_hybrid_shard_group_is_said_by_every_export() -> None:
    overrides = ["parallel.pp=1", "parallel.vpp=1", "schedule=1f1b", "parallel.zero_stage=3"]
    scenario = load_scenario(LLAMA, [*overrides, "parallel.shard_group=8"])
    for trainer in TRAINERS:
        sentences = trainer_of(trainer).arguments(scenario).unspelled
        assert any(sentence.startswith("parallel.shard_group=8:") for sentence in sentences), trainer
