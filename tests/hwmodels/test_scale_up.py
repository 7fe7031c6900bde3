"""Scale-up networks: the shipped ones as published, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from topology_cases import network, node, torus

from moesim.hwmodels import InputError, Node, load_network, load_node, validate_model
from moesim.hwmodels.network import ScaleUp, list_scale_ups, load_scale_up
from moesim.hwmodels.topologies import Topology, build_topology

GPUS = {"nvl72": 72, "tpu-v5p-8x8x8": 512, "cloudmatrix384": 384, "mi300x-mesh": 8, "hgx-hopper": 8}


def shipped(name: str) -> Topology:
    return build_topology(node(GPUS[name], load_scale_up(name)), 1, load_network("single-node"))


def test_every_shipped_one_is_tried_here() -> None:
    assert sorted(GPUS) == list(list_scale_ups())


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
