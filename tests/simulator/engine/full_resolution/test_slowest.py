"""The slowest of the GPUs that meet: inside a layer, and at the end of the step."""

from __future__ import annotations

import pytest

from moesim.simulator.predict.step import prepare, run_step
from moesim.simulator.scenario import Scenario, load_scenario

CLUSTER = "cluster={node: hgx-h800, nodes: 4, network: mpft-ib-400g, name: 32xh800, price_per_gpu_hour: $2/h}"
DENSE = [
    CLUSTER, "model=llama-3-8b", "precision=bf16", "schedule=1f1b", "stages={}", "communication.sms=0",
    "recompute=selective", "routing.gate=model", "batch.sequences=32",
]  # fmt: skip
GROUPS = [
    CLUSTER, "parallel={tp: 1, pp: 2, ep: 4, cp: 1, microbatch: 1, zero_stage: 1}", "schedule=1f1b",
    "stages.blocks=[embedding moe, moe head]", "batch.sequences=64",
]  # fmt: skip
EVEN = "variation={clock_cv: 0, jitter_cv: 0}"


def scenario(*overrides: str) -> Scenario:
    return load_scenario("deepseek-v3-2048xh800", list(overrides))


def parallel(tp: int, pp: int) -> str:
    return f"parallel={{tp: {tp}, pp: {pp}, ep: 1, microbatch: 1, sequence_parallel: {str(tp > 1).lower()}}}"


@pytest.mark.parametrize("tp", [1, 4])
def test_a_replica_is_as_slow_as_its_slowest_gpu_in_both_resolutions(tp: int) -> None:
    plan = [*DENSE, parallel(tp, 2)]
    folded = run_step(scenario(*plan)).time_s
    assert folded == run_step(scenario(*plan, "resolution=full")).time_s
    assert folded > run_step(scenario(*plan, EVEN)).time_s


def test_members_stand_for_the_gpus_that_meet_in_a_layer() -> None:
    """Sixteen GPUs a rank: with TP 4 there are four replicas, each at the largest of four draws."""
    one, four = (prepare(scenario(*DENSE, parallel(tp, 2))).program.variation for tp in (1, 4))
    assert one.clock.shape == (2, 16) and four.clock.shape == (2, 4)
    assert (four.clock == one.clock.reshape(2, 4, 4).max(axis=2)).all()
    assert four.stands_for == 4 and one.stands_for == 1


@pytest.mark.parametrize("seed", [0, 3])
def test_folded_resolution_simulates_the_slowest_group(seed: int) -> None:
    plan = scenario(*GROUPS, f"seed={seed}", "routing.expert_load_cv=0", "variation.jitter_cv=0")
    folded, full = run_step(plan), run_step(plan.overridden("resolution=full"))
    ends = [execution.last_ns for execution in full.executions]
    assert len(ends) == 4
    assert folded.prepared.program.group == ends.index(max(ends)) > 0
    assert folded.time_s == full.time_s


def test_replicas_beyond_those_simulated_count_with_their_slowest() -> None:
    wide = "cluster={node: hgx-h800, nodes: 128, network: mpft-ib-400g, name: wide}"
    sized = [*DENSE, wide, "batch.sequences=1024", "stages.blocks=[embedding dense head]"]
    clock = prepare(scenario(*sized, parallel(1, 1))).program.variation.clock
    assert clock.shape == (1, 256)
    alone = [*sized[:-2], "batch.sequences=256", sized[-1]]
    quarter = "cluster={node: hgx-h800, nodes: 32, network: mpft-ib-400g, name: quarter}"
    first = prepare(scenario(*alone, quarter, parallel(1, 1))).program.variation.clock
    assert (clock[:, :-1] == first[:, :-1]).all()
    assert clock.max() >= first.max()
