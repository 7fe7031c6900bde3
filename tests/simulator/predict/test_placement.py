"""Automatic stages: what a block weighs, and that they are never slower than even ones."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.stages import blocks_of
from moesim.simulator.predict.placement import block_times
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario, load_scenario

TPU = load_scenario(
    {
        "model": "olmoe-1b-7b",
        "cluster": "tpu-v7-2048-slice",
        "parallel": {"pp": 8, "ep": 8, "zero_stage": 1},
        "schedule": "1f1b",
        "batch": {"sequences": 2048, "sequence_length": 4096},
    }
)


def step_s(scenario: Scenario, *changes: str) -> float:
    return run_step(scenario.overridden(*changes)).time_s


def test_small_experts_on_a_torus_are_not_slower_than_two_layers_a_stage() -> None:
    even = step_s(TPU, "stages.layers=[2,2,2,2,2,2,2,2]")
    by_compute = step_s(TPU, "stages.layers=[2,2,2,2,2,2,3,1]")  # balanced without the transfers
    assert step_s(TPU) <= even < 0.95 * by_compute


def test_memory_twice_as_fast_makes_no_step_longer() -> None:
    bandwidth = TPU.machine.node.accelerator.hbm_bandwidth.value
    faster = step_s(TPU, f"cluster.node.accelerator.hbm_bandwidth.value={2e-12 * bandwidth} TB/s")
    assert faster <= step_s(TPU)


def drawn(seed: int) -> Scenario:
    """A small scenario with what tilts the stages: experts, heads, states, links, schedules."""
    draw = Random(seed)
    pp, vpp = draw.choice([2, 4]), draw.choice([1, 2])
    schedules = ["1f1b", "zbv"] if vpp == 1 else ["interleaved-1f1b", "interleaved-1f1b-overlapped"]
    nodes, count = draw.choice([2, 4]), draw.choice([1, 2, 4])
    tp = draw.choice([1, 1, 2])
    return load_scenario(
        {
            "model": draw.choice(["olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]),
            "cluster": {"accelerator": draw.choice(["h100-sxm", "b200-sxm", "mi300x"]), "nodes": nodes},
            "parallel": {
                "pp": pp, "vpp": vpp, "tp": tp, "ep": draw.choice([2, 4]), "zero_stage": draw.choice([0, 1]),
                "sequence_parallel": tp > 1,
            },
            "schedule": draw.choice(schedules),
            "precision": "bf16",
            "batch": {"sequences": 8 * nodes // (pp * tp) * pp * count, "sequence_length": 2048},
            "variation": {"clock_cv": 0.0, "jitter_cv": 0.0},
        }
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_automatic_stages_are_not_slower_than_even_ones(seed: int) -> None:
    scenario = drawn(seed)
    automatic = run_step(scenario)
    layers = automatic.prepared.stages.layers_per_stage
    each, more = divmod(sum(layers), len(layers))
    even = [each + (stage < more) for stage in range(len(layers))]
    assert automatic.time_s <= step_s(scenario, f"stages.layers={even}") * (1 + 1e-9)


def times_of(scenario: Scenario) -> np.ndarray:
    pricer = Pricer.shared(resolve(scenario))
    return np.array(block_times(pricer, blocks_of(pricer.shape), 4))


def test_transfers_of_experts_count_where_there_are_any() -> None:
    alone = times_of(TPU.overridden("parallel.ep=1"))
    split = times_of(TPU)
    assert alone[..., 1].sum() == 0.0
    assert (split[1:-1, :2, 1] > 0).all() and split[0, :, 1].sum() == split[-1, :, 1].sum() == 0.0


def test_only_a_stated_load_tells_layers_apart() -> None:
    compute = times_of(TPU)[1:-1, :, 0].sum(axis=1)
    assert np.ptp(compute) == 0.0
    zipf = "routing.load={kind: zipf, exponent: 1.0, shuffle_per_layer: true}"
    stated = times_of(TPU.overridden(zipf))[1:-1, :, 0].sum(axis=1)
    assert np.ptp(stated) > 0.0 and stated.min() > compute[0]
