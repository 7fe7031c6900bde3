from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moesim.hwmodels.calibration_entry import Curve


def curve(points: list[tuple[float, float]], interpolation: str = "linear") -> Curve:
    return Curve.model_validate(
        {
            "id": "copy", "x_name": "SMs", "x_unit": "SM", "y_name": "bandwidth", "y_unit": "GB/s",
            "points": points, "interpolation": interpolation,
        }
    )  # fmt: skip


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    xs = draw(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8, unique=True))
    ys = draw(st.lists(st.floats(-1e6, 1e6), min_size=len(xs), max_size=len(xs)))
    return curve(list(zip(sorted(xs), ys, strict=True)), draw(st.sampled_from(["linear", "log"])))


@given(curves())
def test_measured_points_are_returned_exactly(c: Curve) -> None:
    for x, y in c.points:
        assert c.at(x) == (y, False, "")


@given(curves(), st.floats(1e-4, 1e7))
def test_readings_stay_between_their_neighbours(c: Curve, x: float) -> None:
    reading = c.at(x)
    assert min(c.ys) <= reading.value <= max(c.ys)
    assert reading.extrapolated == (x < c.xs[0] or x > c.xs[-1])
    if not reading.extrapolated:
        left = max(i for i, known in enumerate(c.xs) if known <= x)
        near = c.ys[left : left + 2]
        assert min(near) <= reading.value <= max(near)


@given(curves(), st.floats(1e-4, 1e7), st.floats(1e-4, 1e7))
def test_rising_points_give_rising_readings(c: Curve, x0: float, x1: float) -> None:
    rising = c.model_copy(update={"points": tuple(zip(c.xs, sorted(c.ys), strict=True))})
    low, high = sorted((x0, x1))
    allowance = 1e-9 * max(map(abs, c.ys))
    assert rising.at(low).value <= rising.at(high).value + allowance


def test_a_changed_copy_reads_its_own_points() -> None:
    first = curve([(1, 1.0), (2, 2.0)])
    assert first.at(2).value == 2.0
    assert first.model_copy(update={"points": ((1, 1.0), (2, 7.0))}).at(2).value == 7.0
    assert first.model_copy() == first
    with pytest.raises(ValidationError, match="increase strictly"):
        first.model_copy(update={"points": ((2, 1.0), (1, 7.0))})


def test_out_of_range_is_held_and_said() -> None:
    c = curve([(2, 10.0), (8, 40.0)])
    assert c.at(5).value == 25.0
    assert curve([(1, 0.0), (100, 2.0)], "log").at(10).value == pytest.approx(1.0)
    with pytest.raises(ValueError, match="not a number"):
        c.at(math.nan)
    below, above = c.at(1), c.at(132)
    assert (below.value, above.value) == (10.0, 40.0)
    assert below.extrapolated and above.extrapolated
    assert above.note == "copy: SMs 132 SM is outside the measured 2 to 8; the end value is held"


@pytest.mark.parametrize(
    ("points", "interpolation", "message"),
    [
        ([(1, 1.0), (1, 2.0)], "linear", "increase strictly"),
        ([(0, 1.0), (1, 2.0)], "log", "needs x > 0"),
        ([(1, math.inf)], "linear", "not finite"),
        ([], "linear", "at least 1"),
        ([(1, 1.0)], "cubic", "'linear' or 'log'"),
    ],
)
def test_no_curve_from_bad_points(
    points: list[tuple[float, float]], interpolation: str, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        curve(points, interpolation)
