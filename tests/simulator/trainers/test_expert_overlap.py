"""Expert overlap out of a scenario and in again, by trainer, and what trainers refuse beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesim
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.bridge import bridge_overrides
from moesim.simulator.trainers.export import VARIABLES
from moesim.simulator.trainers.megatron.arguments import megatron_arguments
from moesim.simulator.trainers.registry import trainer_of

BASE = "mixtral-8x7b-64xh100"


def overlapped(*overrides: str) -> Scenario:
    plan = ["parallel={pp: 4, vpp: 2, ep: 8, zero_stage: 1}", "schedule=interleaved-1f1b-overlapped"]
    fixed = ["precision=bf16", "recompute=none", "stages.layers=[4,4,4,4,4,4,4,4]"]
    return trainer_of("megatron").adapted(load_scenario(BASE, [*plan, *fixed, *overrides]))[0]


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("order", ["schedule", "megatron-early-attention"])
def test_overlap_survives_the_round_trip(tmp_path: Path, delay: bool, order: str) -> None:
    more = [f"communication.delay_weight_gradients={delay}".lower(), f"communication.overlap={order}"]
    scenario = overlapped(*more)
    export = megatron_arguments(scenario)
    assert export.unspelled == () and export.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert ("--delay-wgrad-compute" in export.arguments) == delay
    script = tmp_path / "run.sh"
    launch = 'torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py "${TRAINING_ARGS[@]}"\n'
    script.write_text(export.text() + launch)
    again = moesim.import_launch(script, BASE, environment=dict.fromkeys(VARIABLES, "1")).scenario
    assert again.schedule == scenario.schedule and again.communication == scenario.communication


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("recompute=full", "no full recompute"),
        ("recompute=[moe]", "does not repeat experts"),
        ("communication.kernels=nccl-allgather", "alltoall and flex only"),
        ("software.cuda_graphs=[experts]", "no CUDA graphs over the experts"),
        ("parallel.zero_stage=2", "no Megatron-FSDP"),
        ("batch.sequences=32", "as many micro-batches"),
    ],
)
def test_what_expert_overlap_does_not_take_is_said(override: str, reason: str) -> None:
    assert any(reason in problem for problem in trainer_of("megatron").problems_of(overlapped(override)))


def test_bridge_sets_it_in_the_section_of_its_recipes() -> None:
    overrides = bridge_overrides(overlapped("communication.delay_weight_gradients=false"))
    assert overrides.values["comm_overlap.overlap_moe_expert_parallel_comm"] is True
    assert overrides.values["comm_overlap.delay_wgrad_compute"] is False
    beside = bridge_overrides(
        overlapped("schedule=interleaved-1f1b", "communication.overlap_shared_experts=true")
    )
    assert beside.values["model.moe_shared_expert_overlap"] is True
    refused = trainer_of("bridge").problems_of(overlapped("recompute=full"))
    assert any("does not repeat experts" in problem for problem in refused)


def test_an_older_release_says_that_it_has_one_order_only() -> None:
    early = overlapped("communication.overlap=megatron-early-attention")
    assert any("use megatron" in text for text in megatron_arguments(early, "0.14").unspelled)
