"""The order of work in a sweep: expensive values change least, and groups share them."""

from __future__ import annotations

from itertools import pairwise, product

from moesim.simulator.studies.space import LARGEST, work_groups, work_order

GRID = [
    {"communication.sms": sms, "seed": seed, "parallel": shape}
    for sms, seed, shape in product((8, 20, 12), (3, 1), ({"pp": 8}, {"pp": 4}))
]


def test_the_expensive_values_change_least() -> None:
    ordered = [GRID[number] for number in work_order(GRID)]
    assert sorted(map(repr, ordered)) == sorted(map(repr, GRID))
    for key, changes in (("parallel", 1), ("seed", 3), ("communication.sms", 11)):
        values = [point[key] for point in ordered]
        assert sum(a != b for a, b in pairwise(values)) == changes, key


def test_points_without_a_key_and_equal_points_keep_their_order() -> None:
    points: list[dict[str, float]] = [{"seed": 1}, {}, {"seed": 1}, {"run.tokens": 1.0}]
    assert work_order(points) == [0, 2, 1, 3]


def test_a_group_shares_all_but_cheap_values_and_is_bounded() -> None:
    points = [{"seed": seed, "communication.sms": sms} for seed in range(3) for sms in range(40)]
    groups = work_groups(((point, point) for point in points), workers=1)
    assert [point for group in groups for point in group] == points
    assert all(len({point["seed"] for point in group}) == 1 for group in groups)
    assert max(map(len, groups)) == LARGEST
    few = work_groups(((point, point) for point in points[:8]), workers=2)
    assert [len(group) for group in few] == [1] * 8
