from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.gradient_sync import GradientSync, check_gradient_sync
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches, nearest_divisors
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.scenario.parallel import ParallelPlan

HOME = Layout(ParallelPlan(pp=16, ep=64, zero_stage=1), 2048, 8)
degree = st.sampled_from((1, 2, 4))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, pp, dp = (draw(degree) for _ in range(4))
    inner = tp * cp * dp
    ep = draw(st.sampled_from([d for d in (1, 2, 4, 8, 16, 32, 64) if inner % d == 0]))
    expert_tp = draw(st.sampled_from([d for d in (1, 2, 4) if (inner // ep) % d == 0]))
    return Layout(ParallelPlan(tp=tp, cp=cp, pp=pp, ep=ep, expert_tp=expert_tp), inner * pp, 8)


def test_home_case() -> None:
    assert (HOME.dp, HOME.expert_dp) == (128, 2)
    assert HOME.ep_group(70) == tuple(range(64, 128))
    assert HOME.nodes_spanned(HOME.ep_group(70)) == 8
    assert HOME.pp_group(5)[:3] == (5, 133, 261)
    assert microbatches(HOME, 15360) == 120


def test_order_is_tp_cp_dp_pp() -> None:
    layout = Layout(ParallelPlan(tp=2, cp=2, pp=2, ep=4), 16, 8)
    assert layout.dp_group(0) == (0, 4)
    assert layout.pp_group(0) == (0, 8)
    assert layout.ep_group(0) == (0, 1, 2, 3)


@given(layouts())
def test_coordinates_invert_and_groups_partition(layout: Layout) -> None:
    everyone = range(layout.n_gpus)
    seen = set()
    for rank in everyone:
        c = layout.coordinates(rank)
        assert layout.rank(c.pp, c.dp, c.cp, c.tp) == rank
        seen.add(c)
    assert len(seen) == layout.n_gpus
    for group_of in (layout.dp_group, layout.pp_group, layout.ep_group):
        groups = {group_of(rank) for rank in everyone}
        assert sorted(rank for group in groups for rank in group) == list(everyone)
        assert all(rank in group_of(rank) for rank in everyone)
    sizes = (layout.plan.expert_tp, layout.plan.ep, layout.expert_dp, layout.plan.pp)
    assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == layout.n_gpus


@pytest.mark.parametrize(
    ("plan", "gpus", "words"),
    [
        ({"pp": 3}, 2048, r"parallel\.pp=3 does not divide .*2048; nearest: 2, 4"),
        ({"pp": 16, "ep": 48}, 2048, r"parallel\.ep=48 does not divide .*128; nearest: 32, 64"),
        ({"pp": 16, "ep": 256}, 2048, r"parallel\.ep=256 .*nearest: 128"),
        ({"pp": 16, "tp": 48}, 2048, r"parallel\.tp=48"),
        ({"pp": 16, "ep": 64, "expert_tp": 4}, 2048, r"parallel\.expert_tp=4"),
        ({}, 12, "nearest: 8, 16"),
        ({}, 0, "n_gpus=0"),
    ],
)
def test_plans_that_do_not_divide(plan: dict[str, Any], gpus: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Layout(ParallelPlan(**plan), gpus, 8)


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        ("deepseek-v3", {"ep": 48}, r"parallel\.ep=48 does not divide experts=256; nearest: 32, 64"),
        ("deepseek-v3", {"ep": 512}, r"parallel\.ep=512 does not divide experts=256; nearest: 256"),
        ("deepseek-v3", {"tp": 3, "sequence_parallel": True}, r"parallel\.tp=3 .*heads=128; nearest: 2, 4"),
        ("deepseek-v3", {"tp": 2}, "sequence_parallel"),
        ("deepseek-v3", {"sequence_parallel": True}, "tp of at least 2"),
        ("deepseek-v3", {"cp": 3}, r"parallel\.cp=3 .*nearest: 2, 4"),
        ("deepseek-v3", {"expert_tp": 3}, r"parallel\.expert_tp=3"),
        ("llama-3-8b", {"ep": 2}, "no experts"),
        ("llama-3-8b", {"tp": 6}, r"parallel\.tp=6 .*heads=32; nearest: 4, 8"),
        ("llama-3-8b", {"pp": 64}, "64 pipeline stages"),
    ],
)
def test_plans_that_do_not_fit_the_model(model: str, plan: dict[str, Any], words: str) -> None:
    parallel = ParallelPlan(**plan)
    with pytest.raises(InputError, match=words):
        check_against_model(parallel, load_model(model), 4096, parallel.pp)


def test_batch_names_the_nearest() -> None:
    with pytest.raises(InputError, match="nearest: 15360, 15488"):
        microbatches(HOME, 15400)
    with pytest.raises(InputError, match="nearest: 128"):
        microbatches(HOME, 5)


@given(st.integers(1, 500), st.integers(1, 500))
def test_nearest_divisors_divide(value: int, whole: int) -> None:
    near = nearest_divisors(value, whole)
    assert all(whole % d == 0 for d in near)
    if whole % value == 0:
        assert near == [value]


def test_rank_out_of_range() -> None:
    with pytest.raises(InputError, match="rank 2048 is outside 0 to 2047"):
        HOME.ep_group(2048)
    with pytest.raises(InputError, match="pp=16"):
        HOME.rank(16, 0, 0, 0)


# -- Groups that ZeRO-3 shards over: numbers of shards, and groups that cannot hold a -----------


def plan(group: int | None, **more: object) -> ParallelPlan:
    degrees = {"tp": 2, "ep": 16, "zero_stage": 3, "sequence_parallel": True, "shard_group": group, **more}
    return ParallelPlan.model_validate(degrees)


def test_a_group_divides_parameters_and_the_optimizer_may_use_all() -> None:
    whole, part = Layout(plan(None), 256, 64), Layout(plan(64), 256, 64)
    assert (whole.shards, whole.optimizer_shards) == ((16, 128), (16, 128))
    assert (part.shards, part.optimizer_shards) == ((4, 32), (16, 128))
    assert Layout(plan(64, shard_optimizer_over_groups=False), 256, 64).optimizer_shards == (4, 32)
    assert Layout(plan(8), 256, 64).shards == (1, 4)


@pytest.mark.parametrize(
    ("chosen", "key", "nearest"),
    [
        (plan(64, zero_stage=1), "parallel.zero_stage", (3,)),
        (plan(48), "parallel.shard_group", (32, 64)),
        (plan(1), "parallel.shard_group", (2,)),
        (plan(24, ep=16), "parallel.shard_group", (16, 32)),
    ],
)
def test_groups_that_cannot_hold_a_parameter_are_refused(
    chosen: ParallelPlan, key: str, nearest: tuple[int, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        Layout(chosen, 256, 64)
    assert (caught.value.key, caught.value.nearest) == (key, nearest)


# -- When gradients are reduced: the rule for every plan, and keys that contradict it -----------


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
