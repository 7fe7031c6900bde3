"""Every algorithm moves what it must, and its closed form is what its flows put on the links."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.simulator.cost.collectives import exchange, nvls, ring, tree
from moesim.simulator.cost.collectives.flows import (
    Flows,
    LinkLoads,
    Operation,
    flows_of,
    group_by_node,
    link_loads,
)

SIZE = 1e9
RINGS: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")


def place(nodes: int, network: str = "mrft-ib-400g", node: str = "hgx-h200") -> Topology:
    return build_topology(load_node(node), nodes, load_network(network if nodes > 1 else "single-node"))


def loads_of(flows: Flows, topology: Topology) -> tuple[LinkLoads, float, float]:
    """(all, largest on a NIC, largest on a scale-up link)"""
    loads = link_loads(flows, topology)
    nic, nvlink = (loads.of_kind(kind) for kind in ("nic", "nvlink"))
    return loads, max(nic.values(), default=0.0), max(nvlink.values(), default=0.0)


# -- rings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mrft-ib-400g", "mpft-ib-400g"])
@pytest.mark.parametrize("operation", RINGS)
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_ring_flows_load_the_links_as_the_closed_form_says(
    operation: Operation, nodes: int, network: str
) -> None:
    topology = place(nodes, network)
    plan = ring.plan(operation, SIZE, group_by_node(range(8 * nodes), 8))
    _, nic, nvlink = loads_of(plan.phases[0].flows, topology)
    expected = ring.busiest_bytes(operation, SIZE, 8 * nodes, 8)
    assert (nic, nvlink) == pytest.approx(expected, rel=1e-12)


def test_crossings_stay_on_their_rail_for_an_even_number_of_nodes() -> None:
    topology = place(4)
    for rail in range(8):
        order = ring.ring_order(group_by_node(range(32), 8), rail)
        for a, b in zip(order, (*order[1:], order[0]), strict=True):
            if topology.node_of(a) != topology.node_of(b):
                assert a % 8 == b % 8


def test_a_ring_on_part_of_the_nodes_uses_the_nics_of_its_members() -> None:
    topology = place(4)
    members = [node * 8 + local for node in range(4) for local in (2, 5)]
    plan = ring.plan("all_gather", SIZE, group_by_node(members, 8))
    loads, nic, nvlink = loads_of(plan.phases[0].flows, topology)
    assert (nic, nvlink) == pytest.approx(ring.busiest_bytes("all_gather", SIZE, 8, 2))
    used = {link.split("->")[0] for link in loads.ids if link.startswith("gpu")}
    assert used == {f"gpu:{m}" for m in members}


@given(st.integers(2, 64), st.floats(1.0, 1e12))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: int, size: float) -> None:
    whole = ring.busiest_bytes("all_reduce", size, ranks, 8)
    parts = [ring.busiest_bytes(o, size, ranks, 8) for o in ("reduce_scatter", "all_gather")]
    assert whole == pytest.approx([sum(p) for p in zip(*parts, strict=True)])


def test_there_is_no_ring_all_to_all() -> None:
    with pytest.raises(InputError, match="no ring for 'all_to_all'"):
        ring.plan("all_to_all", SIZE, group_by_node(range(8), 8))


# -- trees -------------------------------------------------------------------------------------------


def children(parents: tuple[int | None, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(parents):
        if parent is not None:
            found[parent].append(node)
    return found


@pytest.mark.parametrize("nodes", range(1, 40))
def test_both_trees_span_the_nodes_and_share_no_inner_node(nodes: int) -> None:
    inner = []
    for parents in tree.double_tree(nodes):
        assert len(parents) == nodes
        assert parents.count(None) == 1
        below = children(parents)
        assert all(len(kids) <= 2 for kids in below.values())
        inner.append(set(below))
        for node in range(nodes):
            seen, at = 0, node
            while (up := parents[at]) is not None:
                at, seen = up, seen + 1
                assert seen <= nodes.bit_length() + 1
    # One node can be inner in both where an odd number of nodes leaves a root over.
    assert len(inner[0] & inner[1]) <= 1


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_tree_sends_up_and_down_what_a_ring_sends_around(nodes: int) -> None:
    """No NIC carries more than both halves both ways; together they carry the edges of both trees."""
    topology = place(nodes)
    flows = tree.plan("all_reduce", SIZE, group_by_node(range(8 * nodes), 8)).phases[0].flows
    loads, nic, _ = loads_of(flows, topology)
    assert nic <= 2 * SIZE / 8 * (1 + 1e-12)
    out = sum(size for link, size in loads.of_kind("nic").items() if link.startswith("gpu"))
    assert out == pytest.approx(2 * (nodes - 1) * 2 * 8 * SIZE / 16)


# -- in the switch, direct ---------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_switch_reduction_sends_the_buffer_once_and_a_part_of_it(ranks: int) -> None:
    flows = nvls.plan("all_reduce", SIZE, group_by_node(range(ranks), 8)).phases[0].flows
    loads, _, nvlink = loads_of(flows, place(1))
    assert list(loads.bytes) == pytest.approx([SIZE * (1 + 1 / ranks)] * 2 * ranks)
    less_than_ring = nvlink < ring.busiest_bytes("all_reduce", SIZE, ranks, 8)[1]
    assert less_than_ring == (ranks > 3)


def test_in_switch_reduction_stays_on_one_switch() -> None:
    with pytest.raises(InputError, match="spans 2 nodes: use a ring"):
        nvls.plan("all_reduce", SIZE, group_by_node(range(16), 8))


@pytest.mark.parametrize("network", ["mrft-ib-400g", "mpft-ib-400g"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_an_all_to_all_keeps_to_its_rails_and_to_its_closed_form(nodes: int, network: str) -> None:
    topology = place(nodes, network)
    flows = exchange.all_to_all("all_to_all", SIZE, group_by_node(range(8 * nodes), 8)).phases[0].flows
    for src, dst in zip(flows.src.tolist(), flows.dst.tolist(), strict=True):
        assert topology.node_of(src) == topology.node_of(dst) or src % 8 == dst % 8
    _, nic, nvlink = loads_of(flows, topology)
    assert (nic, nvlink) == pytest.approx((SIZE * (nodes - 1) / nodes, SIZE * 7 / 8))  # eq. X11


def test_sends_go_where_they_are_told() -> None:
    plan = exchange.sends(5.0, [(0, 8), (1, 9)], across_nodes=True)
    flows = plan.phases[0].flows
    assert list(zip(flows.src, flows.dst, flows.bytes, strict=True)) == [(0, 8, 5.0), (1, 9, 5.0)]
    assert (plan.phases[0].hops.scale_up, plan.phases[0].hops.network) == (0, 1)


# -- plans -------------------------------------------------------------------------------------------


def test_flows_add_up_equal_pairs_and_leave_out_a_gpu_to_itself() -> None:
    flows = flows_of([(1, 0, 2.0), (0, 1, 1.0), (1, 0, 3.0), (2, 2, 9.0), (3, 4, 0.0)])
    assert list(zip(flows.src, flows.dst, flows.bytes, strict=True)) == [(0, 1, 1.0), (1, 0, 5.0)]


@pytest.mark.parametrize("ranks", [[], [3], [1, 1]])
def test_a_group_has_at_least_two_different_ranks(ranks: list[int]) -> None:
    with pytest.raises(InputError, match="at least 2 different ranks"):
        group_by_node(ranks, 8)
