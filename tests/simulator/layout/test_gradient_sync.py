"""When gradients are reduced: the rule for every plan, and keys that contradict it."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.gradient_sync import GradientSync, check_gradient_sync
from moesim.simulator.scenario.parallel import ParallelPlan


@pytest.mark.parametrize(
    ("plan", "software", "in_backward"),
    [
        ({"zero_stage": 0}, {}, False),
        ({"zero_stage": 1}, {}, False),  # Megatron core's distributed optimizer, DeepSpeed's stage 1
        ({"zero_stage": 2}, {}, True),  # DeepSpeed's stage 2, Megatron-FSDP with optim_grads
        ({"zero_stage": 3}, {}, True),
        ({"zero_stage": 2, "pp": 4}, {}, True),
        ({"zero_stage": 3}, {"parameters_copied": True}, True),  # FSDP2
        ({"zero_stage": 3, "pp": 4}, {"parameters_copied": True}, False),  # FSDP2 under torch's pipelines
        ({"zero_stage": 3}, {"gradient_sync": "last-microbatch"}, False),  # no_sync
    ],
)
def test_gradients_are_reduced_as_the_framework_does(
    plan: dict[str, object], software: dict[str, object], in_backward: bool
) -> None:
    sync = GradientSync.of(ParallelPlan.model_validate(plan), Software.model_validate(software), 16)
    assert sync.in_backward is in_backward
    assert sync.inside_step is (in_backward or plan["zero_stage"] == 3)


def test_hsdp_crosses_its_groups_in_every_backward_and_megatron_once_a_step() -> None:
    plan = ParallelPlan(zero_stage=3, shard_group=8)
    assert not GradientSync.of(plan, Software(), 16).groups_in_backward
    hsdp = plan.model_copy(update={"shard_optimizer_over_groups": False})
    assert GradientSync.of(hsdp, Software(), 16).groups_in_backward
    assert not GradientSync.of(hsdp, Software(gradient_sync="last-microbatch"), 16).groups_in_backward


def test_scatters_hide_where_data_parallel_collectives_overlap() -> None:
    two, three = ParallelPlan(zero_stage=2), ParallelPlan(zero_stage=3)
    assert not GradientSync.of(two, Software(), 16).hidden
    assert GradientSync.of(two, Software(overlap_data_parallel=True), 16).hidden
    assert GradientSync.of(three, Software(), 16).hidden


def test_nothing_accumulates_with_one_microbatch() -> None:
    assert not GradientSync.of(ParallelPlan(zero_stage=2), Software(), 1).in_backward
    assert GradientSync.of(ParallelPlan(zero_stage=3), Software(), 1).in_backward


@pytest.mark.parametrize(
    ("plan", "software", "said"),
    [
        ({"zero_stage": 1}, {"gradient_sync": "every-microbatch"}, "zero_stage=1"),
        ({"zero_stage": 0}, {"gradient_sync": "last-microbatch"}, "leave the key out"),
        (
            {"zero_stage": 2, "pp": 2},
            {"gradient_sync": "every-microbatch", "parameters_copied": True},
            "torch's pipelines",
        ),
    ],
)
def test_contradictions_are_refused(plan: dict[str, object], software: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_gradient_sync(ParallelPlan.model_validate(plan), Software.model_validate(software))
