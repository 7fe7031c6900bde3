"""All-reduces that switches add up: published rates, rings where they are faster, refusals where none can."""

from __future__ import annotations

from dataclasses import replace

import pytest

import moesim
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.library_collectives import ring_seconds
from moesim.simulator.dispatchers.protocol import Links

PROFILE = load_profile("h800-trace")
H200 = Links(450e9, 3.33e-6, 50e9, 5e-6, 8, in_network="scale-up", architecture="Hopper")
B200 = replace(H200, scale_up_bytes_per_s=900e9, architecture="Blackwell")
GIB = 2.0**30


def all_reduce_s(size: float, ranks: int, per_node: int, links: Links) -> float:
    return ring_seconds(size, ranks, per_node, links, PROFILE, "all_reduce")


@pytest.mark.parametrize(
    ("links", "ranks", "busbw"), [(H200, 8, 473.1), (H200, 6, 435.6), (B200, 8, 838.0), (B200, 6, 778.2)]
)
def test_large_all_reduces_reach_the_published_rates(links: Links, ranks: int, busbw: float) -> None:
    """stas00/ml-engineering, all-reduce of 8 GiB by NVLS."""
    algorithm = 8 * GIB / all_reduce_s(8 * GIB, ranks, ranks, links)
    assert algorithm * 2 * (ranks - 1) / ranks == pytest.approx(busbw * 1e9, rel=0.03)


def test_rings_stay_where_they_are_faster_and_where_nothing_adds_up() -> None:
    rings = replace(H200, in_network="none")
    small = 64 * 1024.0
    assert all_reduce_s(small, 8, 8, H200) == all_reduce_s(small, 8, 8, rings)
    assert all_reduce_s(8 * GIB, 8, 8, replace(H200, architecture="Ampere")) == all_reduce_s(
        8 * GIB, 8, 8, rings
    )
    assert all_reduce_s(GIB, 32, 8, H200) == all_reduce_s(GIB, 32, 8, rings)


def test_switches_of_the_network_halve_what_a_nic_sends() -> None:
    everywhere = replace(H200, in_network="all")
    switched, rings = (all_reduce_s(8 * GIB, 32, 8, links) for links in (everywhere, H200))
    assert 8 * GIB / switched == pytest.approx(248e9, rel=0.01)
    assert switched < rings


def test_switches_that_cannot_add_up_are_refused() -> None:
    home = "deepseek-v3-2048xh800"
    with pytest.raises(InputError) as caught:
        moesim.check(
            home, "cluster=mi300x-2048", "profile=generic-roofline", "communication.in_network=scale-up"
        )
    assert (caught.value.key, caught.value.nearest) == ("communication.in_network", ("none",))
    assert load_cluster("deepseek-h800-2048").accelerator.architecture == "Hopper"
    moesim.check(home, "communication.in_network=all")
