"""Drift between two profiles: every shape and point is held against its stated error."""

from __future__ import annotations

from math import erfc, inf, sqrt
from typing import Any

import pytest

from moesim.hwmodels.calibration import CalibrationProfile, GemmTable, load_profile
from moesim.hwmodels.drift import (
    LEVEL,
    PointDrift,
    compare,
    compare_points,
    shared_entries,
    verdict,
    verdict_of_points,
)

SHAPES = [(1024.0 * n, 7168.0, 2048.0, 1.0, 600.0 + n) for n in range(1, 13)]
"""Twelve FP8 products."""


def profile(points: Any, name: str = "mine", curve: Any = None) -> CalibrationProfile:
    """A profile of one table, its error 3 %, and of the curves of a measured one."""
    table = GemmTable.model_validate(
        {
            "id": f"{name}.gemm_fp8", "cls": "gemm", "dtype": "fp8", "told": False, "unit": "TFLOP/s",
            "points": points, "source": "own run", "kind": "measured", "date": "2026-11-20",
            "residual": {"relative": 0.03, "meaning": "spread of repeats"},
        }
    )  # fmt: skip
    measured = load_profile("h200-8gpu")
    curves = measured.curves if curve is None else (curve,)
    return measured.model_copy(
        update={"name": name, "gemm_tables": (table,), "laws": (), "priors": (), "curves": curves}
    )


def test_five_of_twelve_slower_shapes_are_said_by_shape_though_the_median_stays() -> None:
    slower = [(*row[:4], row[4] * 0.88) if n < 5 else row for n, row in enumerate(SHAPES)]
    rows = compare(profile(SHAPES, "before"), profile(slower, "after"))
    assert not [row.id for row in rows if row.points == 0]  # of two names, the same entries
    first = rows[0]
    assert first.id == "gemm_fp8" and first.drifted and first.median == pytest.approx(0.0)
    assert first.summary.startswith("5 of 12 changed: 1024x7168x2048 -12.0%, ")
    assert {key for key, _ in first.changed} == {f"{1024 * n}x7168x2048" for n in range(1, 6)}
    assert (
        "1 of " in verdict(rows) and "at 5 of " in verdict(rows) and "stated errors together" in verdict(rows)
    )
    assert not any(row.drifted for row in rows[1:])


def test_what_lies_within_both_stated_errors_is_no_change() -> None:
    rows = compare(profile(SHAPES), profile([(*row[:4], row[4] * 1.055) for row in SHAPES]))
    assert not any(row.drifted for row in rows)
    beyond = compare(profile(SHAPES), profile([(*row[:4], row[4] * 1.065) for row in SHAPES]))
    assert len(beyond[0].changed) == len(SHAPES)


def test_shapes_that_differ_in_groups_or_kernel_are_different_points() -> None:
    old = [(8192.0, 2048.0, 7168.0, 1.0, 500.0), (8192.0, 2048.0, 7168.0, 8.0, 400.0)]
    new = [(8192.0, 2048.0, 7168.0, 1.0, 500.0), (8192.0, 2048.0, 7168.0, 8.0, 300.0)]
    first = compare(profile(old), profile(new))[0]
    assert dict(first.changed) == pytest.approx({"8192x2048x7168 in 8 groups": -0.25})
    assert first.points == 2


def test_points_between_measured_ones_are_not_compared_but_counted() -> None:
    measured = load_profile("h200-8gpu").curve("copy.push.sm_rate")
    fewer = type(measured).model_validate({**measured.model_dump(), "points": measured.points[::2]})
    old, new = profile(SHAPES, curve=fewer), profile(SHAPES, curve=measured)
    row = next(row for row in compare(old, new) if row.id == "copy.push.sm_rate")
    assert row.points == len(fewer.points) and row.worst == 0.0
    left = len(measured.points) - len(fewer.points)
    assert row.note == f"{left} points in one profile only"


def test_a_longer_launch_gap_is_drift_too() -> None:
    old = load_profile("h800-published")
    assert old.launch_gap is not None
    longer = old.launch_gap.model_copy(update={"value": 3.0 * old.launch_gap.value})
    rows = compare(old, old.model_copy(update={"launch_gap": longer}))
    assert rows[0].id == "launch_gap" and dict(rows[0].changed) == pytest.approx({"value": 2.0})


# -- shape by shape: error bars, order, and what the correction for many comparisons leaves ------------


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
