"""The simulation of interruptions against closed forms, limits and its own books."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.simulator.run.failures import (
    FailureModel,
    RunOutcome,
    expected_seconds,
    optimal_interval_s,
    simulate_failures,
)

HOUR = 3600.0
MODEL = FailureModel(
    rate_per_s=1 / (4 * HOUR), interval_s=0.5 * HOUR, stall_s=120.0, detection_s=300.0, restart_s=600.0
)


def books_balance(outcome: RunOutcome) -> bool:
    parts = outcome.work + outcome.checkpoints + outcome.waiting
    parts = parts + (outcome.lost + outcome.detection + outcome.restart).sum(axis=1)
    return bool(np.allclose(parts, outcome.wall, rtol=1e-9))


def deviation(outcome: RunOutcome, want_s: float) -> float:
    """Distance of the mean wall time from a value, in standard errors."""
    wall = outcome.wall.sum(axis=0)
    return float((wall.mean() - want_s) / (wall.std(ddof=1) / math.sqrt(wall.size)))


def test_without_failures_time_is_training_and_checkpoints() -> None:
    sms_reserved = replace(MODEL, rate_per_s=0.0)
    outcome = simulate_failures([10 * HOUR, 1.2 * HOUR], sms_reserved, 5, 0)
    assert outcome.wall.tolist() == [
        [10 * HOUR + 20 * 120.0] * 5,
        [pytest.approx(1.2 * HOUR + 3 * 120.0)] * 5,
    ]
    assert outcome.interruptions.sum() == 0
    assert books_balance(outcome)


@pytest.mark.parametrize(
    ("between_h", "detection", "restart"), [(0.5, 600.0, 900.0), (2.0, 0.0, 900.0), (24.0, 0.0, 0.0)]
)
def test_the_mean_is_the_closed_form(between_h: float, detection: float, restart: float) -> None:
    """Daly's exact expectation, with detection, and a last stretch that is shorter than the others."""
    model = replace(MODEL, rate_per_s=1 / (between_h * HOUR), detection_s=detection, restart_s=restart)
    work = 40.3 * HOUR
    outcome = simulate_failures([work], model, 4000, seed=1)
    want = expected_seconds(work, model.interval_s, model.stall_s, between_h * HOUR, detection, restart)
    assert abs(deviation(outcome, want)) < 4.0
    assert deviation(outcome, want * 1.05) < -4.0  # the test could tell a difference of 5 %
    assert books_balance(outcome)


def test_the_number_of_interruptions_is_poisson_in_the_time_exposed() -> None:
    model = replace(MODEL, detection_s=0.0)
    outcome = simulate_failures([100 * HOUR], model, 4000, seed=2)
    struck = outcome.interruptions.sum(axis=(0, 1))
    exposed = outcome.wall.sum(axis=0)  # nothing is safe without detection
    expected = exposed.mean() * model.rate_per_s
    assert abs(struck.mean() - expected) < 4.0 * struck.std() / math.sqrt(struck.size)


def test_phases_are_memoryless() -> None:
    """Two phases of whole stretches are as long as one: failures do not know of phases."""
    one = simulate_failures([40 * HOUR], MODEL, 3000, seed=3)
    two = simulate_failures([10 * HOUR, 30 * HOUR], MODEL, 3000, seed=4)
    gap = one.wall.sum(axis=0).mean() - two.wall.sum(axis=0).mean()
    error = math.hypot(one.wall.sum(axis=0).std(), two.wall.sum(axis=0).std()) / math.sqrt(3000)
    assert abs(gap) < 4.0 * error


def test_the_best_interval_by_search_is_the_closed_form() -> None:
    """Common random numbers: the simulated optimum over a grid is next to the exact one."""
    best = optimal_interval_s(120.0, 4 * HOUR)
    grid = [best * 2.0**k for k in (-2, -1, 0, 1, 2)]
    walls = [
        simulate_failures([200 * HOUR], replace(MODEL, interval_s=t), 1500, seed=5).wall.mean() for t in grid
    ]
    assert min(range(5), key=walls.__getitem__) == 2


def test_asynchronous_writes_cost_a_stretch_when_they_are_caught() -> None:
    """The lag w loses an extra stretch with probability w / t: w more per interruption."""
    plain = replace(MODEL, stall_s=0.0)
    lagging = replace(plain, lag_s=900.0)
    work = 400 * HOUR
    a, b = (simulate_failures([work], m, 2000, seed=6) for m in (plain, lagging))
    assert books_balance(b)
    per_stop = (b.lost.sum() - a.lost.sum()) / b.interruptions.sum()
    # A stretch that starts after a restart has no checkpoint in flight: the share of the others is e^(-t/M).
    assert per_stop == pytest.approx(900.0 * math.exp(-MODEL.interval_s * MODEL.rate_per_s), rel=0.15)
    assert simulate_failures([work], replace(plain, lag_s=0.0), 50, 7).wall.tolist() == (
        simulate_failures([work], plain, 50, 7).wall.tolist()
    )


def test_spares_run_out() -> None:
    broken = replace(MODEL, takes_node=(True,), repair_s=24 * HOUR)
    waits = [
        simulate_failures([100 * HOUR], replace(broken, spares=n), 300, seed=8).waiting.sum()
        for n in (0, 2, 8, 200)
    ]
    assert waits[0] > waits[1] > waits[2] > waits[3] == 0.0
    endless = simulate_failures([100 * HOUR], replace(broken, spares=None), 300, seed=8)
    enough = simulate_failures([100 * HOUR], replace(broken, spares=200), 300, seed=8)
    assert endless.wall.tolist() == enough.wall.tolist()


def test_without_a_spare_every_break_waits_for_its_repair() -> None:
    model = replace(MODEL, takes_node=(True,), spares=0, repair_s=5 * HOUR)
    outcome = simulate_failures([50 * HOUR], model, 100, seed=9)
    assert outcome.waiting.sum() == pytest.approx(5 * HOUR * outcome.interruptions.sum())
    assert books_balance(outcome)


def test_only_causes_that_take_a_node_need_a_spare() -> None:
    model = replace(MODEL, shares=(0.75, 0.25), takes_node=(False, True), spares=0, repair_s=HOUR)
    outcome = simulate_failures([400 * HOUR], model, 400, seed=10)
    by_cause = outcome.interruptions.sum(axis=(0, 2))
    assert by_cause[0] / by_cause.sum() == pytest.approx(0.75, abs=0.01)
    assert outcome.waiting.sum() == pytest.approx(HOUR * by_cause[1])
    assert books_balance(outcome)


def test_more_costly_interruptions_never_help_with_common_random_numbers() -> None:
    slow = replace(MODEL, detection_s=MODEL.detection_s * 2)
    a, b = (simulate_failures([100 * HOUR], m, 200, seed=13).wall.sum(axis=0) for m in (MODEL, slow))
    assert (b >= a).all() and (b > a).any()


def test_factors_stretch_the_training_of_their_replica() -> None:
    sms_reserved = replace(MODEL, rate_per_s=0.0, stall_s=0.0)
    outcome = simulate_failures([10 * HOUR], sms_reserved, 3, 0, factors=np.array([1.0, 1.5, 0.5]))
    assert outcome.wall[0].tolist() == [10 * HOUR, 15 * HOUR, 5 * HOUR]


@settings(max_examples=30)
@given(
    st.floats(0.2, 50.0),
    st.floats(0.05, 5.0),
    st.floats(0.0, 1800.0),
    st.floats(0.0, 3600.0),
    st.integers(0, 2**32),
)
def test_the_books_balance(
    between_h: float, interval_h: float, stall: float, restart: float, seed: int
) -> None:
    model = FailureModel(
        rate_per_s=1 / (between_h * HOUR),
        interval_s=min(interval_h, between_h) * HOUR,
        stall_s=min(stall, between_h * HOUR),
        lag_s=min(300.0, min(interval_h, between_h) * HOUR),
        restart_s=min(restart, between_h * HOUR),
        detection_s=60.0,
        shares=(0.5, 0.5),
        takes_node=(True, False),
        spares=1,
        repair_s=HOUR,
    )
    outcome = simulate_failures([7.3 * HOUR, 2.1 * HOUR], model, 4, seed)
    assert books_balance(outcome)
    assert (outcome.wall >= outcome.work + outcome.checkpoints - 1e-6).all()
