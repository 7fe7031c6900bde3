"""Faults: dead links are avoided, rates scale, isolated ranks are named."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from topology_cases import SPREADINGS, cases, check_flow, pairs

from moesim.hwmodels import InfeasibleError, InputError
from moesim.hwmodels.topologies import LinkFault, Spreading

CASES = [
    ("multi-plane", "plane", "plane:2"),
    ("multi-plane", "nic", "nic:6"),
    ("multi-plane", "switch", "plane1.leaf:0"),
    ("fat-tree-2", "switch", "spine:0"),
    ("fat-tree-2", "switch", "leaf:3"),
    ("fat-tree-2", "link", "leaf:0->spine:1#0"),
    ("fat-tree-2", "gpu-links", "gpu:5"),
    ("fat-tree-2-over", "switch", "spine:1"),
    ("fat-tree-3", "switch", "middle:0.1"),
    ("fat-tree-3", "switch", "core:2.0"),
    ("fat-tree-3", "switch", "leaf:4"),
    ("rails", "switch", "leaf:2"),
    ("rails-spine", "switch", "spine:0"),
    ("dragonfly-9", "nic", "nic:4"),
    ("dragonfly-9", "switch", "router:2.1"),
    ("dragonfly-9", "link", "router:0.0->router:0.1"),
    ("mesh", "link", "gpu:2->gpu:6"),
    ("mesh-rails", "gpu-links", "gpu:9"),
    ("torus-4x3x2", "link", "gpu:0->gpu:1"),
    ("torus-5x4", "link", "gpu:19->gpu:15"),
    ("torus-2x1x6", "link", "gpu:0->gpu:1"),
    ("supernode", "switch", "l2:0.3"),
    ("nvl72", "nic", "nic:80"),
    ("edge-list", "switch", "spine:1"),
]


@pytest.mark.parametrize(("name", "kind", "target"), CASES)
@pytest.mark.parametrize("spreading", SPREADINGS)
def test_dead_links_are_routed_around(name: str, kind: str, target: str, spreading: str) -> None:
    healthy = cases()[name]
    topo = healthy.degraded([LinkFault(kind, target)])  # type: ignore[arg-type]
    dead = topo.links().bytes_per_s == 0
    assert dead.any() and not (healthy.links().bytes_per_s == 0).any()
    src, dst = pairs(topo)
    before = healthy.routes(src, dst, cast("Spreading", spreading), 1)
    routes = topo.routes(src, dst, cast("Spreading", spreading), 1)
    assert not dead[routes.links].any()
    check_flow(topo, src, dst, routes)
    row = np.repeat(np.arange(len(src)), np.diff(before.indptr))
    untouched = np.setdiff1d(np.arange(len(src)), row[dead[before.links]])
    if spreading != "ideal" and name != "edge-list":
        for pair in untouched[::7]:
            old, new = (r.links[r.indptr[pair] : r.indptr[pair + 1]] for r in (before, routes))
            assert np.array_equal(old, new), "a fault elsewhere moved a route"
    again = topo.routes(src, dst, cast("Spreading", spreading), 1)
    assert np.array_equal(again.links, routes.links) and np.array_equal(again.share, routes.share)


def test_a_lost_plane_is_forwarded_to_evenly() -> None:
    topo = cases()["multi-plane"].degraded([LinkFault("plane", "plane:2")])
    g = topo.n_gpus
    src, dst = (x.ravel() for x in np.meshgrid(np.arange(g), np.arange(g)))
    across = src // 4 != dst // 4
    for spreading in SPREADINGS:
        routes = topo.routes(src[across], dst[across], cast("Spreading", spreading))
        load = np.bincount(routes.links, weights=routes.share, minlength=len(topo.links().ids))
        nics = load[(np.array(topo.links().kinds) == "nic") & (topo.links().bytes_per_s > 0)]
        assert nics.max() / nics.mean() < 1.15
    forwarded = topo.route(1, 6)  # plane 1 to plane 2: received on plane 1, forwarded there
    assert [link.kind for link in forwarded] == ["nic", "nic", "nvlink", "nvlink"]


def test_degraded_links_carry_less_and_keep_their_routes() -> None:
    healthy = cases()["fat-tree-2"]
    topo = healthy.degraded([LinkFault("nic", "nic:0", 0.5)])
    assert topo.route(0, 4)[0].bytes_per_s == 0.5 * healthy.route(0, 4)[0].bytes_per_s
    assert topo.route(0, 4)[0].nominal_bytes_per_s == healthy.route(0, 4)[0].nominal_bytes_per_s
    twice = topo.degraded([LinkFault("nic", "nic:0", 0.5)])
    assert twice.route(0, 4)[0].bytes_per_s == 0.25 * healthy.route(0, 4)[0].bytes_per_s
    assert healthy.route(0, 4)[0].bytes_per_s == 40e9


def test_ideal_spreading_follows_what_is_left() -> None:
    name = "leaf:0->spine:0#0"
    topo = cases()["fat-tree-2"].degraded([LinkFault("link", name, 0.5)])
    src, dst = np.array([0]), np.array([5])
    routes = topo.routes(src, dst, "ideal")
    share = {topo.links().ids[n]: s for n, s in zip(routes.links, routes.share, strict=True)}
    up = {link: s for link, s in share.items() if link.startswith("leaf:0->spine")}
    assert up.pop(name) == pytest.approx(0.5 / 3.5)
    assert list(up.values()) == pytest.approx([1 / 3.5] * 3)


def test_a_chip_of_a_striped_switch_takes_its_part_of_every_port() -> None:
    healthy = cases()["nvl72"]
    for fault in (LinkFault("switch", "nvswitch:0.17"), LinkFault("plane", "scale-up:3")):
        topo = healthy.degraded([fault])
        rate = topo.route(0, 71)[0].bytes_per_s / healthy.route(0, 71)[0].bytes_per_s
        assert rate == pytest.approx(17 / 18)
    other = healthy.degraded([LinkFault("switch", "nvswitch:0.17")]).route(72, 73)[0]
    assert other.bytes_per_s == healthy.route(72, 73)[0].bytes_per_s
    plane = cases()["supernode"].degraded([LinkFault("plane", "scale-up:0")])
    assert plane.route(0, 4)[1].bytes_per_s == pytest.approx(
        2 / 3 * cases()["supernode"].route(0, 4)[1].bytes_per_s
    )


@pytest.mark.parametrize(
    ("name", "faults", "rank"),
    [
        ("nvswitch", [LinkFault("gpu-links", "gpu:3")], "gpu:3"),
        ("fat-tree-2", [LinkFault("gpu-links", "gpu:6"), LinkFault("nic", "nic:6")], "gpu:6"),
        ("mesh", [LinkFault("gpu-links", "gpu:7")], "gpu:7"),
        ("torus-5x4", [LinkFault("gpu-links", "gpu:11")], "gpu:11"),
        ("edge-list", [LinkFault("link", "gpu:5->inside:1")], "gpu:5"),
        ("multi-plane", [LinkFault("plane", f"plane:{p}") for p in range(4)], "gpu:"),
    ],
)
def test_isolated_ranks_are_named(name: str, faults: list[LinkFault], rank: str) -> None:
    with pytest.raises(InfeasibleError, match=f"rank {rank}.* cannot be reached"):
        cases()[name].degraded(faults)


def test_a_pair_without_a_detour_is_named() -> None:
    """Without NVLink a GPU reaches no other plane, though the graph hangs together."""
    topo = cases()["multi-plane"].degraded([LinkFault("gpu-links", "gpu:0")])
    assert next(link.kind for link in topo.route(0, 8)) == "nic"
    with pytest.raises(InfeasibleError, match="from rank gpu:0 to rank gpu:1"):
        topo.route(0, 1)
    with pytest.raises(InfeasibleError, match=r"from rank gpu:0 to rank gpu:1 \(and for 1 more pairs\)"):
        topo.routes(np.array([0, 0, 4]), np.array([1, 2, 5]), "ideal")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (LinkFault("nic", "nic:80"), "nic:N with N from 0 to 79"),
        (LinkFault("nic", "3"), "write nic:N"),
        (LinkFault("switch", "plane0.leaf:77"), r"no vertex 'plane0.leaf:77' \(nearest"),
        (LinkFault("switch", "gpu:3"), "a GPU, not a switch"),
        (LinkFault("plane", "plane:4"), "plane:N with N from 0 to 3"),
        (LinkFault("plane", "scale-up:0"), "not striped"),
        (LinkFault("link", "gpu:0"), "written tail->head"),
        (LinkFault("link", "gpu:0->gpu:1"), "no such link"),
        (LinkFault("link", "plane0.leaf:0->plane0.spine:0#9"), "no such link"),
        (LinkFault("nic", "nic:0", 1.5), "factor=1.5"),
        (LinkFault("nic", "nic:0", float("nan")), "factor=nan"),
        (LinkFault("cable", "x"), "fault kind 'cable' is not one of"),  # type: ignore[arg-type]
    ],
)
def test_bad_faults(fault: LinkFault, words: str) -> None:
    with pytest.raises(InputError, match=words):
        cases()["multi-plane"].degraded([fault])
    with pytest.raises(InputError, match="has no planes"):
        cases()["fat-tree-2"].degraded([LinkFault("plane", "plane:0")])
