from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.kernels.fit import (
    fit_latency_bandwidth,
    fit_saturating,
    fit_slow_down,
    fit_transfer,
    isotonic,
    medians,
)

# DeepEP dispatch of an 8-GPU H200 node in microseconds, by tokens and SMs: ai-dynamo/aiconfigurator@095f58a
# (Apache-2.0), h200_sxm; rounded. Hidden 7168 in FP8 with scales, top-8 of 256: 5.295 GPUs a token.
DEEPEP_DISPATCH_US = {
    512: {4: 304, 8: 175, 12: 132, 16: 107, 20: 100, 24: 96},
    1024: {4: 555, 8: 307, 12: 222, 16: 178, 20: 156, 24: 156},
    2048: {4: 1056, 8: 566, 12: 395, 16: 312, 20: 272, 24: 272},
    4096: {4: 2056, 8: 1067, 12: 740, 16: 571, 20: 494, 24: 502},
    8192: {4: 4056, 8: 2085, 12: 1424, 16: 1099, 20: 969, 24: 974},
    16384: {4: 8085, 8: 4263, 12: 2896, 16: 2248, 20: 1939, 24: 1926},
}


def deepep_rows() -> list[tuple[float, float, float]]:
    return [
        (tokens * 5.295 * 7392, sms, us * 1e-6)
        for tokens, row in DEEPEP_DISPATCH_US.items()
        for sms, us in row.items()
    ]


@settings(max_examples=10, deadline=None)
@given(
    latency_us=st.floats(1.0, 200.0),
    rate_gb_per_s=st.floats(10.0, 5000.0),
    seed=st.integers(0, 1000),
)
def test_latency_and_bandwidth_come_back_from_noisy_times(
    latency_us: float, rate_gb_per_s: float, seed: int
) -> None:
    rng = random.Random(seed)
    rate = rate_gb_per_s * 1e9
    # Sizes from a tenth to ten times the size where latency and payload take equally long.
    middle = latency_us * 1e-6 * rate
    rows = [
        (x, (latency_us * 1e-6 + x / rate) * (1 + rng.gauss(0, 0.01)))
        for x in (middle * 10 ** (k / 3) for k in range(-3, 4))
        for _ in range(5)
    ]
    found = fit_latency_bandwidth(rows)
    assert found.latency_s == pytest.approx(latency_us * 1e-6, rel=0.08)
    assert found.bytes_per_s == pytest.approx(rate, rel=0.08)
    assert found.quality.median < 0.03 and found.quality.left_out_median < 0.04


@pytest.mark.parametrize("bad", [0, 3, -1])
def test_one_outlier_does_not_move_the_line(bad: int) -> None:
    rng = random.Random(5)
    rows = [(x, (20e-6 + x / 300e9) * (1 + rng.gauss(0, 0.002))) for x in [2**k for k in range(18, 31)]]
    rows[bad] = rows[bad][0], rows[bad][1] * 1.6
    found = fit_latency_bandwidth(rows)
    assert found.bytes_per_s == pytest.approx(300e9, rel=0.02)
    assert found.latency_s == pytest.approx(20e-6, rel=0.05)
    assert found.quality.worst > 0.3  # the outlier is reported, not hidden


@pytest.mark.parametrize("sharpness", [1.5, 12.0])
def test_slope_and_limit_of_a_saturating_rate(sharpness: float) -> None:
    rng = random.Random(2)
    rows = [
        (n, ((45.0 * n) ** -sharpness + 370.0**-sharpness) ** (-1 / sharpness) * (1 + rng.gauss(0, 0.004)))
        for n in (1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 64, 132)
        for _ in range(3)
    ]
    found = fit_saturating(rows)
    assert found.slope == pytest.approx(45.0, rel=0.03)
    assert found.limit == pytest.approx(370.0, rel=0.02)
    assert found.quality.relative < 0.03
    assert found.at(found.sms_for(0.97)) == pytest.approx(0.97 * found.limit, rel=1e-6)


def test_a_rate_that_never_saturates_keeps_its_slope() -> None:
    found = fit_saturating([(n, 48.0 * n) for n in (1, 2, 4, 8)])
    assert found.at(3) == pytest.approx(144.0, rel=0.02)


def test_transfer_predicts_sms_and_tokens_left_out_of_the_fit_within_five_percent() -> None:
    rows = deepep_rows()
    for held_sms in (8, 20):
        found = fit_transfer([r for r in rows if r[1] != held_sms])
        errors = sorted(abs(found.seconds(b, n) / t - 1) for b, n, t in rows if n == held_sms)
        assert errors[len(errors) // 2] < 0.05
    sizes = sorted({r[0] for r in rows})
    for held in sizes[1:-1:2]:
        found = fit_transfer([r for r in rows if r[0] != held])
        errors = sorted(abs(found.seconds(b, n) / t - 1) for b, n, t in rows if b == held)
        assert errors[len(errors) // 2] < 0.05
    everything = fit_transfer(rows)
    assert everything.quality.left_out_median < 0.03
    assert 15e9 < everything.rate.slope < 25e9 and 300e9 < everything.rate.limit < 400e9


def test_slow_down_pools_what_falls_and_starts_at_one() -> None:
    found = fit_slow_down([(8, 1.25), (16, 1.19), (20, 1.31), (24, 1.31), (32, 1.41)])
    assert found.points == ((0.0, 1.0), (8.0, 1.22), (16.0, 1.22), (20.0, 1.31), (24.0, 1.31), (32.0, 1.41))
    assert found.raw[1] == (16.0, 1.19)
    falling = fit_slow_down([(8, 1.5), (16, 1.1), (20, 1.12), (32, 1.03)], falling=True)
    assert falling.points == ((8.0, 1.5), (16.0, 1.11), (20.0, 1.11), (32.0, 1.03))
    assert found.at(0) == 1.0 and found.at(18) == pytest.approx(1.265) and found.at(99) == pytest.approx(1.41)


def test_slow_down_takes_medians_and_never_falls_below_one() -> None:
    found = fit_slow_down([(8, 0.98), (8, 0.99), (8, 1.7), (16, 1.2), (16, 1.2)])
    assert found.points == ((0.0, 1.0), (8.0, 1.0), (16.0, 1.2))


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30))
def test_isotonic_is_monotone_keeps_the_mean_and_leaves_monotone_data_alone(values: list[float]) -> None:
    pooled = isotonic(values)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(pooled))
    assert math.isclose(sum(pooled), sum(values), rel_tol=1e-9)
    assert isotonic(sorted(values)) == sorted(values)


def test_medians_and_spread() -> None:
    points, spread = medians([(2, 10.0), (1, 5.0), (2, 12.0), (2, 11.0)])
    assert points == ((1.0, 5.0), (2.0, 11.0))
    assert spread == pytest.approx(1 / 11)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_latency_bandwidth([(1e6, 1e-5), (2e6, 2e-5)]), "at least 3"),
        (lambda: fit_latency_bandwidth([(1e6, 1e-5), (2e6, 1e-5), (3e6, 0.9e-5)]), "larger sizes"),
        (lambda: fit_saturating([(1, 1.0), (2, 2.0), (4, 4.0)]), "at least 4"),
        (lambda: fit_saturating([(0, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)]), "start at 1"),
        (lambda: fit_transfer([(1e6, 4, 1e-3)] * 20), "too few"),
        (lambda: fit_slow_down([(0, 1.0)]), "at least 1"),
        (lambda: medians([(1, -1.0)]), "positive"),
        (lambda: medians([(1, math.nan)]), "positive"),
    ],
)
def test_unusable_measurements_are_input_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
