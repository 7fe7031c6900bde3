"""Rates of bursts are corrected to those of a training step in one place, and say so."""

from __future__ import annotations

from statistics import median

import pytest

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import (
    CalibrationProfile,
    MeasuredCurve,
    list_profiles,
    load_profile,
    without_entries,
)
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.compute import OperatorCost, SmContext, operator_seconds
from moesim.simulator.model.primitives import gemm

BURSTS = ("a100-layers", "b200-layers", "b300-layers", "gb200-layers", "gb300-layers", "h100-layers")
ACCELERATOR = {"a100-layers": "a100-sxm", "b200-layers": "b200-sxm", "gb200-layers": "gb200"}

BURSTS_OF_H200 = {
    (4096, 1536, 6144): 775.8,
    (2048, 2048, 8192): 741.8,
    (2048, 2560, 8192): 735.6,
    (2048, 3072, 12288): 773.8,
    (4096, 4096, 4096): 781.8,
    (4096, 4096, 6144): 802.8,
    (8192, 4096, 16384): 721.6,
    (2048, 6144, 4096): 752.1,
    (2048, 6144, 65536): 711.0,
    (2048, 7168, 8192): 783.5,
    (2048, 8192, 2048): 739.7,
    (2048, 8192, 2560): 750.8,
    (2048, 8192, 7168): 782.8,
    (8192, 8192, 8192): 639.1,
    (2048, 12288, 12288): 798.2,
    (2048, 65536, 6144): 700.9,
}


def price(profile: CalibrationProfile, m: int, n: int, k: int, dtype: str = "bf16") -> OperatorCost:
    op = gemm("x", "F", m, n, k, dtype)  # type: ignore[arg-type]
    return operator_seconds(op, load_accelerator(profile.accelerator), profile, SmContext())


def is_attention(curve: MeasuredCurve) -> bool:
    return any("attention_forward" in use or "attention_backward" in use for use in curve.used_for)


@pytest.mark.parametrize("name", list_profiles())
def test_every_rate_of_gemms_and_attention_says_how_long_it_ran(name: str) -> None:
    profile = load_profile(name)
    rates = [*profile.gemm_tables, *filter(is_attention, profile.curves)]
    assert all(entry.conditions.duty for entry in rates), [e.id for e in rates if not e.conditions.duty]
    for entry in rates:
        if entry.id.startswith("h200"):
            # This attention ran at the clock of a burst, as h200-power showed later.
            assert (entry.conditions.duty == "burst") == entry.id.startswith("h200-measured.attention")


@pytest.mark.parametrize("name", BURSTS)
def test_a_burst_is_slower_by_the_ratio_at_its_own_duration(name: str) -> None:
    profile = load_profile(name)
    table = next(t for t in profile.gemm_tables if t.dtype == "bf16")
    ratio = next(c for c in profile.curves if "sustained/gemm/bf16" in c.used_for)
    m, n, k, _, rate = table.points[-1][:5]
    burst_s = 2.0 * m * n * k / (rate * 1e12)
    cost = price(profile, int(m), int(n), int(k))
    idle = profile.launch_gap.value if profile.launch_gap else 0.0
    expected = burst_s / ratio.curve.at(burst_s).value + idle
    assert cost.seconds == pytest.approx(expected, rel=1e-9)
    assert cost.curve_ids[:2] == (table.id, ratio.id)


def test_without_the_ratio_the_burst_is_used_and_named() -> None:
    whole = load_profile("b200-layers")
    bare = without_entries(whole, ("*-sustained.*",))
    shape = (4096, 8192, 8192)
    assert bare.launch_gap is not None
    burst_s = 2 * 4096 * 8192 * 8192 / 1474.2e12
    assert price(bare, *shape).seconds == pytest.approx(burst_s + bare.launch_gap.value)
    assert any("short bursts" in note for note in price(bare, *shape).assumptions)
    assert not any("short bursts" in note for note in price(whole, *shape).assumptions)
    assert without_entries(whole, ("*-sustained.*",)) is bare
    with pytest.raises(InputError, match=r"no entry 'b200\.x'"):
        without_entries(whole, ("b200.x",))


def test_corrected_bursts_of_an_h200_would_meet_what_was_measured_back_to_back() -> None:
    """Burst rates (TFLOP/s) of sglang 0.5.14 and trtllm 1.3.0rc20 on H200 at shapes of h200-products."""
    ratio = next(c for c in load_profile("hopper-sustained").curves if c.id.endswith("gemm_bf16"))
    own = {row[:3]: row[4] for t in load_profile("h200-products").gemm_tables
           if t.id == "h200-products.gemm_bf16" for row in t.points}  # fmt: skip
    errors = []
    for (m, n, k), burst in BURSTS_OF_H200.items():
        seconds = 2.0 * m * n * k / (burst * 1e12)
        errors.append(burst * ratio.curve.at(seconds).value / own[(m, n, k)] - 1.0)
    assert abs(median(errors)) < 0.03 and max(abs(e) for e in errors) < 0.15
