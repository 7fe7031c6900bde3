"""What a quantity can be: outside its range it is refused, with key, value, range and nearest legal value."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedFraction
from moesim.hwmodels.ranges import BY_DIMENSION, Range
from moesim.hwmodels.units import DIMENSIONS
from moesim.simulator.scenario import load_scenario

HOME = "deepseek-v3-2048xh800"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("variation.jitter_cv=1e300", r"variation\.jitter_cv: 1e\+300 is outside 0 to 1; nearest: 1$"),
        ("routing.expert_load_cv=11", r"routing\.expert_load_cv: 11 is outside 0 to 10; nearest: 10$"),
        ("routing.load={kind: zipf, exponent: 11}", r"exponent: 11 is outside 0 to 10; nearest: 10$"),
        (
            "cluster.node.nic_bandwidth=0 GB/s",
            r"nic_bandwidth: 0 B/s is outside 1 MB/s to 10 PB/s; nearest: 1 MB/s$",
        ),
        ("cluster.node.nics_per_gpu=0", r"nics_per_gpu: 0 is outside 1 to"),
        ("cluster.node.scale_up_latency=2 s", r"scale_up_latency: 2 s is outside 0 ns to 1 s; nearest: 1 s$"),
        (
            "cluster.node.accelerator.hbm_bandwidth=1e6 TB/s",
            r"hbm_bandwidth: .* is outside 1 MB/s to 10 PB/s",
        ),
        (
            "faults=[{kind: slow-gpu, gpu: 0, speed: 1.0e-9}]",
            r"speed=1e-09: should be greater than or equal to 0\.001",
        ),
        (
            "variation.clock_cv={value: 0.01, kind: assumed, source: a guess, date: undated, "
            "between: [0.01, 0.8]}",
            r"variation\.clock_cv: 0\.8 is outside 0 to 0\.5",
        ),
    ],
)
def test_what_lies_outside_is_refused(override: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_scenario(HOME, [override])


def test_both_ends_are_legal_and_the_nearest_one_is_named() -> None:
    for end in BY_DIMENSION["bytes_per_s"]:
        assert SourcedBytesPerSecond(value=end, kind="assumed", source="a test", date="undated").value == end
    assert Range(1.0, 2.0).problem(0.5, "fraction") == "0.5 is outside 1 to 2; nearest: 1"
    assert Range(1.0, 2.0).problem(3.0, "fraction") == "3 is outside 1 to 2; nearest: 2"
    assert Range(1.0, 2.0).problem(1.5, "fraction") == ""


def test_every_dimension_of_a_sourced_number_has_a_range_but_ratios() -> None:
    assert set(DIMENSIONS) - set(BY_DIMENSION) == {"fraction", "flop", "j"}
    assert SourcedFraction(value=7.0, kind="assumed", source="a test", date="undated").value == 7.0
