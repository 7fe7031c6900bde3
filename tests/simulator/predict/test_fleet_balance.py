"""Layers over stages of different speed and memory, against every layout there is."""

from __future__ import annotations

from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels import InputError
from moesim.simulator.layout.job import split_over_pools
from moesim.simulator.layout.stages import best_sizes, blocks_of, from_layers_per_stage
from moesim.simulator.memory.activations import RECOMPUTED
from moesim.simulator.memory.gpu import rank_stages
from moesim.simulator.predict.fleet import FleetMemory, balanced_over_pools
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import build


def splits(n: int, parts: int) -> list[tuple[int, ...]]:
    """All sizes of contiguous stages, of which the first and the last may be empty."""
    found = product(range(n + 1), repeat=parts)
    return [sizes for sizes in found if sum(sizes) == n and all(sizes[1:-1])]


@given(st.lists(st.integers(1, 50), min_size=3, max_size=7), st.integers(2, 3), st.data())
def test_sizes_by_stage_equal_brute_force(layers: list[int], k: int, data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.integers(1, 5), min_size=k, max_size=k))
    extra = data.draw(st.lists(st.integers(0, 30), min_size=k, max_size=k))
    most = data.draw(
        st.lists(st.lists(st.integers(0, 4), min_size=8, max_size=8), min_size=k, max_size=k) | st.none()
    )
    sums = [[0, *accumulate(speed * cost for cost in layers)] for speed in speeds]
    room = None if most is None else [row[: len(layers) + 1] for row in most]

    def costs(sizes: tuple[int, ...]) -> list[int]:
        ends = list(accumulate(sizes))
        return [
            sums[s][e] - sums[s][e - n] + extra[s] for s, (n, e) in enumerate(zip(sizes, ends, strict=True))
        ]

    def legal(sizes: tuple[int, ...]) -> bool:
        starts = [0, *accumulate(sizes)]
        return room is None or all(n <= room[s][starts[s]] for s, n in enumerate(sizes))

    every = [sizes for sizes in splits(len(layers), k) if legal(sizes)]
    if not every:
        with pytest.raises(InputError, match="memory of the stages' accelerators leave no way"):
            best_sizes(sums, extra, room)
        return
    found = tuple(best_sizes(sums, extra, room))
    wanted = min(every, key=lambda sizes: (max(costs(sizes)), sum(c * c for c in costs(sizes)), sizes))
    assert found == wanted


def memory_of(scenario: Scenario, headroom: float = 0.0) -> FleetMemory:
    schedule = build("1f1b", scenario.parallel.pp, 16, 1)
    return FleetMemory(scenario.shape, split_over_pools(scenario), rank_stages(schedule), 16, headroom)


def test_the_room_of_a_stage_is_what_fits_exactly(mixed: Scenario) -> None:
    memory = memory_of(mixed.replace(recompute="none"), headroom=0.5)
    blocks = blocks_of(memory.shape)
    for stage, most in enumerate(memory.room(4)):
        layers = most[0]
        for count, fits in ((layers, True), (layers + 1, False)):
            sizes = [(48 - count) // 3] * 4
            sizes[stage] = count
            sizes[(stage + 1) % 4] += 48 - sum(sizes)
            used, capacity = memory.by_rank(from_layers_per_stage(blocks, sizes))[stage]
            assert (used <= capacity) is fits, (stage, count)


def test_full_recompute_keeps_least_which_the_search_relies_on(mixed: Scenario) -> None:
    stages = from_layers_per_stage(blocks_of(mixed.shape), (12, 12, 12, 12))
    full = memory_of(mixed).by_rank(stages)
    for policy in set(RECOMPUTED) - {"full"}:
        other = memory_of(mixed.replace(recompute=policy)).by_rank(stages)
        assert all(lean[0] <= rich[0] for lean, rich in zip(full, other, strict=True)), policy


def test_memory_moves_layers_to_the_pool_that_has_room(mixed: Scenario) -> None:
    seconds = [{"embedding": 0.1, "moe": speed, "head": 1.0} for speed in (1.0, 3.0)]
    free, fits = balanced_over_pools(seconds, (0, 0, 1, 1), memory_of(mixed))
    fast = sum(free.layers_per_stage[:2])
    assert fits and fast >= 36
    tight = memory_of(mixed.replace(recompute="none"), headroom=0.35)
    packed, fits = balanced_over_pools(seconds, (0, 0, 1, 1), tight)
    assert fits and not tight.fits(free)
    assert sum(packed.layers_per_stage[:2]) < fast
    none = memory_of(mixed.replace(recompute="none"), headroom=0.9)
    assert balanced_over_pools(seconds, (0, 0, 1, 1), none) == (free, False)
