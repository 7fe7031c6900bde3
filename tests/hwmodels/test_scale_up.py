"""Scale-up networks: the shipped ones as published, and what is refused."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from topology_cases import network, node, torus

from moesim.hwmodels import InputError, Node, load_network, load_node, validate_model
from moesim.hwmodels.network import ScaleUp, load_scale_up
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.hwmodels.topologies.description import SWITCHED
from moesim.hwmodels.topologies.scale_up_parts import MeshShares
from moesim.hwmodels.topologies.torus import TorusShares

GPUS = {"nvl72": 72, "tpu-v5p-8x8x8": 512, "cloudmatrix384": 384, "mi300x-mesh": 8, "hgx-hopper": 8}


def shipped(name: str) -> Topology:
    return build_topology(node(GPUS[name], load_scale_up(name)), 1, load_network("single-node"))


@pytest.mark.parametrize(
    ("name", "switches", "cables"),
    [
        ("hgx-hopper", {"nvswitch": 4}, {"nvlink": 8 * 18}),
        ("nvl72", {"nvswitch": 18}, {"nvlink": 72 * 18}),
        ("mi300x-mesh", {}, {"mesh": 28}),
        ("tpu-v5p-8x8x8", {}, {"torus": 3 * 512}),
        # 48 nodes of 7 first-level chips, 112 second-level ones in 7 planes of 16.
        (
            "cloudmatrix384",
            {"scale-up-l1": 336, "scale-up-l2": 112},
            {"nvlink": 2688, "scale-up-trunk": 5376},
        ),
    ],
)
def test_counts_of_the_shipped_ones(name: str, switches: dict[str, int], cables: dict[str, int]) -> None:
    counted = shipped(name).inventory()
    assert counted.switches == switches and counted.cables == cables
    assert counted.endpoints == counted.inter_switch_links == 0 and counted.total_usd is None


def test_no_level_of_the_supernode_is_oversubscribed() -> None:
    """Every NPU of a host sends to another host at once: trunks carry no more than ports."""
    topo = shipped("cloudmatrix384")
    table = topo.links()
    src = np.arange(384)
    routes = topo.routes(src, (src + 8) % 384, "ideal")
    load = np.bincount(routes.links, weights=routes.share, minlength=len(table.ids))
    ports = table.nominal_bytes_per_s[0]
    assert (load * ports <= table.nominal_bytes_per_s * (1 + 1e-9)).all()


def test_the_torus_is_as_wide_as_published() -> None:
    topo = shipped("tpu-v5p-8x8x8")
    assert topo.longest_route() == 12  # 4 hops a dimension
    assert topo.links().nominal_bytes_per_s[0] * 6 == 600e9


def test_a_node_takes_a_name_or_a_mapping() -> None:
    data = load_node("hgx-h200").model_dump(mode="json", exclude_none=True)
    named = validate_model(Node, {**data, "scale_up": "hgx-hopper"}, "n.yaml")
    assert named.scale_up is not None and named.scale_up.kind == "nvswitch"
    again = validate_model(Node, named.model_dump(mode="json", exclude_none=True), "n.yaml")
    assert again == named
    with pytest.raises(InputError, match="unknown scale-up network 'nvl27'"):
        validate_model(Node, {**data, "scale_up": "nvl27"}, "n.yaml")


LINKS = {"link_bandwidth": "1 GB/s", "link_bandwidth_effective": "1 GB/s"}
SUPER = {"gpus_per_host": "3", "planes": "1", "second_level_switches": "1", "latency_across_hosts": "1 us"}


@pytest.mark.parametrize(
    ("kind", "fabric", "words"),
    [
        ("mesh", LINKS, r"unknown kind 'mesh'"),
        ("torus", None, "needs the key fabric"),
        ("torus", {**LINKS, "dimensions": ["2"] * 4, "latency_per_hop": "1 us"}, "1 to 3 dimensions"),
        ("fully-connected", {**LINKS, "lanes": "3"}, "lanes: unknown key"),
        ("fully-connected", {"link_bandwidth": "1 GB/s"}, "link_bandwidth_effective is missing"),
        ("nvswitch", {"switches": "0", "links_per_gpu": "4"}, "switches: 0 is outside 1 to"),
        ("supernode", {**SUPER, "planes": "0"}, "planes: 0 is outside 1 to"),
    ],
)
def test_bad_scale_up_networks(kind: str, fabric: dict[str, Any] | None, words: str) -> None:
    data = {"kind": kind, **({} if fabric is None else {"fabric": fabric})}
    with pytest.raises(InputError, match=words):
        validate_model(ScaleUp, data, "s.yaml")


@pytest.mark.parametrize(
    ("gpus", "kind", "fabric", "words"),
    [
        (8, "supernode", SUPER, "gpus_per_host=3 does not divide the 8 GPUs"),
        (8, "nvswitch", {"switches": "4", "links_per_gpu": "2"}, "fewer than switches=4"),
        (8, "scale-up-domain", {"switches": "2", "links_per_gpu": "3", "gpus_per_host": "4"}, "no multiple"),
        (
            8,
            "scale-up-domain",
            {"switches": "2", "links_per_gpu": "4", "gpus_per_host": "3"},
            "does not divide",
        ),
    ],
)
def test_networks_that_do_not_fit_the_node(gpus: int, kind: str, fabric: dict[str, Any], words: str) -> None:
    section = validate_model(ScaleUp, {"kind": kind, "fabric": fabric}, "s.yaml")
    with pytest.raises(InputError, match=words):
        build_topology(node(gpus, section), 1, load_network("single-node"))


def test_a_torus_must_make_up_the_node() -> None:
    with pytest.raises(InputError, match="dimensions 2x3 are 6 chips, but node 'hgx-h800' has 8"):
        build_topology(node(8, torus(2, 3)), 1, load_network("single-node"))


def test_price_lists_are_found_when_the_network_is_read() -> None:
    with pytest.raises(InputError, match="unknown price list of a network 'ndr'"):
        data = load_network("mrft-ib-400g").model_dump(mode="json", exclude_none=True)
        validate_model(type(network("single-node")), {**data, "prices": "ndr"}, "n.yaml")


# -- shares of the scale-up rate -----------------------------------------------------------------------

MESH = MeshShares(1 / 7, 8)  # eight MI300X
TORUS = TorusShares(1 / 6, (8, 16, 16))  # a slice of TPU v5p
SMALL = TorusShares(1 / 4, (4, 4))


def worst_link_load(sizes: tuple[int, ...], wraps: tuple[bool, ...]) -> float:
    """Busiest directed link of a uniform all-to-all by dimension-order routes, counted chip by chip.

    In units of what one chip sends; ties around a ring go half each way.
    """
    chips = list(product(*(range(n) for n in sizes)))
    load: dict[tuple[tuple[int, ...], int, int], float] = {}
    for src in chips:
        for dst in chips:
            if src == dst:
                continue
            at = list(src)
            for axis, n in enumerate(sizes):
                ahead = (dst[axis] - at[axis]) % n
                ways: list[tuple[int, float, int]] = []
                if not wraps[axis]:
                    step = 1 if dst[axis] > at[axis] else -1
                    ways = [(step, 1.0, abs(dst[axis] - at[axis]))]
                elif 2 * ahead == n:
                    ways = [(1, 0.5, ahead), (-1, 0.5, ahead)]
                else:
                    ways = [(1, 1.0, ahead)] if 2 * ahead < n else [(-1, 1.0, n - ahead)]
                for step, share, hops in ways:
                    place = list(at)
                    for _ in range(hops):
                        key = (tuple(place), axis, step)
                        load[key] = load.get(key, 0.0) + share
                        place[axis] = (place[axis] + step) % n
                at[axis] = dst[axis]
    return max(load.values()) / (len(chips) - 1)


@pytest.mark.parametrize(
    ("torus", "block"),
    [
        ((4, 4), (4, 4)),
        ((4, 4), (2, 4)),
        ((8, 4), (4, 4)),
        ((5, 3), (5, 3)),
        ((4, 4, 4), (4, 4, 4)),
        ((6, 6), (3, 3)),
    ],
)
def test_the_cut_of_a_torus_equals_the_busiest_link_of_routes(
    torus: tuple[int, ...], block: tuple[int, ...]
) -> None:
    n = prod(block)
    wraps = tuple(side == size and size >= 3 for side, size in zip(block, torus, strict=True))
    expected = worst_link_load(block, wraps)
    shares = TorusShares(0.01, torus)  # far below the cap of one GPU's whole rate
    best = max(
        0.01 / worst_link_load(b, tuple(s == t and t >= 3 for s, t in zip(b, torus, strict=True)))
        for b in shares._blocks(n)
    )
    assert shares.all_to_all(n) == pytest.approx(best)
    assert shares.all_to_all(n) >= 0.01 / expected * (1 - 1e-12)


def test_a_cube_of_64_chips_of_a_larger_torus_gets_one_link() -> None:
    """4x4x4 without wrap: half of the bytes cross 16 links from 32 chips, so 63/64 of a link a chip."""
    assert TORUS.all_to_all(64) == pytest.approx(1 / 6 * 63 / 64)
    assert TorusShares(1 / 6, (4, 4, 4)).all_to_all(64) == pytest.approx(2 / 6 * 63 / 64)


def test_mesh_and_switch() -> None:
    assert [MESH.all_to_all(n) for n in (2, 4, 8)] == pytest.approx([1 / 7, 3 / 7, 1.0])
    assert MESH.ring(8) == 1.0 and MESH.ring(2) == MESH.pair() == pytest.approx(1 / 7)
    assert SWITCHED.all_to_all(72) == SWITCHED.ring(72) == SWITCHED.pair() == 1.0
    assert all(shares.all_to_all(1) == shares.ring(1) == 1.0 for shares in (MESH, TORUS, SWITCHED))


def test_rings_use_the_dimensions_that_they_span() -> None:
    assert TORUS.ring(2048) == pytest.approx(1.0)  # three rings, both ways
    assert TORUS.ring(2) == pytest.approx(1 / 6)  # one cable
    assert TORUS.ring(8) == pytest.approx(3 / 6)  # 2x2x2; a ring of 8 in x alone has 2 of the 6 links
    assert TORUS.ring(16) == pytest.approx(3 / 6)  # 8 around and 2 across
    assert SMALL.ring(3) == pytest.approx(1 / 4)  # no block: one link


def test_a_group_that_is_no_block_is_refused_by_its_number() -> None:
    with pytest.raises(InputError, match=r"a group of 24 chips is no block of the 8x16x16 torus"):
        TORUS.all_to_all(24)
