"""Designs: sizes, order, seeds that mean the same numbers for ever, and empty or malformed spaces."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.studies.space import LARGEST, points, work_groups, work_order


def test_a_grid_has_the_last_key_fastest() -> None:
    assert list(points({"a": "1,2", "b": ["x", "y"]})) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip


def test_a_list_goes_through_its_keys_together() -> None:
    assert list(points({"a": "1,2", "b": ["x", "y"], "c": 5}, "list")) == [
        {"a": 1, "b": "x", "c": 5}, {"a": 2, "b": "y", "c": 5},
    ]  # fmt: skip
    given_points: list[dict[str, Any]] = [{"a": 1}, {"b": 2}, {"a": 1}]
    assert list(points(given_points, "list")) == [{"a": 1}, {"b": 2}]


@given(st.integers(1, 40), st.integers(0, 2**31), st.sampled_from(["random", "sobol"]))
def test_drawn_points_lie_in_their_ranges(count: int, seed: int, design: str) -> None:
    found = points({"whole": "8..24", "any": "0.5..2.0", "word": "a,b,c"}, design, count, seed)
    assert 1 <= len(found) <= count
    for point in found:
        assert isinstance(point["whole"], int) and 8 <= point["whole"] <= 24
        assert 0.5 <= point["any"] <= 2.0
        assert point["word"] in ("a", "b", "c")
    again = points({"whole": "8..24", "any": "0.5..2.0", "word": "a,b,c"}, design, count, seed)
    assert list(found) == list(again)


def test_sobol_fills_every_part_once() -> None:
    """16 points in two dimensions: one in each of the 16 columns and rows, whatever the shift."""
    found = points({"a": "0.0..1.0", "b": "0.0..1.0"}, "sobol", 16, 3)
    shift = {key: min(p[key] % (1 / 16) for p in found) for key in ("a", "b")}
    for key in ("a", "b"):
        assert sorted(round((p[key] - shift[key]) * 16) for p in found) == list(range(16))


def test_seeds_mean_these_numbers() -> None:
    """Held here: a store from last year must match."""
    assert list(points({"a": "1..1000"}, "random", 4, 1)) == [{"a": 512}, {"a": 951}, {"a": 145}, {"a": 949}]
    assert list(points({"a": "1..1000"}, "sobol", 4, 1)) == [{"a": 512}, {"a": 12}, {"a": 262}, {"a": 762}]


@pytest.mark.parametrize(
    ("space", "design", "count", "said"),
    [
        ({}, "grid", None, "empty"),
        ([], "list", None, "empty"),
        ({"a": []}, "grid", None, "empty list"),
        ([{}], "list", None, "names no key"),
        ([{"a": 1}], "grid", None, "design list"),
        ({"a": "1,2", "b": "1,2,3"}, "list", None, "as many values"),
        ({"a": "1..8"}, "sobol", None, "number of points"),
        ({"a": "1..8"}, "random", 0, "number of points"),
        ({"a": "1..8"}, "grid", 3, "leave the number"),
        ({"a": "1..8"}, "gird", None, "nearest: 'grid'"),
        ({"a": "1..9999", "b": "1..9999"}, "grid", None, "more than"),
        ({"a": "8..1"}, "sobol", 4, "backwards"),
    ],
)
def test_bad_spaces_are_told(space: Any, design: str, count: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        points(space, design, count)


# -- the order of work: expensive values change least, and groups share them -----------------------------

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
    groups = work_groups(points, range(len(points)), workers=1)
    assert [number for group in groups for number in group] == list(range(len(points)))
    assert all(len({points[number]["seed"] for number in group}) == 1 for group in groups)
    assert max(map(len, groups)) == LARGEST
    few = work_groups(points, range(8), workers=2)
    assert [len(group) for group in few] == [1] * 8
