"""Drift shape by shape: error bars, order, and what is left after the correction for many comparisons."""

from __future__ import annotations

from math import erfc, inf, sqrt

import pytest
from test_drift import SHAPES, profile

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.drift import (
    LEVEL,
    PointDrift,
    compare,
    compare_points,
    shared_entries,
    verdict_of_points,
)


def slowed(count: int, factor: float) -> list[tuple[float, ...]]:
    return [(*row[:4], row[4] * factor) if n < count else row for n, row in enumerate(SHAPES)]


def test_the_error_bar_of_a_difference_holds_both_errors() -> None:
    point = PointDrift("e", "p", -0.10, 0.03, 0.04)
    assert point.error == pytest.approx(0.05)
    assert point.significance == pytest.approx(2.0)
    assert point.chance == pytest.approx(erfc(2.0 / sqrt(2.0)))
    assert point.is_beyond
    assert not PointDrift("e", "p", -0.065, 0.03, 0.04).is_beyond
    assert PointDrift("e", "p", 0.0, 0.0, 0.0).significance == 0.0
    assert PointDrift("e", "p", 0.1, 0.0, 0.0).significance == inf


def test_five_slower_shapes_of_twelve_are_counted_though_the_median_stays() -> None:
    points = compare_points(profile(SHAPES), profile(slowed(5, 0.80)))
    assert [p.entry for p in points[:5]] == ["gemm_fp8"] * 5
    assert {p.point for p in points if p.is_clear} == {f"{1024 * n}x7168x2048" for n in range(1, 6)}
    text = verdict_of_points(points)
    assert text.startswith(f"5 of {len(points)} shapes and points, in 1 entry, changed")
    assert f"5 of them stay clear after correction for {len(points)} comparisons (Holm" in text
    assert "by chance alone" in text


def test_a_change_just_beyond_its_errors_does_not_survive_many_comparisons() -> None:
    points = compare_points(profile(SHAPES), profile(slowed(1, 0.93)))
    (beyond,) = (p for p in points if p.is_beyond)
    assert beyond is points[0] and not beyond.is_clear
    assert LEVEL / len(points) < beyond.chance < LEVEL * 3
    assert "0 of them stay clear" in verdict_of_points(points)


def test_the_clearest_change_comes_first() -> None:
    points = compare_points(load_profile("h100-layers"), load_profile("h200-8gpu"))
    found = [point.significance for point in points]
    assert found == sorted(found, reverse=True)
    clear = [point.is_clear for point in points]
    assert clear == sorted(clear, reverse=True), "whatever is clear stands above what is not"


def test_entries_from_the_same_source_are_no_comparison() -> None:
    old, new = load_profile("h100-layers"), load_profile("h200-8gpu")
    assert shared_entries(old, new) > 10
    assert not any(p.entry.startswith("generic-priors.") for p in compare_points(old, new))
    assert shared_entries(old, old) == len(list(old.entries()))


def test_points_and_entries_agree_on_what_changed() -> None:
    old, new = load_profile("h100-layers"), load_profile("h200-8gpu")
    by_point = {(p.entry, p.point) for p in compare_points(old, new) if p.is_beyond}
    by_entry = {(row.id, key) for row in compare(old, new) for key, _ in row.changed}
    assert by_point == by_entry and by_point


def test_the_same_figures_measured_twice_are_no_change() -> None:
    assert compare_points(profile(SHAPES), profile(SHAPES)) == ()
    points = compare_points(profile(SHAPES), profile(slowed(1, 1.0001)))
    assert not any(p.is_beyond or p.is_clear for p in points)
    assert verdict_of_points(points).startswith(f"0 of {len(points)} ")
