from __future__ import annotations

import functools
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels import (
    InputError,
    build_topology,
    load_network,
    load_node,
    route_bytes_per_s,
    route_latency_s,
)
from moesim.hwmodels.topologies import Topology
from moesim.hwmodels.topologies.two_layer import TreeShape

CASES = [("mpft-ib-400g", 256), ("mpft-ib-400g", 2048), ("mpft-ib-400g", 33), ("mrft-ib-400g", 256),
         ("mrft-ib-400g", 5), ("single-node", 1)]  # fmt: skip


@functools.cache
def topology(network: str, nodes: int) -> Topology:
    return build_topology(load_node("hgx-h800"), nodes, load_network(network))


@functools.cache
def graph(network: str, nodes: int) -> nx.Graph:
    return topology(network, nodes).graph()


@settings(max_examples=200)
@given(st.sampled_from([case for case in CASES if case[1] < 2048]), st.data())
def test_a_route_is_a_path_of_the_graph(case: tuple[str, int], data: st.DataObject) -> None:
    topo, drawn = topology(*case), graph(*case)
    src, dst = (data.draw(st.integers(0, topo.n_gpus - 1)) for _ in range(2))
    route = topo.route(src, dst)
    if src == dst:
        assert route == ()
        return
    assert (route[0].tail, route[-1].head) == (f"gpu:{src}", f"gpu:{dst}")
    assert all(link.head == after.tail for link, after in pairwise(route))
    for link in route:
        edge = drawn.edges[link.tail, link.head]
        assert edge["kind"] == link.kind
        assert edge["bytes_per_s"] == link.bytes_per_s <= link.nominal_bytes_per_s
        cable = int(link.id.partition("#")[2] or 0)
        assert 0 <= cable < edge["cables"]
    assert len(route) == len({link.id for link in route})


@given(st.sampled_from(CASES), st.data())
def test_latency_and_bandwidth_of_routes(case: tuple[str, int], data: st.DataObject) -> None:
    topo = topology(*case)
    src, dst = (data.draw(st.integers(0, topo.n_gpus - 1)) for _ in range(2))
    route = topo.route(src, dst)
    kinds = [link.kind for link in route]
    network_s = (3.7e-6 if "leaf-spine" in kinds else 2.8e-6) if "nic" in kinds else 0.0
    inside_s = 3.33e-6 if "nvlink" in kinds else 0.0
    assert route_latency_s(route) == pytest.approx(network_s + inside_s)
    if topo.node_of(src) != topo.node_of(dst):
        assert route_bytes_per_s(route) == 40e9
        assert kinds.count("nic") == 2
    elif src != dst:
        assert kinds == ["nvlink", "nvlink"]
        assert route_bytes_per_s(route) == 160e9


@given(st.integers(0, 2047), st.integers(0, 2047))
def test_planes_meet_only_inside_nodes(src: int, dst: int) -> None:
    topo = topology("mpft-ib-400g", 256)
    route = topo.route(src, dst)
    names = [name for link in route for name in (link.tail, link.head)]
    planes = {name.split(".")[0] for name in names if name.startswith("plane")}
    if topo.node_of(src) == topo.node_of(dst):
        assert planes == set()
        return
    assert planes == {f"plane{dst % 8}"}
    forwards = [link for link in route if link.kind == "nvlink"]
    assert bool(forwards) == (src % 8 != dst % 8)
    if forwards:
        assert route[:2] == tuple(forwards)
        assert forwards[-1].head == f"gpu:{src // 8 * 8 + dst % 8}"


def count(drawn: nx.Graph) -> tuple[int, int]:
    """(switches outside the nodes, cables between them)."""
    switches = [n for n, data in drawn.nodes(data=True) if data["kind"] in ("leaf", "spine")]
    cables = sum(data["cables"] for _, _, data in drawn.edges(data=True) if data["kind"] == "leaf-spine")
    return len(switches), cables


def test_published_counts_of_switches_and_links() -> None:
    # arXiv 2505.09343, Table 3: FT2 with 2,048 endpoints, MPFT with 16,384.
    assert count(graph("mrft-ib-400g", 256)) == (96, 2048)
    full = topology("mpft-ib-400g", 2048)
    assert full.n_gpus == 16384
    assert count(graph("mpft-ib-400g", 2048)) == (768, 16384)


def test_the_home_case_has_eight_planes_of_eight_leaves_and_four_spines() -> None:
    assert count(graph("mpft-ib-400g", 256)) == (8 * (8 + 4), 8 * 256)
    assert graph("mpft-ib-400g", 256).number_of_nodes() == 2048 + 256 + 96


@pytest.mark.parametrize("case", [case for case in CASES if case[1] < 2048])
def test_no_switch_has_more_cables_than_ports(case: tuple[str, int]) -> None:
    drawn = graph(*case)
    for name, data in drawn.nodes(data=True):
        cables = sum(edge["cables"] for _, _, edge in drawn.edges(name, data=True))
        if data["kind"] in ("leaf", "spine"):
            assert cables <= 64
    assert nx.is_connected(drawn)


@given(st.integers(1, 64), st.sampled_from([4, 8, 40, 64]))
def test_trees_are_non_blocking_and_fit_their_ports(leaves: int, ports: int) -> None:
    if leaves > ports:
        with pytest.raises(InputError, match=f"at most {ports} leaves"):
            TreeShape.for_leaves(leaves, ports)
        return
    tree = TreeShape.for_leaves(leaves, ports)
    if leaves == 1:
        assert tree.spines == 0
        return
    assert tree.spines * tree.bundle == ports // 2
    assert leaves * tree.bundle <= ports


@given(st.integers(1, 255))
def test_shifting_all_nodes_uses_every_uplink_once(shift: int) -> None:
    topo = topology("mpft-ib-400g", 256)
    used: dict[str, int] = {}
    for node in range(256):
        for link in topo.route(node * 8, (node + shift) % 256 * 8):
            used[link.id] = used.get(link.id, 0) + 1
    assert max(used.values()) == 1


def test_rails_share_leaves_in_the_single_plane() -> None:
    topo = topology("mrft-ib-400g", 256)
    same_rail = topo.route(0, 8)
    other_rail = topo.route(0, 9)
    assert [link.kind for link in same_rail] == ["nic", "nic"]
    assert [link.kind for link in other_rail] == ["nic", "leaf-spine", "leaf-spine", "nic"]


@pytest.mark.parametrize("gpu", [-1, 8])
def test_gpus_that_do_not_exist(gpu: int) -> None:
    for pair in ((gpu, 0), (0, gpu)):
        with pytest.raises(InputError, match=f"there is no GPU {gpu}.*0 to 7"):
            topology("single-node", 1).route(*pair)
