"""Overlaps that a plan, a model or a schedule does not allow are refused with the nearest legal choice."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.plan_checks import check_overlaps
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules import build

HOME = "deepseek-v3-2048xh800"
DENSE = ("model=llama-3-8b", "schedule=1f1b", "recompute=none")
PAIRS = ("schedule=interleaved-1f1b-overlapped", "recompute=selective")
LATENT = ("software.overlap_tensor_parallel=userbuffers", "schedule=1f1b")
CUT = (*DENSE, "software.overlap_tensor_parallel=async")
BUCKETS = (*DENSE, "software.data_parallel_buckets=megatron")


def checked(*overrides: str) -> None:
    scenario: Scenario = load_scenario(HOME, overrides)
    plan = scenario.parallel
    schedule = build(scenario.schedule, plan.pp, 2 * plan.pp * plan.vpp, plan.vpp)
    check_overlaps(scenario, scenario.shape, schedule, gpus_per_node=8)


def plan(**degrees: object) -> str:
    return "parallel={" + ", ".join(f"{key}: {value}" for key, value in degrees.items()) + "}"


@pytest.mark.parametrize(
    ("overrides", "key", "nearest"),
    [
        ((*CUT, plan(tp=4)), "parallel.sequence_parallel", True),
        (
            (*CUT, plan(tp=16, sequence_parallel="true")),
            "software.overlap_tensor_parallel",
            "weight-gradient",
        ),
        (
            (*LATENT, plan(tp=2, ep=8, sequence_parallel="true")),
            "software.overlap_tensor_parallel",
            "weight-gradient",
        ),
        (
            (*DENSE, plan(tp=1), "precision={linear: bf16, tensor_gather: fp8}"),
            "precision.tensor_gather",
            "bf16",
        ),
        ((*PAIRS, plan(pp=2, vpp=2)), "schedule", "interleaved-1f1b"),
        ((*PAIRS, plan(pp=1)), "schedule", "1f1b"),
        ((*PAIRS, "model=llama-3-8b", plan(pp=2, vpp=2)), "schedule", "interleaved-1f1b"),
        ((*PAIRS, plan(pp=2, ep=8)), "parallel.vpp", 2),
        ((*PAIRS, plan(pp=2, vpp=2, ep=8), "recompute=full"), "recompute", "selective"),
        ((*PAIRS, plan(pp=2, vpp=2, ep=8), "recompute=[layernorm, moe]"), "recompute", "selective"),
        (("software.data_parallel_buckets=megatron",), "software.data_parallel_buckets", "layer"),
        (
            (*DENSE, plan(pp=2), "software.overlap_optimizer=true"),
            "software.data_parallel_buckets",
            "megatron",
        ),
        ((*BUCKETS, plan(pp=2), "software.overlap_optimizer=true"), "parallel.vpp", 2),
    ],
)
def test_an_overlap_that_cannot_run_is_refused_with_the_nearest_choice(
    overrides: tuple[str, ...], key: str, nearest: object
) -> None:
    with pytest.raises(InputError) as caught:
        checked(*overrides)
    assert caught.value.key == key
    assert caught.value.nearest == (nearest,)


@pytest.mark.parametrize(
    "overrides",
    [
        (*CUT, plan(tp=8, sequence_parallel="true")),
        (*CUT, plan(tp=1)),
        (*PAIRS, plan(pp=2, vpp=2, ep=8)),
        (*PAIRS, plan(pp=1, ep=8)),
        (*BUCKETS, plan(pp=2)),
    ],
)
def test_overlaps_that_frameworks_run_pass(overrides: tuple[str, ...]) -> None:
    checked(*overrides)
