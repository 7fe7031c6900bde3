from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.run.failures import (
    FailureModel,
    Stop,
    Tier,
    checkpoint_bytes,
    daly_interval_s,
    expected_wall_s,
    optimal_interval_s,
    segments,
    young_interval_s,
)


def expected_seconds(work: float, t: float, d: float, m: float, detection: float, restart: float) -> float:
    stop = Stop("any", 0.0 if math.isinf(m) else 1.0 / m, detection, restart)
    return expected_wall_s([work], FailureModel((stop,), (Tier(interval_s=t, stall_s=d),)))


def test_bytes_by_hand() -> None:
    """4 + 2 x 2 bytes a parameter in DeepSeek-V3's recipe, 4 + 2 x 4 with FP32 moments."""
    assert checkpoint_bytes(671_000_000_000, PRECISIONS["fp8"]) == 5.368e12
    assert checkpoint_bytes(405_000_000_000, PRECISIONS["bf16"]) == 4.86e12


def test_young_and_daly_by_hand() -> None:
    # d = 50 s, M = 10,000 s: sqrt(2 50 10,000) = 1,000; d/2M = 0.0025.
    assert young_interval_s(50.0, 10_000.0) == 1000.0
    assert daly_interval_s(50.0, 10_000.0) == pytest.approx(1000.0 * (1 + 0.05 / 3 + 0.0025 / 9) - 50.0)
    assert daly_interval_s(500.0, 100.0) == 100.0


@given(st.floats(1e-3, 1e4), st.floats(1e2, 1e7))
def test_the_optimum_is_the_minimum_of_the_exact_expectation(stall_s: float, between_s: float) -> None:
    best = optimal_interval_s(stall_s, between_s)
    assert 0.0 < best < between_s

    def per_second(interval_s: float) -> float:
        return math.expm1((interval_s + stall_s) / between_s) / interval_s

    if (best + stall_s) / between_s < 500.0:
        assert per_second(best) <= per_second(best * 1.01) * (1 + 1e-9)
        assert per_second(best) <= per_second(best * 0.99) * (1 + 1e-9)


@given(st.floats(0.01, 100.0), st.floats(1e4, 1e6))
def test_young_and_daly_are_near_the_optimum_where_checkpoints_are_cheap(
    stall_s: float, between_s: float
) -> None:
    best, small = optimal_interval_s(stall_s, between_s), math.sqrt(stall_s / between_s)
    assert daly_interval_s(stall_s, between_s) == pytest.approx(best, rel=2.0 * small**2 + 1e-6)
    assert young_interval_s(stall_s, between_s) == pytest.approx(best, rel=2.0 * small + 1e-6)
    assert (
        abs(daly_interval_s(stall_s, between_s) - best)
        <= abs(young_interval_s(stall_s, between_s) - best) + 1e-3
    )


def test_daly_exact_formula_by_hand() -> None:
    """Daly 2006, eq. 13: M e^(R/M) (e^((t+d)/M) - 1) W/t, for a whole number of stretches."""
    m, r, t, d, w = 3600.0, 600.0, 900.0, 60.0, 90_000.0
    want = m * math.exp(r / m) * math.expm1((t + d) / m) * w / t
    assert expected_seconds(w, t, d, m, 0.0, r) == pytest.approx(want, rel=1e-12)


def test_limits_of_the_expectation() -> None:
    assert expected_seconds(1000.0, 300.0, 10.0, math.inf, 5.0, 5.0) == 1000.0 + 4 * 10.0
    assert expected_seconds(1000.0, 300.0, 10.0, 1e12, 5.0, 5.0) == pytest.approx(1040.0, rel=1e-6)
    assert expected_seconds(1000.0, math.inf, 10.0, math.inf, 0.0, 0.0) == 1010.0
    assert math.isinf(expected_seconds(1e6, 1e6, 0.0, 1.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("work", "interval", "want"),
    [(1000.0, 300.0, (4, 100.0)), (900.0, 300.0, (3, 300.0)), (100.0, 300.0, (1, 100.0))],
)
def test_segments(work: float, interval: float, want: tuple[int, float]) -> None:
    assert segments(work, interval) == want
