from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels import InputError
from moesim.simulator.fleet import FleetResult, balanced_by_stage, simulate_fleet
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.simulate import simulate

HOME = "deepseek-v3-2048xh800"
PLAN = ("schedule=1f1b", "parallel.pp=8", "batch.sequences=2048", "profile=generic-roofline")
EVEN = "stages.layers=[7, 8, 8, 8, 8, 8, 7, 7]"


def job(*more: str, cluster: str = "deepseek-h800-2048") -> Scenario:
    return load_scenario(HOME, [f"cluster={cluster}", "cluster.nodes=128", *PLAN, *more])


def pool(cluster: str, ranks: int, **more: Any) -> dict[str, object]:
    described = load_scenario(HOME, [f"cluster={cluster}", f"cluster.nodes={16 * ranks}"]).machine
    return {"cluster": described, "pipeline_ranks": ranks, **more}


def mixed(*more: str, h800: int = 4) -> FleetResult:
    return simulate_fleet(job(*more), [pool("deepseek-h800-2048", h800), pool("h20-2048", 8 - h800)])


def test_two_pools_of_one_kind_are_one_cluster() -> None:
    whole = simulate(job(EVEN))
    fleet = simulate_fleet(job(EVEN), [pool("deepseek-h800-2048", 3), pool("deepseek-h800-2048", 5)])
    assert fleet.step == whole.step
    assert fleet.cost_usd == pytest.approx(whole.run.cost_usd)
    assert fleet.gpu_hours == pytest.approx(whole.run.gpu_hours)
    assert max(p.memory.total_bytes for p in fleet.pools) == whole.memory.total_bytes
    assert [(p.first_rank, p.last_rank, p.n_gpus) for p in fleet.pools] == [(0, 2, 384), (3, 7, 640)]


def test_a_mixed_fleet_lies_between_its_kinds_and_balance_helps() -> None:
    fast, slow = simulate(job(EVEN)).step.time_s, simulate(job(EVEN, cluster="h20-2048")).step.time_s
    even, balanced = mixed(EVEN), mixed()
    assert fast < even.step.time_s < slow * 1.02
    assert balanced.step.time_s < 0.75 * even.step.time_s
    h800, h20 = balanced.pools
    assert h800.layers > 2 * h20.layers and h800.layers + h20.layers == 61
    assert h800.accelerator == "h800-sxm" and h20.accelerator == "h20"
    # On even stages the fast pool waits for the slow one.
    assert even.pools[0].bubble_s > 1.5 * balanced.pools[0].bubble_s
    for result in (even, balanced):
        assert result.step.lower_bound_s <= result.step.time_s <= result.step.upper_bound_s


def test_memory_is_counted_against_each_pool() -> None:
    h800, h20 = mixed().pools
    assert h800.memory.capacity_bytes == 80 * 2**30 and h20.memory.capacity_bytes == 96 * 2**30
    assert h800.memory.total_bytes > h20.memory.total_bytes  # it holds three times the layers
    assert not h800.memory.fits and h20.memory.fits


def test_confidence_and_cost_are_told_by_pool() -> None:
    fleet = simulate_fleet(job(), [pool("deepseek-h800-2048", 4, profile="h800-trace"), pool("h20-2048", 4)])
    assert [p.confidence for p in fleet.pools] == ["measured", "peak-only"]
    assert fleet.cost_usd == pytest.approx(fleet.gpu_hours / 2 * (2.0 + 1.17))
    gaudi = pool("gaudi3-2048", 4, communication_sms=0)
    assert simulate_fleet(job(), [pool("deepseek-h800-2048", 4), gaudi]).cost_usd is None


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((4, 3), r"pools hold 4 \+ 3 pipeline ranks, but parallel\.pp=8"),
        ((), r"pools hold none pipeline ranks, but parallel\.pp=8"),
    ],
)
def test_pools_must_fill_the_pipeline(ranks: tuple[int, ...], words: str) -> None:
    names = ("deepseek-h800-2048", "h20-2048")
    with pytest.raises(InputError, match=words):
        simulate_fleet(job(), [pool(name, n) for name, n in zip(names, ranks, strict=False)])


def test_every_rank_needs_the_same_number_of_gpus() -> None:
    small = pool("h20-2048", 4) | {"pipeline_ranks": 5}
    with pytest.raises(InputError, match=r"'deepseek-h800-2048' has 512 GPUs for 3 of 8 .*same number"):
        simulate_fleet(job(), [pool("deepseek-h800-2048", 4) | {"pipeline_ranks": 3}, small])
    with pytest.raises(InputError, match="unknown cluster 'h21'"):
        simulate_fleet(job(), [{"cluster": "h21", "pipeline_ranks": 8}])


def test_several_stages_a_rank_need_their_layers() -> None:
    with pytest.raises(InputError, match=r"schedule=dualpipe runs several stages .*give stages\.layers"):
        mixed("schedule=dualpipe")
    assert mixed("schedule=dualpipe", EVEN).step.time_s > 0


@given(st.lists(st.integers(1, 50), min_size=3, max_size=7), st.integers(2, 3), st.data())
def test_balance_by_stage_equals_brute_force(layers: list[int], k: int, data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.integers(1, 5), min_size=k, max_size=k))
    extra = data.draw(st.lists(st.integers(0, 30), min_size=k, max_size=k))
    sums = [[0, *accumulate(speed * cost for cost in layers)] for speed in speeds]

    def slowest(sizes: tuple[int, ...]) -> int:
        ends = list(accumulate(sizes))
        return max(
            sums[s][end] - sums[s][end - n] + extra[s]
            for s, (n, end) in enumerate(zip(sizes, ends, strict=True))
        )

    def splits(n: int, parts: int) -> list[tuple[int, ...]]:
        if parts == 1:
            return [(n,)]
        return [(first, *rest) for first in range(1, n - parts + 2) for rest in splits(n - first, parts - 1)]

    found = balanced_by_stage(sums, extra)
    assert sum(found) == len(layers) and slowest(found) == min(slowest(s) for s in splits(len(layers), k))


def test_more_stages_than_layers() -> None:
    with pytest.raises(InputError, match="3 pipeline stages: the 2 layers"):
        balanced_by_stage([[0, 1, 2]] * 3, [0, 0, 0])
