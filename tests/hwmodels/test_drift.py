"""Drift between two profiles: every shape and point is held against its stated error."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.hwmodels.calibration import CalibrationProfile, GemmTable, load_profile
from moesim.hwmodels.drift import compare, verdict

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
    rows = compare(profile(SHAPES), profile(slower))
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


def test_a_profile_of_another_name_has_the_same_entries() -> None:
    rows = compare(profile(SHAPES, "before"), profile(SHAPES, "after"))
    assert not [row.id for row in rows if row.points == 0]
    assert next(row for row in rows if row.id == "gemm_fp8").points == 12


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
