from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
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
    assert HOME.expert_dp_group(70) == (6, 70)
    assert HOME.pp_group(5)[:3] == (5, 133, 261)
    assert microbatches(HOME, 15360) == 120


def test_order_is_tp_cp_dp_pp() -> None:
    layout = Layout(ParallelPlan(tp=2, cp=2, pp=2, ep=4), 16, 8)
    assert layout.tp_group(0) == (0, 1)
    assert layout.cp_group(0) == (0, 2)
    assert layout.dp_group(0) == (0, 4)
    assert layout.pp_group(0) == (0, 8)
    assert layout.ep_group(0) == (0, 1, 2, 3)
    assert layout.expert_dp_group(0) == (0, 4)


@given(layouts())
def test_coordinates_invert_and_groups_partition(layout: Layout) -> None:
    everyone = range(layout.n_gpus)
    seen = set()
    for rank in everyone:
        c = layout.coordinates(rank)
        assert layout.rank(c.pp, c.dp, c.cp, c.tp) == rank
        seen.add(c)
    assert len(seen) == layout.n_gpus
    for group_of in (layout.tp_group, layout.cp_group, layout.dp_group, layout.pp_group,
                     layout.ep_group, layout.expert_dp_group):  # fmt: skip
        groups = {group_of(rank) for rank in everyone}
        assert sorted(rank for group in groups for rank in group) == list(everyone)
        assert all(rank in group_of(rank) for rank in everyone)
    sizes = (layout.plan.expert_tp, layout.plan.ep, layout.expert_dp, layout.plan.pp)
    assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == layout.n_gpus


@given(layouts())
def test_ep_group_differs_only_in_ep(layout: Layout) -> None:
    for rank in range(layout.n_gpus):
        here = layout.coordinates(rank)
        for i, other in enumerate(map(layout.coordinates, layout.ep_group(rank))):
            assert (other.pp, other.expert_tp, other.expert_dp) == (here.pp, here.expert_tp, here.expert_dp)
            assert other.ep == i


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


def test_legal_plans_pass() -> None:
    check_against_model(HOME.plan, load_model("deepseek-v3"), 4096, 16)
    plan = ParallelPlan(tp=8, pp=4, cp=2, sequence_parallel=True)
    check_against_model(plan, load_model("llama-3-70b"), 8192, 4)
    check_against_model(ParallelPlan(tp=16), load_model("llama-3-70b"), 4096, 1)  # repeats kv heads


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
        HOME.tp_group(2048)
    with pytest.raises(InputError, match="pp=16"):
        HOME.rank(16, 0, 0, 0)
