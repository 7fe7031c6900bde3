"""Numbers as every page writes them (app/texts.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.app.texts import compact, money, plain, span, written


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2_504_000.0, "2.50 M"),
        (14.8e12, "14.8 T"),
        (999_999.0, "1.00 M"),
        (999.6, "1.00 k"),
        (999.4, "999"),
        (0.0, "0"),
        (1e-5, "0.00001"),
        (-62_914_560, "-62.9 M"),
    ],
)
def test_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert compact(value) == text


@given(st.floats(-1e18, 1e18, allow_nan=False))
def test_no_number_is_written_with_an_exponent(value: float) -> None:
    for text in (compact(value), plain(value, 4), written("days", value), written("gpu_hours", value)):
        assert "e" not in text.replace("the", "")


def test_money_and_figures_carry_their_unit() -> None:
    assert money(5_061_000.0) == "$5.06 M" and money(None) == "no price"
    assert written("step_time_s", 18.9087) == "18.909 s"
    assert written("memory_bytes", 80 * 2.0**30) == "80.0 GiB"
    assert written("days", 12345.67) == "12,345.7 days"


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.042, "42 ms"),
        (2.731, "2.73 s"),
        (90.0, "90 s"),
        (695.5, "11.6 min"),
        (3600.0, "1 h"),
        (5400.0, "90 min"),
        (172_800.0, "2 days"),
        (0.0, "0 s"),
    ],
)
def test_a_duration_has_the_unit_that_people_would_choose(time_s: float, text: str) -> None:
    assert span(time_s) == text
