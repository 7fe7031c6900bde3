"""Groups that ZeRO-3 shards over: numbers of shards, and groups that cannot hold a parameter."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.scenario.parallel import ParallelPlan


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
