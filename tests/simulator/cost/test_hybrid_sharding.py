"""Hybrid FSDP: gathers stay inside a group, and gradients cross groups once a step."""

from __future__ import annotations

import pytest

from moesim.simulator.cost.data_parallel import sharded_block
from moesim.simulator.cost.end_of_step import rank_step_end
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.memory.gpu import RankChunks
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import build

DENSE = ("model=llama-3-8b", "schedule=1f1b", "recompute=none", "batch.sequences=2048")


def pricer(group: str, *more: str) -> Pricer:
    plan = f"parallel={{tp: 1, microbatch: 1, zero_stage: 3, shard_group: {group}}}"
    scenario = load_scenario("deepseek-v3-2048xh800", [*DENSE, plan, *more])
    return Pricer(ResolvedJob(scenario, scenario.shape, scenario.machine, scenario.calibration))


def end_of_step(own: Pricer) -> tuple[float, float]:
    cost = rank_step_end(own, RankChunks((("dense",) * 32,)), build("1f1b", 1, 1))
    return cost.reduce_s, cost.gather_s


def test_a_group_on_one_node_leaves_the_network_alone() -> None:
    whole, inside = (sharded_block(pricer(group), "dense").transfers for group in ("null", "8"))
    assert all(cost.nic_bytes > 0.0 for cost in whole.values())
    assert all(cost.nic_bytes == 0.0 for cost in inside.values())
    assert inside["gather F"].payload_s < whole["gather F"].payload_s


def test_groups_reduce_over_each_other_once_a_step() -> None:
    assert end_of_step(pricer("null")) == (0.0, 0.0)
    reduce_s, gather_s = end_of_step(pricer("8"))
    assert reduce_s > gather_s > 0.0  # FP32 gradients, BF16 parameters
    held = "parallel.shard_optimizer_over_groups=false", "software.gradient_sync=last-microbatch"
    all_reduce_s, nothing = end_of_step(pricer("8", *held))
    assert nothing == 0.0
    assert all_reduce_s > reduce_s
    hidden = end_of_step(pricer("8", "software.overlap_data_parallel=true"))
    assert hidden[0] < reduce_s


def test_hsdp_reduces_over_its_groups_in_every_backward() -> None:
    fsdp2 = pricer("8", "parallel.shard_optimizer_over_groups=false")
    assert end_of_step(fsdp2) == (0.0, 0.0)
    every, megatron = (sharded_block(own, "dense").transfers["scatter W"] for own in (fsdp2, pricer("8")))
    assert megatron.nic_bytes == 0.0  # inside the group of a node
    dense, _ = fsdp2.block_parameters("dense")
    shard, groups = dense / 8 * 4, 2048 // 8  # an FP32 shard, all-reduced over the groups
    assert every.nic_bytes == pytest.approx(2 * shard * (groups - 1) / groups)
    assert every.payload_s > megatron.payload_s


def test_few_sms_cost_less_compute_beside_a_collective() -> None:
    measured, few = pricer("8"), pricer("8", "communication.library_sms=6")
    assert few.lost_beside_library < measured.lost_beside_library == measured.profile.lost_beside_nccl.value
