"""What sharding gradients costs: bytes in every backward, and never a faster step."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.planner.estimate import estimate
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

SMALL = (
    "model=qwen3-30b-a3b", "precision=bf16", "profile=generic-roofline", "communication.kernels=nccl",
    "cluster={node: hgx-h800, nodes: 4, network: mpft-ib-400g}", "recompute=full",
    "batch={sequences: 128, sequence_length: 2048}",
)  # fmt: skip
EVEN = ("routing.expert_load_cv=0", "variation={clock_cv: 0, jitter_cv: 0}")
PAIRED = ("parallel={pp: 2, ep: 8}", "schedule=dualpipe", "communication.kernels=deepep-2025-02")
PLANS = {
    "replicas alone": ("parallel={ep: 1}", "model=llama-3-8b", "schedule=1f1b"),
    "experts": ("parallel={ep: 8}", "schedule=1f1b"),
    "pipeline": ("parallel={pp: 2, ep: 8}", "schedule=1f1b"),
    "split backward": ("parallel={pp: 2, ep: 8}", "schedule=zb-h1"),
    "pairs": PAIRED,
    "one micro-batch": ("parallel={ep: 8}", "schedule=1f1b", "batch.sequences=32"),
    "two micro-batches": ("parallel={ep: 8}", "schedule=1f1b", "batch.sequences=64"),
    "FSDP2": ("parallel={ep: 8}", "schedule=1f1b", "software.parameters_copied=true"),
}
PLANS_AND_OVERLAPS = [*((name, "true") for name in PLANS), ("experts", "false"), ("pipeline", "false")]


def job(*overrides: str) -> Scenario:
    return load_scenario("deepseek-v3-2048xh800", [*SMALL, *overrides])


@pytest.mark.parametrize(("name", "overlap"), PLANS_AND_OVERLAPS)
def test_a_higher_stage_is_never_faster(name: str, overlap: str) -> None:
    """Stages 1 to 3 move ever more bytes at one placement. (ZeRO-0 updates more parameters than ZeRO-1.)"""
    plan = (*PLANS[name], f"software.overlap_data_parallel={overlap}")
    # Without the overlap ZeRO-3 would be compared with exposed collectives, and it always hides its own.
    stages = (1, 2) if name == "pairs" or overlap == "false" else (1, 2, 3)
    seconds = [moesim.simulate(job(*plan, f"parallel.zero_stage={zero}")).step.time_s for zero in stages]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", ["experts", "pipeline", "split backward", "pairs"])
def test_every_microbatch_puts_its_gradients_on_the_links(name: str) -> None:
    prepared = prepare(job(*PLANS[name], "parallel.zero_stage=2"))
    execution = engine_of().execute(prepared.programs)[0]
    program, pricer, blocks = execution.program, prepared.pricer, prepared.stages.stages
    scattered = [
        task
        for steps in program.ranks
        for step in steps
        for task in step.code.tasks
        if task.phase == "scatter W"
    ]
    count = prepared.schedule.microbatches
    assert count > 1
    assert len(scattered) == count * sum(map(len, blocks))  # every block, in every backward
    nic_bytes = sum(task.transfer.cost.nic_bytes for task in scattered if task.transfer)
    if name == "experts":  # by hand: FP32, rings of 32 ranks with 8 on a node, and of 4 nodes for experts
        held = [pricer.block_parameters(block.kind) for stage in blocks for block in stage]
        by_hand = 4 * sum(dense * 31 / 32 / 8 + expert * 3 / 4 for dense, expert in held)
        assert nic_bytes == pytest.approx(count * by_hand)
    before = engine_of().execute(prepare(job(*PLANS[name], "parallel.zero_stage=1")).programs)[0]
    gained = execution.carried_bytes.sum() - before.carried_bytes.sum()
    assert gained >= nic_bytes * (1.0 - 1e-6)
    assert execution.end_ns / 1e9 >= nic_bytes / len(program.ranks) / pricer.cluster.nic_bytes_per_s


@pytest.mark.parametrize(("name", "overlap"), PLANS_AND_OVERLAPS)
def test_closed_form_and_engine_agree_on_sharded_gradients(name: str, overlap: str) -> None:
    own = job(*PLANS[name], *EVEN, "parallel.zero_stage=2", f"software.overlap_data_parallel={overlap}")
    simulated, estimated = moesim.simulate(own), estimate(own)
    assert estimated.step_time_s == pytest.approx(simulated.step.time_s, rel=0.02)
    assert estimated.lower_bound_s <= simulated.step.time_s * (1.0 + 1e-6)  # the engine rounds to ns
    assert estimated.memory.total_bytes == pytest.approx(simulated.memory.total_bytes)


def test_whole_gradients_are_reduced_once_a_step() -> None:
    """With deferred reductions ZeRO-2 is ZeRO-1 in time and in gradients, and ZeRO-3 keeps its gathers."""
    deferred = (*PLANS["experts"], "software.gradient_sync=last-microbatch")
    one = moesim.simulate(job(*PLANS["experts"], "parallel.zero_stage=1"))
    two = moesim.simulate(job(*deferred, "parallel.zero_stage=2"))
    assert two.step.time_s == one.step.time_s
    assert two.memory.by_kind_bytes["gradients"] == one.memory.by_kind_bytes["gradients"]
    three, deferred3 = (
        moesim.simulate(job(*plan, "parallel.zero_stage=3")) for plan in (PLANS["experts"], deferred)
    )
    assert deferred3.step.time_s < three.step.time_s
    assert deferred3.memory.by_kind_bytes["gradients"] == one.memory.by_kind_bytes["gradients"]


def test_a_contradiction_is_bad_input() -> None:
    with pytest.raises(InputError, match="gradient_sync"):
        moesim.simulate(job(*PLANS["experts"], "software.gradient_sync=every-microbatch"))
