"""Routes of every kind of topology, as arrays: paths of the graph, conserved bytes, closed forms."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import cast

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topology_cases import SITES, SPREADINGS, cases, check_flow, network, node, pairs

from moesim.hwmodels import InputError, load_network
from moesim.hwmodels.topologies import Spreading, Topology, build_topology
from moesim.hwmodels.topologies.fat_tree import Trees

NAMES = sorted(cases())


@functools.cache
def graph(name: str) -> nx.Graph:
    return cases()[name].graph()


@pytest.mark.parametrize("spreading", SPREADINGS)
@pytest.mark.parametrize("name", NAMES)
def test_every_route_conserves_flow(name: str, spreading: str) -> None:
    topo = cases()[name]
    src, dst = pairs(topo, 60)
    routes = topo.routes(src, dst, cast("Spreading", spreading), seed=3)
    assert len(routes.indptr) == len(src) + 1 and len(routes.latency_s) == len(src)
    check_flow(topo, src, dst, routes)
    key = np.repeat(np.arange(len(src)), np.diff(routes.indptr)) * 10**7 + routes.links
    assert len(np.unique(key)) == len(key), "a link stands twice in one route"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_one_route_is_the_array_route_and_a_path_of_the_graph(name: str, data: st.DataObject) -> None:
    topo = cases()[name]
    src, dst = (data.draw(st.integers(0, topo.n_gpus - 1)) for _ in range(2))
    route = topo.route(src, dst)
    routes = topo.routes(np.array([src]), np.array([dst]))
    table = topo.links()
    assert [link.id for link in route] == [table.ids[n] for n in routes.links]
    assert routes.latency_s[0] == sum(link.latency_s for link in route)
    if src == dst:
        assert route == ()
        return
    assert (route[0].tail, route[-1].head) == (f"gpu:{src}", f"gpu:{dst}")
    assert all(link.head == after.tail for link, after in pairwise(route))
    for link, number in zip(route, routes.links.tolist(), strict=True):
        edge = graph(name).edges[link.tail, link.head]
        assert edge["kind"] == link.kind == table.kinds[number]
        assert table.bytes_per_s[number] == link.bytes_per_s <= link.nominal_bytes_per_s
        assert link.bytes_per_s == pytest.approx(edge["bytes_per_s"]) or name == "edge-list"


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("rails", "rails-3", "mesh-rails", "supernode", "nvl72")]
)
def test_routes_are_as_short_as_the_graph_allows(name: str) -> None:
    """Multi-plane routes too: forwarding inside a node is the only way to another plane."""
    topo = cases()[name]
    src, dst = pairs(topo, 60)
    lengths = np.diff(topo.routes(src, dst).indptr)
    best = dict(nx.all_pairs_shortest_path_length(graph(name)))
    shortest = np.array([best[f"gpu:{s}"][f"gpu:{d}"] for s, d in zip(src, dst, strict=True)])
    through_gpus = 0 if "planes" not in name and name != "multi-plane" else 2
    if "fly" in name:  # minimal between groups: a chain over a third group is no route
        assert (lengths <= 5).all() and (lengths >= shortest).all()
    else:
        assert (lengths <= shortest + through_gpus).all() and (lengths >= shortest).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_connected_and_holds_every_cable(name: str) -> None:
    topo, drawn = cases()[name], graph(name)
    assert nx.is_connected(drawn)
    assert drawn.number_of_nodes() == topo.wiring.n_vertices
    assert sum(edge["cables"] for *_, edge in drawn.edges(data=True)) == topo.wiring.n_cables
    assert len(topo.links().ids) == 2 * topo.wiring.n_cables == len(set(topo.links().ids))


@pytest.mark.parametrize("name", NAMES)
def test_the_inventory_counts_what_the_graph_shows(name: str) -> None:
    topo, drawn = cases()[name], graph(name)
    counted = topo.inventory()
    kinds: dict[str, int] = {}
    for _, data in drawn.nodes(data=True):
        if data["kind"] != "gpu":
            kinds[data["kind"]] = kinds.get(data["kind"], 0) + data["chips"]
    assert counted.switches == {kind: n for kind, n in kinds.items() if n}
    strands = {run.kind: run.strands for run in topo.wiring.cables}
    cables: dict[str, int] = {}
    for *_, edge in drawn.edges(data=True):
        cables[edge["kind"]] = cables.get(edge["kind"], 0) + edge["cables"] * strands[edge["kind"]]
    assert counted.cables == {kind: n for kind, n in cables.items() if n}  # a stated link has no count
    if name in ("fat-tree-2", "fat-tree-3", "dragonfly-9", "two-nics"):  # of switches with 8 ports
        for vertex, data in drawn.nodes(data=True):
            if data["kind"] not in ("gpu", "nvswitch"):
                at = [edge for *_, edge in drawn.edges(vertex, data=True)]
                assert sum(e["cables"] * strands[e["kind"]] for e in at) <= 8
    nics = topo.node.n_nics_per_gpu
    if any(kind == "nic" for kind in cables):
        assert counted.endpoints == topo.n_gpus * nics


# -- closed forms ------------------------------------------------------------------------------------


def load(topo: Topology, src: np.ndarray, dst: np.ndarray, spreading: Spreading, seed: int = 0) -> np.ndarray:
    """[links] transfers of one unit that cross each link."""
    routes = topo.routes(src, dst, spreading, seed)
    return np.bincount(routes.links, weights=routes.share, minlength=len(topo.links().ids))


def of_kind(topo: Topology, values: np.ndarray, *kinds: str) -> np.ndarray:
    return values[np.isin(topo.links().kinds, kinds)]


@pytest.mark.parametrize("name", ["fat-tree-2", "fat-tree-3", "multi-plane"])
@given(st.integers(1, 100))
@settings(max_examples=40, deadline=None)
def test_shifts_of_all_nodes_never_share_a_link_with_modulo_routing(name: str, shift: int) -> None:
    topo = cases()[name]
    if name == "fat-tree-3":  # whole pods, or the shift wraps around in the middle of one
        topo = full_three_layers()
    src = np.arange(topo.n_gpus)
    dst = (src + topo.gpus_per_node * (1 + shift % (topo.nodes - 1))) % topo.n_gpus
    assert load(topo, src, dst, "modulo").max() == 1
    if name != "multi-plane":
        assert load(topo, src, dst, "ideal").max() <= 1 + 1e-9


@functools.cache
def full_three_layers() -> Topology:
    return build_topology(node(4), 32, network("fat-tree", switch_ports="8", layers="3"))


def test_hashing_collides_where_modulo_does_not() -> None:
    topo = full_three_layers()
    src = np.arange(topo.n_gpus)
    dst = (src + 16) % topo.n_gpus
    worst = [load(topo, src, dst, "ecmp", seed).max() for seed in range(5)]
    assert max(worst) >= 2 and len({load(topo, src, dst, "ecmp", s).tobytes() for s in range(5)}) == 5


def test_ideal_spreading_balances_an_oversubscribed_spine_exactly() -> None:
    topo = cases()["fat-tree-2-over"]  # leaves of 6 down and 2 up
    src = np.arange(topo.n_gpus)
    dst = (src + 6 * topo.gpus_per_node) % topo.n_gpus  # every node to the other leaf of its rail
    up = of_kind(topo, load(topo, src, dst, "ideal"), "leaf-spine")
    assert np.allclose(up, 3.0)
    assert of_kind(topo, load(topo, src, dst, "ecmp"), "leaf-spine").max() > 3.0


def test_all_to_all_fills_a_full_bisection_evenly() -> None:
    topo = cases()["fat-tree-2"]
    src, dst = (x.ravel() for x in np.meshgrid(np.arange(topo.n_gpus), np.arange(topo.n_gpus)))
    across = src // 4 != dst // 4
    moved = load(topo, src[across], dst[across], "ideal")
    trunks, nics = of_kind(topo, moved, "leaf-spine"), of_kind(topo, moved, "nic")
    assert np.allclose(nics, 28) and np.allclose(trunks, trunks[0]) and trunks[0] <= 28


def test_a_torus_spreads_a_shift_along_one_ring() -> None:
    topo = cases()["torus-5x4"]
    src = np.arange(20)
    dst = src // 5 * 5 + (src + 1) % 5
    assert np.diff(topo.routes(src, dst).indptr).tolist() == [1] * 20
    tie = src % 5 + (src // 5 + 2) % 4 * 5  # half around the ring of 4: both ways
    assert load(topo, src, tie, "ideal").max() == pytest.approx(1.0)
    assert load(topo, src, tie, "modulo").max() == 2.0


@pytest.mark.parametrize(
    ("name", "target", "kinds"),
    [
        ("supernode", 3, "nvlink nvlink"),
        ("supernode", 4, "nvlink scale-up-trunk scale-up-trunk nvlink"),
        ("rails", 5, "nvlink nvlink nic nic"),
        ("rails-spine", 5, "nic leaf-spine leaf-spine nic"),
    ],
)
def test_what_a_route_crosses(name: str, target: int, kinds: str) -> None:
    assert [link.kind for link in cases()[name].route(0, target)] == kinds.split()


@pytest.mark.parametrize("name", ["dragonfly-4", "dragonfly-7", "dragonfly-9"])
def test_dragonfly_groups_are_all_joined_and_use_their_ports(name: str) -> None:
    topo, drawn = cases()[name], graph(name)
    groups = {int(name[7:].split(".")[0]) for name in drawn if name.startswith("router")}
    between: dict[tuple[int, int], int] = {}
    ports = dict.fromkeys(groups, 0)
    for a, b, edge in drawn.edges(data=True):
        if edge["kind"] == "global":
            one, other = sorted(int(x[7:].split(".")[0]) for x in (a, b))
            between[one, other] = between.get((one, other), 0) + edge["cables"]
            ports[one] += edge["cables"]
            ports[other] += edge["cables"]
    g = len(groups)
    assert len(between) == g * (g - 1) // 2
    assert max(between.values()) - min(between.values()) <= 1
    assert all(8 - 2 < n <= 8 for n in ports.values())
    assert topo.inventory().cables["local"] == g * 6


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("nvl72", {"nvlink"}, {"nic", "leaf-spine"}),
        ("mesh", {"mesh"}, set()),
        ("torus-5x4", {"torus"}, set()),
        ("supernode", {"nvlink", "scale-up-trunk"}, {"nic", "leaf-spine"}),
        ("dragonfly-4", {"nvlink"}, {"nic", "local", "global"}),
        ("edge-list", set(), {"edge"}),
    ],
)
def test_links_tell_scale_up_from_scale_out(name: str, inside: set[str], outside: set[str]) -> None:
    links = cases()[name].links()
    kinds = np.array(links.kinds)
    assert set(kinds[links.scale_up]) == inside
    assert set(kinds[~links.scale_up]) == outside


# -- bad input ---------------------------------------------------------------------------------------


def test_bad_pairs_are_refused() -> None:
    topo = cases()["nvswitch"]
    with pytest.raises(InputError, match=r"no GPU 8.*0 to 7"):
        topo.routes(np.array([0]), np.array([8]))
    with pytest.raises(InputError, match="2 sources but 1 destinations"):
        topo.routes(np.array([0, 1]), np.array([1]))
    with pytest.raises(InputError, match=r"'modula' is not one of .*nearest: 'modulo'"):
        topo.routes(np.array([0]), np.array([1]), cast("Spreading", "modula"))
    with pytest.raises(InputError, match="one-dimensional"):
        topo.routes(np.array([0.5]), np.array([1]))
    empty = topo.routes(np.zeros(0, np.int64), np.zeros(0, np.int64), "ideal")
    assert empty.indptr.tolist() == [0] and len(empty.links) == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: network("fat-tree", switch_ports="8", oversubscription="2"), "does not divide the 8 ports"),
        (lambda: network("fat-tree", switch_ports="7"), "must be even"),
        (lambda: network("fat-tree", switch_ports="8", layers="4"), "2 or 3 layers"),
        (lambda: network("fat-tree", switch_ports="8", planes="2"), "has 1 plane"),
        (lambda: network("fat-tree", switch_ports="8", link_bandwidth="0 GB/s"), "nearest: 1 MB/s"),
        (lambda: network("rail-optimised", switch_ports="8", cross_rail="x"), "forward, spine"),
        (lambda: network("hypercube", switch_ports="8"), "unknown kind 'hypercube'"),
        (lambda: network("single-node", switch_ports="8"), "no fabric"),
        (
            lambda: network(
                "dragonfly", switch_ports="8", endpoints_per_switch="4", switches_per_group="4",
                global_links_per_switch="2",
            ),
            "need 9 ports",
        ),
        (
            lambda: build_topology(node(4), 200, network("fat-tree", switch_ports="8", layers="3")),
            "at most 8 pods",
        ),
        (
            lambda: build_topology(
                node(4), 99, network("dragonfly", switch_ports="8", endpoints_per_switch="2",
                                     switches_per_group="4", global_links_per_switch="2"),
            ),
            "at most 9 groups",
        ),
    ],
)  # fmt: skip
def test_networks_that_cannot_be_built(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()  # type: ignore[operator]


# -- large networks and buildings, with networkx as the judge ---------------------------------------


def cut(topo: Topology, gpus: range, rest: range) -> float:
    """Most bytes/s from some GPUs to others through switches, by networkx' maximum flow."""
    flow = nx.DiGraph()
    for one, other, edge in topo.graph().edges(data=True):
        for ends in ((one, other), (other, one)):
            flow.add_edge(*ends, capacity=edge["cables"] * edge["bytes_per_s"])
    for gpu in gpus:
        flow.add_edge("from", f"gpu:{gpu}", capacity=1e15)
    for gpu in rest:
        flow.add_edge(f"gpu:{gpu}", "to", capacity=1e15)
    return float(nx.maximum_flow_value(flow, "from", "to"))


@pytest.mark.parametrize("name", ["buildings", "buildings-3", "buildings-planes", "buildings-fly", "rails-3"])
def test_what_leaves_a_domain_is_what_its_tier_says(name: str) -> None:
    topo = cases()[name]
    tier = topo.tiers()[-1]
    others = topo.n_gpus // tier.gpus - 1 if tier.to_each else 1
    flow = cut(topo, range(tier.gpus), range(tier.gpus, topo.n_gpus))
    assert flow == pytest.approx(tier.bytes_per_s * others, rel=1e-9)


def test_a_message_to_another_building_takes_the_fibre_longer() -> None:
    topo = cases()["buildings"]
    near, far = (sum(link.latency_s for link in topo.route(0, gpu)) for gpu in (topo.tiers()[0].gpus - 1, 47))
    assert far - near == pytest.approx(40e3 * 1.4682 / 299_792_458)


@pytest.mark.parametrize(
    ("name", "nodes", "hops"),
    [("ft3-roce-400g", 12500, 6), ("mpft-roce-400g", 16384, 6), ("dragonfly-ib-400g", 16384, 5)],
)
def test_networks_of_100_000_endpoints_have_the_published_layers(name: str, nodes: int, hops: int) -> None:
    """Colossus: 100,000 GPUs, three tiers: six links; two layers and forwarding; a dragonfly."""
    topo = build_topology(node(), nodes, load_network(name))
    others = np.linspace(0, 8 * nodes - 1, 400).astype(np.int64)
    assert np.diff(topo.routes(np.zeros_like(others), others).indptr).max() == hops


def test_two_layers_of_512_ports_join_131_072_endpoints() -> None:
    """Broadcom on Tomahawk 6: 512 ports of 200 Gb/s join over 128,000 accelerators in two tiers."""
    trees = Trees.for_leaves(1, 512, 512)
    assert (512 * 256, trees.spines, trees.cables) == (131_072, 256, 131_072)
    with pytest.raises(InputError, match="at most 512 leaves"):
        Trees.for_leaves(1, 513, 512)


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        (SITES | {"count": "5"}, "nearest nodes: 10, 15; counts that divide: 2, 3, 4, 6, 12"),
        ({"count": "2", "bandwidth": "1 GB/s"}, "one of latency and distance"),
        (SITES | {"oversubscription": "3"}, "one of bandwidth and oversubscription of the link"),
        (SITES | {"count": "1"}, "nearest: 2"),
    ],
)
def test_buildings_that_cannot_be(sites: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_topology(node(4), 12, network("fat-tree", sites, switch_ports="8"))
